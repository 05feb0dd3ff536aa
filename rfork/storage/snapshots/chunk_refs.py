"""Who may write and remove shared chunks at once: two kinds of notes beside them, so that none goes missing.

A writer notes which chunks it counts on before it looks whether they are there; who removes chunks notes
that before it looks who counts on them. Each heeds the other's note, so of two that meet one sees the other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import uuid4

from rfork.errors import StorageError, StorageNotFound
from rfork.logs import logger
from rfork.storage.blob import BlobStore
from rfork.storage.snapshots.files import MANIFEST_SUFFIX, ManifestFile, manifest_name

log = logger(__name__)

PENDING_NAME_PATTERN = re.compile(rf"(?P<name>.+){re.escape(MANIFEST_SUFFIX)}\.[0-9a-f]{{32}}\.pending")
"""A note beside the manifest that is to come, of the same content."""
REMOVING = "removing-"
"""What a note in the folder of chunks begins with while somebody removes some of them."""
NOTE_OF_REMOVAL = re.compile(rf"(.*/)?{REMOVING}[0-9a-f]{{32}}")


@contextmanager
def pending_write(
    store: BlobStore, name: str, manifest_file: ManifestFile, chunks: BlobStore
) -> Iterator[Callable[[], None]]:
    """Count on the shared chunks of `manifest_file`, whose manifest is written to `store` inside the block.

    To be called right before that: what the block is given. It raises StorageError where the note was
    removed meanwhile as a leftover, and chunks with it. So does the block's beginning where somebody removes
    chunks at this moment.
    """
    note = f"{manifest_name(name)}.{uuid4().hex}.pending"
    put(store, note, manifest_file.model_dump_json().encode())
    try:
        if active_deletes(chunks):
            raise StorageError(
                f"{chunks.uri}: somebody removes chunks there now",
                hint="try again; if that died half-way, `rfork snapshot rm --leftovers` ends its work",
            )
        yield lambda: _still_there(store, note)
    except BaseException:
        best_effort_remove(store, note)
        raise
    store.remove(note)


@contextmanager
def pending_delete(chunks: BlobStore) -> Iterator[None]:
    """Remove chunks inside the block that nobody counts on by then."""
    note = f"{REMOVING}{uuid4().hex}"
    put(chunks, note, b"")
    try:
        yield
    finally:
        chunks.remove(note)


def active_deletes(chunks: BlobStore) -> list[str]:
    """The notes of those who remove chunks now, or died while they did."""
    try:
        return [entry.name for entry in chunks.list(REMOVING)]
    except StorageNotFound:  # a folder that is not there yet
        return []


def best_effort_remove(store: BlobStore, name: str) -> None:
    """Remove what an error made useless. What went wrong before counts, and `ls` shows what stays."""
    try:
        store.remove(name)
    except StorageError as error:
        log.warning("a leftover could not be removed", name=f"{store.uri}{name}", detail=str(error))


def put(store: BlobStore, name: str, content: bytes) -> None:
    """Write one small blob."""
    with store.write(name) as writer:
        writer.write([memoryview(content)])


def _still_there(store: BlobStore, note: str) -> None:
    try:
        store.open(note).close()
    except StorageNotFound:
        raise StorageError(
            f"{store.uri}: somebody removed the leftovers of writers while this one wrote",
            hint="write the snapshot again",
        ) from None

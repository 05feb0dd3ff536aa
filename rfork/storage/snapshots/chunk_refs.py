"""Coordinates writers and deleters of shared chunks with two types of marker files, so that no referenced
chunk is lost.

A writer marks the chunks it references before it checks which exist; a deleter marks that it is deleting
before it checks which chunks are referenced. Each then checks for the other's marker, so that at least one of
two concurrent processes sees the other.
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

WRITE_MARKER_PATTERN = re.compile(rf"(?P<name>.+){re.escape(MANIFEST_SUFFIX)}\.[0-9a-f]{{32}}\.pending")
"""Writer's marker, stored next to the future manifest with the same content."""
DELETE_MARKER_PREFIX = "removing-"
"""Name prefix of a deleter's marker in the folder of chunks."""
DELETE_MARKER_PATTERN = re.compile(rf"(.*/)?{DELETE_MARKER_PREFIX}[0-9a-f]{{32}}")


@contextmanager
def pending_write(
    store: BlobStore, name: str, manifest_file: ManifestFile, chunks: BlobStore
) -> Iterator[Callable[[], None]]:
    """Reference the shared chunks of `manifest_file`, whose manifest is written to `store` within the block.

    The block must call the yielded function just before it writes the manifest. The function raises
    StorageError if the marker was removed as a leftover meanwhile, possibly with chunks. Entering the block
    raises StorageError while another process is deleting chunks.
    """
    marker = f"{manifest_name(name)}.{uuid4().hex}.pending"
    write_blob(store, marker, manifest_file.model_dump_json().encode())
    try:
        if active_deletes(chunks):
            raise StorageError(
                f"{chunks.uri}: another process is deleting chunks here",
                hint="try again; if that process died, clean up with `rfork snapshot rm --leftovers`",
            )
        yield lambda: _check_marker(store, marker)
    except BaseException:
        best_effort_remove(store, marker)
        raise
    store.remove(marker)


@contextmanager
def pending_delete(chunks: BlobStore) -> Iterator[None]:
    """Mark that unreferenced chunks are deleted within the block."""
    marker = f"{DELETE_MARKER_PREFIX}{uuid4().hex}"
    write_blob(chunks, marker, b"")
    try:
        yield
    finally:
        chunks.remove(marker)


def active_deletes(chunks: BlobStore) -> list[str]:
    """Return the markers of processes that delete chunks, or died doing so."""
    try:
        return [entry.name for entry in chunks.list(DELETE_MARKER_PREFIX)]
    except StorageNotFound:  # the folder does not exist yet
        return []


def best_effort_remove(store: BlobStore, name: str) -> None:
    """Remove a file after an error. Failures are only logged: the original error counts, and `ls` lists
    leftovers.
    """
    try:
        store.remove(name)
    except StorageError as error:
        log.warning("failed to remove a leftover file", name=f"{store.uri}{name}", reason=str(error))


def write_blob(store: BlobStore, name: str, content: bytes) -> None:
    """Write one small blob."""
    with store.write(name) as writer:
        writer.write([memoryview(content)])


def _check_marker(store: BlobStore, marker: str) -> None:
    try:
        store.open(marker).close()
    except StorageNotFound:
        raise StorageError(
            f"{store.uri}: another process removed leftovers during the write, including the marker of this writer",
            hint="write the snapshot again",
        ) from None

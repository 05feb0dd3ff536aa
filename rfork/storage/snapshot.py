"""A snapshot: one safetensors file whose data section is an image, and its manifest beside it.

Chunk ``[a, b)`` of the image is file range ``[header + a, header + b)``. The manifest lies in
``FILE.manifest.json``, so the weights_id is known, and each chunk can be told right from wrong, before
anything is read. Runs on the target; `write_snapshot` wherever the weights are.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rfork.errors import CheckpointError, StorageError
from rfork.fields import HexId, StorageKind
from rfork.image.layout import Layout
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.image.safetensors_header import header, header_length, layout_of, weights_id_of
from rfork.storage.files import MOST_BUFFERS, DataFile, path_of

MANIFEST_SUFFIX = ".manifest.json"
LONGEST_MANIFEST = 64 << 20


class ManifestFile(BaseModel):
    """The JSON file beside a snapshot."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["rfork-manifest-v1"] = "rfork-manifest-v1"
    layout_id: HexId
    weights_id: HexId
    image_bytes: int = Field(ge=0)
    digests: tuple[HexId, ...] = Field(description="one a chunk, in chunk order")


class Snapshot:
    """A snapshot file of a layout; see `rfork.storage.base.Storage`."""

    kind: StorageKind = "snapshot"

    def __init__(self, uri: str, data: DataFile, begin: int, manifest: Manifest) -> None:
        """`begin` is where the data section starts in the file."""
        self.uri = uri
        self.manifest = manifest
        self.origin = manifest.weights_id
        self._data = data
        self._begin = begin

    @classmethod
    def open(cls, uri: str, layout: Layout) -> Self:
        """Open the snapshot at a ``file://`` URI for images of `layout`.

        Raises SettingsError (no such kind of URI), CheckpointError (a snapshot of something else, or
        without its manifest) or StorageError (it cannot be read, or is cut short).
        """
        path = path_of(uri)
        data = DataFile(path)
        try:
            begin = header_length(data.part(0, 8)) if data.size >= 8 else header_length(b"")
            head = data.part(0, begin)
            difference = layout.first_difference(layout_of(head))
            if difference is not None:
                raise CheckpointError(f"{path} is of another layout; first difference: {difference}")
            if data.size != begin + layout.image_bytes:
                raise StorageError(
                    f"{path} has {data.size} bytes, its header promises {begin + layout.image_bytes}"
                )
            manifest = _read_manifest(manifest_path(path), layout)
            if weights_id_of(head) not in (None, manifest.weights_id):
                raise CheckpointError(f"{path} and {manifest_path(path).name} are of different weights")
        except BaseException:
            data.close()
            raise
        return cls(uri, data, begin, manifest)

    def read(self, begin: int, end: int, into: Sequence[memoryview]) -> None:
        """See `Storage.read`."""
        self._data.read(self._begin + begin, into)

    def close(self) -> None:
        """See `Storage.close`."""
        self._data.close()


def manifest_path(path: Path) -> Path:
    """Where the manifest of the snapshot at `path` lies."""
    return path.with_name(path.name + MANIFEST_SUFFIX)


def write_snapshot(
    image: Image, manifest: Manifest, path: Path, progress: Callable[[int], None] | None = None
) -> None:
    """Write an image and its manifest; what lies at `path` is replaced once both are on the disk.

    `progress` is told the bytes of each chunk written. Raises StorageError.
    """
    described = ManifestFile(
        layout_id=image.layout.layout_id,
        weights_id=manifest.weights_id,
        image_bytes=image.layout.image_bytes,
        digests=tuple(digest.hex() for digest in manifest.digests),
    )
    target, beside = _temporary(path), _temporary(manifest_path(path))
    try:
        try:
            with target.open("wb", buffering=0) as file:
                _write(file.fileno(), [memoryview(header(image.layout, manifest.weights_id))])
                for begin, end in image.layout.chunks:
                    with image.readable(begin, end) as views:
                        _write(file.fileno(), views)
                    if progress is not None:
                        progress(end - begin)
                os.fsync(file.fileno())
            with beside.open("w", encoding="ascii") as text:
                text.write(described.model_dump_json())
                text.flush()
                os.fsync(text.fileno())
            target.replace(path)
            beside.replace(manifest_path(path))
            _settle(path.parent)
        finally:
            target.unlink(missing_ok=True)
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from None


def _read_manifest(path: Path, layout: Layout) -> Manifest:
    try:
        if path.stat().st_size > LONGEST_MANIFEST:
            raise StorageError(f"{path} is too long for a manifest")
        text = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path.name} is missing beside the snapshot {path.parent}") from None
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from None
    try:
        told = ManifestFile.model_validate_json(text)
        manifest = Manifest(layout, tuple(bytes.fromhex(digest) for digest in told.digests))
    except ValidationError as error:
        raise CheckpointError(f"{path} is not a manifest: {error.errors()[0]['msg']}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} does not fit the snapshot: {error}") from None
    if (told.layout_id, told.image_bytes) != (layout.layout_id, layout.image_bytes):
        raise CheckpointError(f"{path} is of another layout than its snapshot")
    if told.weights_id != manifest.weights_id:
        raise CheckpointError(f"{path}: its digests do not hash to its weights_id")
    return manifest


def _temporary(path: Path) -> Path:
    # Not by the process's number: on a shared folder two machines may write with one number.
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def _settle(folder: Path) -> None:
    """Have the folder's new names on the disk too."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(descriptor: int, views: Sequence[memoryview]) -> None:
    left = [view for view in views if view.nbytes]
    first = 0
    while first < len(left):
        count = os.writev(descriptor, left[first : first + MOST_BUFFERS])
        while first < len(left) and count >= left[first].nbytes:
            count -= left[first].nbytes
            first += 1
        if count:
            left[first] = left[first][count:]

"""A snapshot as a whole: every chunk is checked against its digest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from rfork.errors import CheckpointError, StorageChanged, StorageDenied
from rfork.image.arena import dtype_of, tensors_of
from rfork.image.memory import Image
from rfork.settings import StorageSettings
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.location import Location
from rfork.storage.reading.staging import fresh
from rfork.storage.snapshots.files import open_files
from rfork.storage.snapshots.snapshot import Snapshot
from rfork.storage.tensors import TensorSource


def snapshot_of(source: TensorSource, asked: str | Path, settings: StorageSettings) -> Snapshot | None:
    """The snapshot that a source is, for the caller to close; None: it is none, or its manifest is not there.

    `asked` is the URI as the caller gave it. Raises StorageChanged where it was replaced since the source was
    opened, and StorageError kinds.
    """
    if not isinstance(source, SafetensorsSource) or source.layout is None:
        return None
    (shard,) = source.shards
    place, given = Location.parse(source.uri), Location.parse(asked)
    if not place.name:  # a folder, of an index or of just this one
        place = place.child(shard.name)
    elif given.uri == place.uri:
        place = given  # with a presigned URL's query
    name = place.name + (f"?{place.query}" if place.query else "")
    try:
        files = open_files(place.parent, name, settings)
    except (CheckpointError, StorageDenied):
        # Without its manifest it is a safetensors file like any other. S3 says of missing names that they are
        # denied to who may not list them.
        return None
    try:
        if files.told.layout_id != source.layout.layout_id:
            raise StorageChanged(f"{files.uri} was replaced by a snapshot of another layout")
        return Snapshot(files, source.layout, settings)
    except BaseException:
        files.data.close()
        raise


def restored(
    source: TensorSource,
    asked: str | Path,
    device: torch.device | str,
    settings: StorageSettings,
    progress: Callable[[int], None] | None,
) -> dict[str, torch.Tensor] | None:
    """All tensors of a snapshot, verified, by name, as views of one fresh allocation on `device`.

    Those that are tied in the snapshot share memory. None as `snapshot_of`, and where the source leaves out
    some of what its file holds. Raises as that does, and StorageCorrupt.
    """
    snapshot = snapshot_of(source, asked, settings)
    if snapshot is None or not isinstance(source, SafetensorsSource):
        return None
    with closing(snapshot):
        layout = snapshot.manifest.layout
        if len(source.places) != len(layout.tensors):
            return None
        # Only a CPU reads items that do not lie at multiples of their size.
        crooked = any(spec.offset % dtype_of(spec).itemsize for spec in layout.tensors)
        if crooked or torch.device(device).type == "cpu":
            buffer = fresh(layout.image_bytes, snapshot.told.header_bytes)
        else:
            buffer = torch.empty(layout.image_bytes, dtype=torch.uint8, device=device)
        snapshot.fill(Image(layout, [buffer]), progress=progress)
    found = tensors_of(layout, buffer)
    return {name: tensor.to(device) for name, tensor in found.items()} if crooked else found

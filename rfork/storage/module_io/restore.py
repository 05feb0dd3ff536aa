"""A snapshot as a whole: every chunk is checked against its digest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from rfork.errors import CheckpointError, StorageAccessDenied, StorageChanged
from rfork.image.buffer_views import dtype_of, tensor_views
from rfork.image.memory import Image
from rfork.settings import StorageSettings
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.io.staging import allocate_host
from rfork.storage.location import Location
from rfork.storage.snapshots.files import open_files
from rfork.storage.snapshots.snapshot import Snapshot
from rfork.storage.tensors import TensorSource


def open_snapshot_of(source: TensorSource, requested_uri: str | Path, settings: StorageSettings) -> Snapshot | None:
    """The snapshot that a source is, for the caller to close; None: it is none, or its manifest is not there.

    `requested_uri` is the URI as the caller gave it. Raises StorageChanged where it was replaced since the source was
    opened, and StorageError kinds.
    """
    if not isinstance(source, SafetensorsSource) or source.layout is None:
        return None
    (shard,) = source.shards
    location, requested_location = Location.parse(source.uri), Location.parse(requested_uri)
    if not location.name:  # a folder, of an index or of just this one
        location = location.child(shard.name)
    elif requested_location.uri == location.uri:
        location = requested_location  # with a presigned URL's query
    name = location.name + (f"?{location.query}" if location.query else "")
    try:
        files = open_files(location.parent, name, settings)
    except (CheckpointError, StorageAccessDenied):
        # Without its manifest it is a safetensors file like any other. S3 says of missing names that they are
        # denied to who may not list them.
        return None
    try:
        if files.manifest_file.layout_id != source.layout.layout_id:
            raise StorageChanged(f"{files.uri} was replaced by a snapshot of another layout")
        return Snapshot(files, source.layout, settings)
    except BaseException:
        files.data.close()
        raise


def restore_snapshot(
    source: TensorSource,
    requested_uri: str | Path,
    device: torch.device | str,
    settings: StorageSettings,
    progress: Callable[[int], None] | None,
) -> dict[str, torch.Tensor] | None:
    """All tensors of a snapshot, verified, by name, as views of one fresh allocation on `device`.

    Those that are tied in the snapshot share memory. None as `open_snapshot_of`, and where the source leaves out
    some of what its file holds. Raises as that does, and StorageCorrupt.
    """
    snapshot = open_snapshot_of(source, requested_uri, settings)
    if snapshot is None or not isinstance(source, SafetensorsSource):
        return None
    with closing(snapshot):
        layout = snapshot.manifest.layout
        if len(source.locations) != len(layout.tensors):
            return None
        # Only a CPU reads items that do not lie at multiples of their size.
        crooked = any(spec.offset % dtype_of(spec).itemsize for spec in layout.tensors)
        if crooked or torch.device(device).type == "cpu":
            buffer = allocate_host(layout.image_bytes, snapshot.manifest_file.header_bytes)
        else:
            buffer = torch.empty(layout.image_bytes, dtype=torch.uint8, device=device)
        snapshot.fill(Image(layout, [buffer]), progress=progress)
    found = tensor_views(layout, buffer)
    return {name: tensor.to(device) for name, tensor in found.items()} if crooked else found

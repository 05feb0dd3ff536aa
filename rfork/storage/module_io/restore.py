"""Restores complete snapshots and verifies every chunk against its digest."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from rfork.errors import CheckpointError, StorageAccessDenied, StorageChanged
from rfork.image.layout import dtype_of, tensor_views
from rfork.image.memory import Image
from rfork.image.staging import allocate_host
from rfork.settings import StorageSettings
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.location import Location
from rfork.storage.snapshots.files import open_files
from rfork.storage.snapshots.snapshot import Snapshot
from rfork.storage.tensors import TensorSource


def open_snapshot_of(source: TensorSource, requested_uri: str | Path, settings: StorageSettings) -> Snapshot | None:
    """Return the snapshot of a source, which the caller closes; None if it is not a snapshot or has no
    manifest.

    `requested_uri` is the URI as the caller passed it. Raises StorageChanged if it was replaced since the
    source was opened, and StorageError subclasses.
    """
    if not isinstance(source, SafetensorsSource) or source.layout is None:
        return None
    (shard,) = source.shards
    location, requested_location = Location.parse(source.uri), Location.parse(requested_uri)
    if not location.name:  # a folder, with an index or only this file
        location = location.child(shard.name)
    elif requested_location.uri == location.uri:
        location = requested_location  # includes the query of a presigned URL
    name = location.name + (f"?{location.query}" if location.query else "")
    try:
        files = open_files(location.parent, name, settings)
    except (CheckpointError, StorageAccessDenied):
        # Without a manifest, it is a plain safetensors file. If listing is not allowed, S3 reports a missing
        # name as access denied.
        return None
    try:
        if files.manifest_file.layout_id != source.layout.layout_id:
            raise StorageChanged(f"{files.uri} was replaced by a snapshot with another layout")
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
    """Return all tensors of a snapshot, verified, by name, as views of one new allocation on `device`.

    Tensors that are tied in the snapshot share memory. Returns None like `open_snapshot_of`, and if the
    source omits some tensors of its file. Raises the same errors, and StorageCorrupt.
    """
    snapshot = open_snapshot_of(source, requested_uri, settings)
    if snapshot is None or not isinstance(source, SafetensorsSource):
        return None
    with closing(snapshot):
        layout = snapshot.manifest.layout
        if len(source.locations) != len(layout.tensors):
            return None
        # Only a CPU can read unaligned items.
        crooked = any(spec.offset % dtype_of(spec).itemsize for spec in layout.tensors)
        if crooked or torch.device(device).type == "cpu":
            buffer = allocate_host(layout.image_bytes, snapshot.manifest_file.header_bytes)
        else:
            buffer = torch.empty(layout.image_bytes, dtype=torch.uint8, device=device)
        snapshot.fill(Image(layout, [buffer]), progress=progress)
    found = tensor_views(layout, buffer)
    return {name: tensor.to(device) for name, tensor in found.items()} if crooked else found

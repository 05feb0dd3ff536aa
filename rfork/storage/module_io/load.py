"""Loads tensor files from any storage into a module that exists or was built without memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from rfork import settings as options
from rfork.errors import CheckpointError, SettingsError, StorageAccessDenied, StorageChanged, UnsupportedTensor
from rfork.gc_pause import gc_paused
from rfork.image.capture import capture
from rfork.image.layout import dtype_of, tensor_views
from rfork.image.memory import Image, check_writable
from rfork.image.module_tensors import named_tensors
from rfork.image.staging import allocate_host
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage.blob import Blob
from rfork.storage.formats.detect import open_source
from rfork.storage.formats.relayout import is_bytewise
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.io.extents import ExtentTable
from rfork.storage.location import Location
from rfork.storage.module_io.assignment import (
    TensorAssignment,
    assign,
    assign_state,
    copy_into,
    stored_names,
)
from rfork.storage.module_io.module_state import LoadableTensors, replace_tensors
from rfork.storage.module_io.no_init import as_parameter
from rfork.storage.snapshots.entry import open_files
from rfork.storage.snapshots.snapshot import Snapshot
from rfork.storage.tensorizer.file_set import resolve_template
from rfork.storage.tensors import TensorSource

GIGABYTE = 1e9


def check_device(device: torch.device | str) -> None:
    """Raise SettingsError for a device on which this process cannot have tensors."""
    try:
        found = torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError) as error:  # torch may raise any of them
        why = str(error).partition("\n")[0]
        raise SettingsError(f"device {str(device)!r} cannot be used: {why}") from None
    if found.type == "meta":
        raise SettingsError("tensors on the meta device have no memory to load into")


def check_load(rank: object, dtype: object) -> None:
    """Raise SettingsError for arguments of `load` with a wrong type."""
    if rank is not None and not isinstance(rank, Rank):
        raise SettingsError(
            f"rank must be a Rank, not a {type(rank).__name__}", hint="e.g. rank=rfork.Rank(tp=0, tp_size=2)"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise SettingsError(f"dtype must be a torch.dtype, not a {type(dtype).__name__}")


def unique_names(names: Iterable[str] | None) -> frozenset[str] | None:
    """Return the names without duplicates; None (all) stays None. Raises SettingsError for a plain string."""
    if isinstance(names, (str, bytes)):
        raise SettingsError(f"names must be a list: use [{names!r}] instead of {names!r}")
    return None if names is None else frozenset(names)


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
    name = location.blob_name
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


@dataclass(frozen=True, slots=True)
class LoadReport:
    """Result of one load.

    `uri` is the source, `seconds` the duration, `tensors` the number of tensors; `bytes` counts the stored
    bytes, each once; `missing` are names of the module that are not stored, `unexpected` stored names that
    the module does not have; both are empty if `strict`. `verified`: the source was a snapshot, and every
    chunk was checked against its digest; see `load`.
    """

    uri: str
    bytes: int
    seconds: float
    tensors: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    verified: bool = False

    @property
    def gb_per_s(self) -> float:
        """Gigabytes (10^9 bytes) per second, from the call until the last tensor was loaded."""
        return self.bytes / GIGABYTE / self.seconds


def load(
    module: nn.Module,
    uri: str | Path,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    device: torch.device | str = "cpu",
    rank: Rank | None = None,
    key: bytes | None = None,
    password: str | None = None,
    settings: StorageSettings | None = None,
    progress: Callable[[int], None] | None = None,
) -> LoadReport:
    """Fill `module` from a URI or path: Hugging Face folder, safetensors, snapshot or ``.tensors``.

    Runs in the calling process, without a planner. `uri` is a path, or ``file:``, ``s3:``, ``gs:``, ``az:``
    or ``http(s):``; `settings` default to those of the environment. Tensors are read directly into the
    module's memory on any device; other dtypes are converted to those of the module, regardless of `dtype`.
    Parameters and buffers without memory (see `rfork.no_init`) are allocated on `device`, as `dtype` if they
    are floating-point (None: their own).

    Names are those of the module's state dict, or of the image for a snapshot. `strict`: both sides must have
    the same names; tied weights match under any of theirs. `rank` selects a rank's file in a folder; `key` or
    `password` decrypt a ``.tensors`` file. `progress` receives byte counts.

    A snapshot is verified, each chunk against its digest, if it is restored completely and unchanged: into a
    module with the same layout, or into one whose parameters have no memory yet and adopt the stored dtypes.
    Otherwise nothing is verified, nor if its manifest is missing; see the report's `verified`.

    Raises, before any byte is written, CheckpointError if names or shapes do not fit, or if a tensor would
    remain without memory; StorageError subclasses if storage fails: the content of the module is then
    undefined. SettingsError for an invalid module, device or URI; TargetError for tensors in read-only
    memory.
    """
    began = time.monotonic()
    check_load(rank, dtype)
    chosen = options.load(StorageSettings) if settings is None else options.checked(StorageSettings, settings)
    if not issubclass(type(module), nn.Module):
        what = type(module).__name__
        raise SettingsError(
            f"load() expects a torch module, not a {what}", hint="use load_tensors() to load tensors by name"
        )
    check_device(device)
    with closing(open_source(uri, chosen, rank, key=key, password=password)) as source:
        uri = resolve_template(str(uri), rank or Rank())
        snapshot = _snapshot(module, source, uri, chosen)
        if snapshot is not None:
            image, open_snapshot = snapshot
            with closing(open_snapshot):
                check_writable(image)
                open_snapshot.fill(image, progress=progress)
            nbytes, count = image.layout.image_bytes, len(image.layout.tensors)
            return LoadReport(source.uri, nbytes, time.monotonic() - began, count, verified=True)
        is_image = isinstance(source, SafetensorsSource) and source.layout is not None
        with gc_paused():
            found = LoadableTensors(module, stored_names(source))
            assigned = assign_state(named_tensors(module), source) if is_image else assign(module, source, found)
            if strict:
                assigned.require_all()
            assigned.check_memory()
            assigned.check_writable()
            without = _without_memory(module, found, assigned)
        missing, unexpected = assigned.load_own(source, strict=strict, progress=progress)
        restore = partial(restore_snapshot, source, uri, device, chosen, progress)
        verified = _fill(module, assigned, without, source, dtype, device, progress, restore)
        with gc_paused():
            names = [*assigned.names, *assigned.own_names(source)]
            nbytes = _bytes_of(source, names, assigned.extents)
        return LoadReport(
            source.uri,
            nbytes,
            time.monotonic() - began,
            len(names),
            tuple(sorted((*assigned.missing, *missing))),
            tuple(sorted((*assigned.unexpected, *unexpected))),
            verified,
        )


def _snapshot(
    module: nn.Module, source: TensorSource, uri: str, settings: StorageSettings
) -> tuple[Image, Snapshot] | None:
    """Return the module's image and the snapshot with the same layout; None if it must be loaded by name."""
    if not isinstance(source, SafetensorsSource) or source.layout is None:
        return None
    try:
        image = capture(module)
    except UnsupportedTensor:  # some have no memory
        return None
    if image.layout.layout_id != source.layout.layout_id:
        return None
    open_snapshot = open_snapshot_of(source, uri, settings)
    return None if open_snapshot is None else (image, open_snapshot)


def _without_memory(module: nn.Module, found: LoadableTensors, assigned: TensorAssignment) -> dict[str, torch.Tensor]:
    """Return the tensors on the meta device by name. Raises CheckpointError if one of them is not stored."""
    if assigned.extents is not None and len(assigned.direct) == len(found.state) and not found.other_buffers:
        empty = {}  # all have memory, which will be filled
    else:
        empty = found.without_memory
    if not empty and not (
        found.has_unregistered_tensors
        and any(
            isinstance(value, torch.Tensor) and value.is_meta
            for child in module.modules()
            for value in vars(child).values()
        )
    ):
        return {}
    filled = {id(tensor) for tensor in assigned.direct.values() if tensor.is_meta}
    for name, tensor in (named_tensors(module) | empty).items():
        if tensor.is_meta and tensor.numel() and id(tensor) not in filled:
            raise CheckpointError(f"{assigned.uri} lacks {name}, which has no memory in the model")
    return {name: tensor for name, tensor in empty.items() if id(tensor) in filled}


def _fill(
    module: nn.Module,
    assigned: TensorAssignment,
    empty: Mapping[str, torch.Tensor],
    source: TensorSource,
    dtype: torch.dtype | None,
    device: torch.device | str,
    progress: Callable[[int], None] | None,
    restore: Callable[[], dict[str, torch.Tensor] | None],
) -> bool:
    """Fill tensors that have memory in place, and allocate memory for the others.

    Returns whether everything was verified, which `restore` does for a complete snapshot.
    """
    if not empty:
        assigned.fill(source, progress)
        return False
    # For a tied tensor, use the last stored name, like torch and like tensors with memory.
    named = {id(tensor): name for name, tensor in assigned.direct.items() if tensor.is_meta}
    adopted_names, allocated = _allocate_memory(
        source, {name: assigned.direct[name] for name in named.values()}, dtype, device
    )
    existing = {name: tensor for name, tensor in assigned.direct.items() if not tensor.is_meta}
    into = existing | allocated
    found = restore() if _loads_all_tensors(module, source, assigned, into) else None
    if found is not None:
        with torch.inference_mode():  # parameters are written in place, inference tensors too
            for name, tensor in into.items():
                tensor.copy_(found[name])
            for name, tensor in assigned.staged.items():
                copy_into(source.uri, name, tensor, found[name])
        allocated |= {name: found[name] for name in adopted_names}
    else:
        if allocated:
            source.read_into(allocated, progress)
        replace(assigned, direct=existing).fill(source, progress)
        if adopted_names and isinstance(source, SafetensorsSource):
            allocated |= source.load(adopted_names, device, progress)
    by_id = {id(tensor): tensor for tensor in empty.values()}
    replace_tensors(module, {key: _replace_empty(by_id[key], allocated[name]) for key, name in named.items()})
    for name, tensor in named_tensors(module).items():
        if tensor.is_meta and tensor.numel():
            raise CheckpointError(
                f"{name} has no memory in the model: it refers to a tensor that was replaced during loading",
                hint="build the model with memory, outside of no_init and the meta device",
            )
    return found is not None


def _loads_all_tensors(
    module: nn.Module, source: TensorSource, assigned: TensorAssignment, into: Mapping[str, torch.Tensor]
) -> bool:
    """Return True if a module loads all stored tensors unchanged, and no parameter has memory yet.

    `into` are its tensors that do not adopt the memory of the file.
    """
    return (
        isinstance(source, SafetensorsSource)
        and source.layout is not None
        and not assigned.unexpected
        and not assigned.self_loading
        and all(parameter.is_meta for parameter in module.parameters())
        and all(
            (location := source.locations[name]).shape == tensor.shape and location.dtype is tensor.dtype
            for name, tensor in into.items()
        )
    )


def _allocate_memory(
    source: TensorSource,
    empty: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return names that can adopt the memory their file is read into, and new tensors for all others."""
    adopted_names: list[str] = []
    allocated: dict[str, torch.Tensor] = {}
    seen: set[tuple[Blob, int]] = set()
    for name, tensor in empty.items():
        new_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        location = source.locations[name] if isinstance(source, SafetensorsSource) else None
        shape = location.shape if location is not None else source.specs[name].shape
        if shape != tensor.shape:
            raise CheckpointError(
                f"{source.uri}: {name} has shape {list(shape)}, but {list(tensor.shape)} in the model"
            )
        # Tensors that are tied in storage but not in the model get separate memory.
        if location is not None and location[1:3] not in seen and is_bytewise(location, new_dtype, tensor):
            seen.add(location[1:3])
            adopted_names.append(name)
        else:
            allocated[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=new_dtype, device=device)
    return adopted_names, allocated


def _replace_empty(empty: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    return as_parameter(filled, empty) if isinstance(empty, nn.Parameter) else filled


def _bytes_of(source: TensorSource, names: Collection[str], extents: ExtentTable | None) -> int:
    """Return the number of stored bytes, counting tied tensors once. `extents`: those of the filled tensors."""
    if isinstance(source, SafetensorsSource):
        if extents is not None and len(extents) == len(names) and not source.aliases:
            return int(extents.lengths.sum())
        locations = [source.locations[name] for name in names]
        # Includes the length: an empty tensor begins where another one does.
        return sum(
            nbytes for *_, nbytes in {(location.blob, location.offset, location.nbytes) for location in locations}
        )
    return sum(source.specs[name].nbytes for name in names)

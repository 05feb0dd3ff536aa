"""Loading: from tensor files, wherever they lie, into a module that exists or was built without memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from rfork import settings as options
from rfork.errors import CheckpointError, SettingsError, UnsupportedTensor
from rfork.image.capture import capture
from rfork.image.memory import Image
from rfork.image.module_tensors import named_tensors
from rfork.image.writability import check_writable
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage.blob import Blob
from rfork.storage.formats.detect import open_source
from rfork.storage.formats.relayout import is_bytewise
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.io.gc_pause import gc_paused
from rfork.storage.module_io.assignment import TensorAssignment, assign, assign_state, copy_into
from rfork.storage.module_io.no_init import as_parameter
from rfork.storage.module_io.restore import open_snapshot_of, restore_snapshot
from rfork.storage.module_io.state_dict import meta_tensors, replace_tensors
from rfork.storage.module_io.validation import check_device, check_load
from rfork.storage.snapshots.snapshot import Snapshot
from rfork.storage.tensorizer.file_set import of_rank
from rfork.storage.tensors import TensorSource

GIGABYTE = 1e9


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What one load did.

    `uri` is what was read, `seconds` how long that took, `tensors` how many there are; `bytes` are those of
    the tensors as they are stored, each once; `missing` are the module's names that nothing was stored for,
    `unexpected` the stored ones that the module has not; both empty where `strict`. `verified`: it was a
    snapshot, and every chunk of it was checked against its digest; see `load`.
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
        """Gigabytes (10^9 bytes) a second, from the call to the last tensor that is in its place."""
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
    """Fill `module` with what is at a URI or path: Hugging Face folder, safetensors, snapshot, ``.tensors``.

    Runs in the process that calls it, and asks no planner. `uri` is a path, or ``file:``, ``s3:``, ``gs:``,
    ``az:`` or ``http(s):``; `settings` are those of the environment where none are given. Tensors are read
    straight into the module's own, on whatever device they are; those of another type are converted as they
    come, and `dtype` changes nothing about these. Parameters and buffers without memory (see `rfork.no_init`)
    are given some on `device`, in type `dtype` if they are floating (None: their own).

    Names are those of the module's state dict, or of the image for a snapshot. `strict`: both sides hold the
    same, tied weights under any of their names. `rank` says whose file of a folder it is; `key` or `password`
    open an encrypted ``.tensors``. `progress` is told bytes as they come.

    A snapshot is verified, each chunk against its digest, where all of it is restored as it is: into a module
    of just its layout, or into one whose parameters have no memory yet and take its types. Else nothing of
    it is, nor where its manifest is not beside it; the report's `verified` says which.

    Raises, before a byte is written, CheckpointError where names or shapes do not fit, or a tensor would stay
    without memory; StorageError kinds where storage fails: the module's content is then undefined.
    SettingsError for what is no module, device or URI; TargetError for tensors in read-only memory.
    """
    began = time.monotonic()
    check_load(rank, dtype)
    chosen = options.load(StorageSettings) if settings is None else options.checked(StorageSettings, settings)
    if not issubclass(type(module), nn.Module):
        what = type(module).__name__
        raise SettingsError(f"load fills a module, not a {what}", hint="load_tensors gives tensors by name")
    check_device(device)
    with closing(open_source(uri, chosen, rank, key=key, password=password)) as source:
        uri = of_rank(str(uri), rank or Rank())
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
            assigned = assign_state(named_tensors(module), source) if is_image else assign(module, source)
        if strict:
            assigned.require_all()
        assigned.check_memory()
        assigned.check_writable()
        without = _without_memory(module, assigned)
        missing, unexpected = assigned.load_own(source, strict=strict, progress=progress)
        restore = partial(restore_snapshot, source, uri, device, chosen, progress)
        verified = _fill(module, assigned, without, source, dtype, device, progress, restore)
        names = [*assigned.names, *assigned.own_names(source)]
        return LoadReport(
            source.uri,
            _bytes_of(source, names),
            time.monotonic() - began,
            len(names),
            tuple(sorted((*assigned.missing, *missing))),
            tuple(sorted((*assigned.unexpected, *unexpected))),
            verified,
        )


def _snapshot(
    module: nn.Module, source: TensorSource, uri: str, settings: StorageSettings
) -> tuple[Image, Snapshot] | None:
    """The module's image and the snapshot of just that; None where it has to be loaded by names."""
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


def _without_memory(module: nn.Module, assigned: TensorAssignment) -> dict[str, torch.Tensor]:
    """Tensors on the meta device by name. Raises CheckpointError where nothing is stored for one of them."""
    empty = meta_tensors(module)
    if not empty and not any(
        isinstance(value, torch.Tensor) and value.is_meta
        for child in module.modules()
        for value in vars(child).values()
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
    """Read what fits: into memory that is there, and into fresh memory where there is none.

    Whether all was verified: `restore` gives all of a snapshot so.
    """
    if not empty:
        assigned.fill(source, progress)
        return False
    # Of a tied one, the last name that is stored: as where there is memory, and as torch does it.
    named = {id(tensor): name for name, tensor in assigned.direct.items() if tensor.is_meta}
    fresh, made = _fresh_memory(source, {name: assigned.direct[name] for name in named.values()}, dtype, device)
    own = {name: tensor for name, tensor in assigned.direct.items() if not tensor.is_meta}
    into = own | made
    found = restore() if _loads_all_tensors(module, source, assigned, into) else None
    if found is not None:
        with torch.inference_mode():  # parameters are written in place, and those made for inference too
            for name, tensor in into.items():
                tensor.copy_(found[name])
            for name, tensor in assigned.staged.items():
                copy_into(source.uri, name, tensor, found[name])
        made |= {name: found[name] for name in fresh}
    else:
        if made:
            source.read_into(made, progress)
        replace(assigned, direct=own).fill(source, progress)
        if fresh and isinstance(source, SafetensorsSource):
            made |= source.load(fresh, device, progress)
    by_id = {id(tensor): tensor for tensor in empty.values()}
    replace_tensors(module, {key: _replace_empty(by_id[key], made[name]) for key, name in named.items()})
    for name, tensor in named_tensors(module).items():
        if tensor.is_meta and tensor.numel():
            raise CheckpointError(
                f"{name} has no memory in the model: it refers to a tensor that was replaced by one that has",
                hint="build the model with its memory, outside no_init and the meta device",
            )
    return found is not None


def _loads_all_tensors(
    module: nn.Module, source: TensorSource, assigned: TensorAssignment, into: Mapping[str, torch.Tensor]
) -> bool:
    """Whether a module takes all that is stored as it is, and has little memory of its own: no parameters'.

    `into` are its tensors that do not take the memory of the file.
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


def _fresh_memory(
    source: TensorSource,
    empty: Mapping[str, torch.Tensor],
    dtype: torch.dtype | None,
    device: torch.device | str,
) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Names whose memory can be that which their file is read into, and tensors for all others."""
    fresh: list[str] = []
    made: dict[str, torch.Tensor] = {}
    seen: set[tuple[Blob, int]] = set()
    for name, tensor in empty.items():
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        location = source.locations[name] if isinstance(source, SafetensorsSource) else None
        shape = location.shape if location is not None else source.specs[name].shape
        if shape != tensor.shape:
            raise CheckpointError(f"{source.uri}: {name} has shape {list(shape)}, the model's is {list(tensor.shape)}")
        # What is tied in storage but not in the model gets memory of its own.
        if location is not None and location[1:3] not in seen and is_bytewise(location, wanted, tensor):
            seen.add(location[1:3])
            fresh.append(name)
        else:
            made[name] = torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device=device)
    return fresh, made


def _replace_empty(empty: torch.Tensor, filled: torch.Tensor) -> torch.Tensor:
    return as_parameter(filled, empty) if isinstance(empty, nn.Parameter) else filled


def _bytes_of(source: TensorSource, names: Collection[str]) -> int:
    """The bytes of stored tensors, those of two names once."""
    if isinstance(source, SafetensorsSource):
        locations = [source.locations[name] for name in names]
        # With their bytes: one that has none begins where another does.
        return sum(
            nbytes for *_, nbytes in {(location.blob, location.offset, location.nbytes) for location in locations}
        )
    return sum(source.specs[name].nbytes for name in names)

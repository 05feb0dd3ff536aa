"""Fallbacks: ways to fill a module without a peer, also offered to the planner for cold starts.

Runs on the target. A failed transfer may leave any bytes in any tensor. A checkpoint or an engine's loader
overwrites the parameters and persistent buffers, but not what the model computed when it was built (rotary
tables, masks): these are copied before the first byte arrives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Final

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from rfork.errors import AllSourcesFailed, CheckpointError, RforkError, SettingsError, UserError
from rfork.image import ranges
from rfork.image.capture import capture
from rfork.image.memory import Image
from rfork.image.wrappers import plain_tensors
from rfork.logs import logger
from rfork.receiver.poison import Poison, can_be_poisoned
from rfork.schema import Rank
from rfork.schema.types import StorageType, Text
from rfork.settings import StorageSettings
from rfork.storage.base import ImageStorage
from rfork.storage.checkpoints.checkpoint import Checkpoint
from rfork.storage.checkpoints.chunked import CheckpointChunks, NotBytewiseLoadable
from rfork.storage.location import Location
from rfork.storage.module_io.extents import extent_of, is_dense
from rfork.storage.module_io.state_dict import registered_state, self_loading
from rfork.storage.snapshots.files import snapshot_location
from rfork.storage.snapshots.snapshot import Snapshot
from rfork.weights_version import short

log = logger(__name__)
ALTERNATIVES_HINT: Final = "start a seed, or pass a checkpoint folder to fall back to"
"""Hint if no failure has one."""
FIX_FALLBACK_HINT: Final = "fix the problem in the last reason, or start a seed"
_text: Final[TypeAdapter[str]] = TypeAdapter(Text)

Loader = Callable[[nn.Module], None]
OutOfPlaceLoader = Callable[[], nn.Module]
"""Builds and loads another model; its exceptions reach the caller of the fork unchanged."""
OpenStorage = Callable[[nn.Module, Image, "DerivedTensors"], ImageStorage | None]


class LoaderError(Exception):
    """A loader that builds its own model failed with `error`, after the first model was released.

    Not a failure of the fork: no other fallback can follow.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class Fallback:
    """One way to fill a module without a peer; `name` identifies it in the report.

    `storage_type` and `uri` describe it to the planner; `uri` is empty for storage without a name. `open`
    returns storage that can be read chunk by chunk, or None if `load` must do everything; it raises
    CheckpointError or StorageError if neither works. It may be called at any time of the fork, on its own
    thread, so it must not read the bytes of the tensors. Without it, `load` is used.

    With `load_out_of_place`, it is a loader that builds its own model, as engines do: the module's memory is
    released first, so that the two models never exist at the same time. It must be the last fallback, and
    `load` is not called.
    """

    name: str
    load: Loader
    storage_type: StorageType = "loader"
    uri: str = ""
    open: OpenStorage | None = None
    load_out_of_place: OutOfPlaceLoader | None = None


def checkpoint_fallback(uri: str | Path, settings: StorageSettings | None = None) -> Fallback:
    """Return a fallback that loads a checkpoint of safetensors files: a path, or any storage URI.

    Raises SettingsError.
    """
    checked_uri = _validate_uri(Location.parse(uri).uri)

    def load(module: nn.Module) -> None:
        Checkpoint.open(uri, settings).load_into(module)

    def chunks(module: nn.Module, image: Image, derived: DerivedTensors) -> ImageStorage | None:
        try:
            return CheckpointChunks.open(Checkpoint.open(uri, settings), module, image, derived.kept)
        except NotBytewiseLoadable as error:
            log.info("the checkpoint can only be loaded as a whole", checkpoint=checked_uri, reason=str(error))
            return None

    return Fallback(f"checkpoint {uri if _is_path(uri) else checked_uri}", load, "checkpoint", checked_uri, chunks)


def loader_fallback(loader: Loader) -> Fallback:
    """Return a fallback that calls the caller's own loader."""
    return Fallback("loader", loader)


def engine_fallback(load: OutOfPlaceLoader, check: Callable[[], None]) -> Fallback:
    """Return a fallback that runs the engine's own loader, which builds a new model.

    `check` raises CheckpointError or StorageError if there is nothing to load from; then the loader is not
    offered.
    """

    def opened(module: nn.Module, image: Image, derived: DerivedTensors) -> None:
        check()

    def reject_in_place(module: nn.Module) -> None:
        raise UserError("the engine's loader builds its own model")

    return Fallback("the engine's loader", reject_in_place, open=opened, load_out_of_place=load)


def snapshot_fallback(
    uri: str | Path,
    exclude: Sequence[str] = (),
    rank: Rank | None = None,
    settings: StorageSettings | None = None,
    version: str | None = None,
) -> Fallback:
    """Return a fallback that reads a snapshot, without tensors that match `exclude` (see `capture`).

    It must contain weights of `version`; None: of any version. `uri` (or path) is the file, or the folder
    with one for each rank. Raises SettingsError.
    """
    named = str(uri)
    folder, name = snapshot_location(named, rank)
    # The URI of the file itself, without the query of a presigned URL, which is a secret.
    checked_uri = _validate_uri(folder.child(name.partition("?")[0]).uri)

    def load(module: nn.Module) -> None:
        image = capture(module, exclude=exclude)
        with closing(opened(image)) as snapshot:
            snapshot.fill(image)

    def opened(image: Image) -> Snapshot:
        snapshot = Snapshot.open(named, image.layout, rank=rank, settings=settings)
        try:
            _check_version(snapshot, version)
        except BaseException:
            snapshot.close()
            raise
        return snapshot

    def chunks(module: nn.Module, image: Image, derived: DerivedTensors) -> ImageStorage:
        return opened(image)

    return Fallback(f"snapshot {checked_uri}", load, "snapshot", checked_uri, chunks)


class DerivedTensors:
    """Tensors that a loader would not write, copied at construction and put back by `restore`.

    `kept` has the copies (uint8, 1-D), each with its offset in the image, in image order. `loadable` are the
    tensors of the image that a loader must write: parameters and persistent buffers.
    """

    def __init__(self, module: nn.Module, image: Image) -> None:
        """Raises UserError if the module's `state_dict` raises."""
        regions = image.regions
        carried = ranges.normalise(
            (begin, begin + length) for begin, length in zip(regions.addresses, regions.lengths, strict=True)
        )
        self.loadable = {
            name: tensor
            for name, tensor in _loadable(module).items()
            if any(_inside(extent_of(plain), carried) for plain in _with_bytes(tensor))
        }
        loaded = ranges.normalise(
            extent_of(plain) for tensor in self.loadable.values() for plain in _with_bytes(tensor) if is_dense(plain)
        )
        self.kept: list[tuple[int, torch.Tensor]] = []
        self._regions: list[torch.Tensor] = []
        offset = 0
        for index, (begin, length) in enumerate(zip(regions.addresses, regions.lengths, strict=True)):
            if not _inside((begin, begin + length), loaded):
                self.kept.append((offset, regions[index].clone()))
                self._regions.append(regions[index])
            offset += length

    @property
    def storages(self) -> frozenset[int]:
        """Return the addresses of the tensors' storages."""
        return frozenset(region.untyped_storage().data_ptr() for region in self._regions)

    @property
    def nbytes(self) -> int:
        """Memory used by the copies."""
        return sum(copy.nbytes for _, copy in self.kept)

    def restore(self) -> None:
        """Restore the bytes from before the transfer."""
        with torch.no_grad():
            for region, (_, copy) in zip(self._regions, self.kept, strict=True):
                region.copy_(copy)


def load_into_clean_module(module: nn.Module, derived: DerivedTensors | None, fallback: Fallback) -> None:
    """Run one fallback on a clean model. Raises RforkError, whatever the loader raised.

    A loader that leaves a part of the model unchanged has failed: UserError names the first such tensor.
    """
    poison: Poison | None = None
    if derived is not None:
        derived.restore()
        if fallback.storage_type == "loader" or (fallback.storage_type == "checkpoint" and self_loading(module, ())):
            poison = Poison(derived.loadable)
    try:
        fallback.load(module)
    except RforkError:
        raise
    except Exception as error:  # the caller's loader may raise anything
        raise UserError(f"{fallback.name}: {_one_line(error)}") from error
    if poison is not None and (left := poison.unwritten(registered_state(module))):
        raise UserError(
            f"{fallback.name} did not fill {left[0]} (tensors not filled: {len(left)})",
            hint="a loader must fill all parameters and persistent buffers; name those that must not be"
            " forked in exclude=",
        )


def run_fallbacks(
    module: nn.Module,
    derived: DerivedTensors | None,
    fallbacks: Sequence[Fallback],
    reasons: Sequence[RforkError],
    load_out_of_place: Callable[[Fallback], None] | None = None,
) -> Fallback:
    """Try each fallback on a clean model; returns the one that worked.

    `reasons` are the failures so far; `load_out_of_place` runs fallbacks that build their own model. Raises
    AllSourcesFailed with these and the failure of each fallback if none worked: the module's content is then
    undefined.
    """
    failures = list(reasons)
    for fallback in fallbacks:
        log.warning("falling back", to=fallback.name, reason=str(failures[-1]) if failures else "")
        try:
            if fallback.load_out_of_place is not None and load_out_of_place is not None:
                load_out_of_place(fallback)
            else:
                load_into_clean_module(module, derived, fallback)
        except RforkError as error:
            # A fallback that could not be offered is tried anyway; it mostly fails the same way.
            failures = [one for one in failures if (one.kind, str(one)) != (error.kind, str(error))]
            failures.append(error)
        else:
            return fallback
    failure_text = (
        "; ".join(f"{error.kind}: {error}" for error in failures) or "no source and no fallback is configured"
    )
    raise AllSourcesFailed(
        f"no source or fallback worked: {failure_text}",
        failures,
        hint=_advice(failures, tried=bool(fallbacks)),
    )


def _check_version(snapshot: Snapshot, version: str | None) -> None:
    """Raise CheckpointError if a snapshot has weights of another version than `version`."""
    recorded = snapshot.manifest_file.version
    if version is None or recorded == version:
        return
    if recorded is None and version.startswith("weights:"):
        return  # derived from this snapshot, which records no version
    raise CheckpointError(
        f"snapshot {snapshot.uri} has version {short(recorded)}, but this instance requires {short(version)}",
        hint="write the snapshot again from an instance of that version, or unset RFORK_SNAPSHOT",
    )


def _advice(failures: Sequence[RforkError], *, tried: bool) -> str:
    """Return the hint: that of the last failure with one, or of a fallback whose files do not fit the model."""
    if tried and failures and isinstance(failures[-1], UserError):
        return failures[-1].hint or FIX_FALLBACK_HINT
    return next((error.hint for error in reversed(failures) if error.hint), ALTERNATIVES_HINT)


def _validate_uri(uri: str) -> str:
    """Return a URI that the planner accepts. Raises SettingsError if it would not."""
    try:
        return _text.validate_python(uri)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise SettingsError(f"the planner does not accept the URI {uri[:200]!r}: {reason}") from None


def _is_path(uri: str | Path) -> bool:
    return isinstance(uri, Path) or "://" not in uri


def _loadable(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers, except those that the module leaves out of its state."""
    try:
        state = module.state_dict(keep_vars=True)
        objects = {id(value) for value in state.values()}
    except Exception as error:  # the module's own code may raise anything
        raise UserError(f"the module's state_dict() raised {_one_line(error)}") from error
    return {name: tensor for name, tensor in registered_state(module).items() if name in state or id(tensor) in objects}


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _with_bytes(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Return the tensors with its bytes, without overlapping elements."""
    return (plain for plain in plain_tensors(tensor) if can_be_poisoned(plain))


def _inside(extent: ranges.Range, merged: Sequence[ranges.Range]) -> bool:
    index = bisect_right(merged, extent[0], key=itemgetter(0)) - 1
    return index >= 0 and extent[1] <= merged[index][1]

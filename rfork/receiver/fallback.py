"""The ways to fill a module without a peer: offered to the planner, and what a fork ends with.

Runs on the target. A transfer that failed may have left any bytes in any tensor. A checkpoint or an
engine's loader writes the parameters and persistent buffers again, but not what the model computed
for itself when it was built (rotary tables, masks): those are kept before the first byte arrives.
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
ALTERNATIVES_HINT: Final = "start a seed, or give a checkpoint folder to fall back to"
"""What to do where no failure says so itself."""
FIX_FALLBACK_HINT: Final = "correct what the last reason names, or start a seed"
_text: Final[TypeAdapter[str]] = TypeAdapter(Text)

Loader = Callable[[nn.Module], None]
OutOfPlaceLoader = Callable[[], nn.Module]
"""Builds and loads another model; what it raises is raised to who asked for the fork, as it is."""
OpenStorage = Callable[[nn.Module, Image, "DerivedTensors"], ImageStorage | None]


class LoaderError(Exception):
    """A loader that builds a model of its own failed, as `error` says; the first model is gone by then.

    Not an error of the fork's: nothing can follow it here.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class Fallback:
    """One way to fill a module without a peer; `name` is the word for it in the report.

    `storage_type` and `uri` are what it reads, as the planner is told; a `uri` only where that has a name.
    `open` gives what can be read chunk by chunk, or None where `load` has to do it all; it raises
    CheckpointError or StorageError where neither will work. It is called at any time of the fork, on
    a thread of its own, so it must not look at the bytes of the tensors. Without it, `load` does it.

    With `load_out_of_place`, it is a loader that builds a model of its own in the place of the module, as engines do:
    the module's memory is given back first, so that the two never stand side by side. It is the last way, and
    `load` is not called.
    """

    name: str
    load: Loader
    storage_type: StorageType = "loader"
    uri: str = ""
    open: OpenStorage | None = None
    load_out_of_place: OutOfPlaceLoader | None = None


def checkpoint_fallback(uri: str | Path, settings: StorageSettings | None = None) -> Fallback:
    """Load a checkpoint of safetensors files: a path, or any URI of storage. Raises SettingsError."""
    checked_uri = _validate_uri(Location.parse(uri).uri)

    def load(module: nn.Module) -> None:
        Checkpoint.open(uri, settings).load_into(module)

    def chunks(module: nn.Module, image: Image, derived: DerivedTensors) -> ImageStorage | None:
        try:
            return CheckpointChunks.open(Checkpoint.open(uri, settings), module, image, derived.kept)
        except NotBytewiseLoadable as error:
            log.info("the checkpoint can only be loaded whole", checkpoint=checked_uri, reason=str(error))
            return None

    return Fallback(f"checkpoint {uri if _is_path(uri) else checked_uri}", load, "checkpoint", checked_uri, chunks)


def loader_fallback(loader: Loader) -> Fallback:
    """Call the caller's own loader."""
    return Fallback("loader", loader)


def engine_fallback(load: OutOfPlaceLoader, check: Callable[[], None]) -> Fallback:
    """The engine's own loader, which builds a model anew.

    `check` raises CheckpointError or StorageError where it has nothing to load from: then it is not offered.
    """

    def opened(module: nn.Module, image: Image, derived: DerivedTensors) -> None:
        check()

    def reject_in_place(module: nn.Module) -> None:
        raise UserError("the engine's loader builds a model of its own")

    return Fallback("the engine's loader", reject_in_place, open=opened, load_out_of_place=load)


def snapshot_fallback(
    uri: str | Path,
    exclude: Sequence[str] = (),
    rank: Rank | None = None,
    settings: StorageSettings | None = None,
    version: str | None = None,
) -> Fallback:
    """Read a snapshot, whose image leaves out what matches `exclude` (see `capture`).

    It must hold weights of `version`; None: of any.
    `uri`, or path, is of its file, or of the folder that holds one for each rank. Raises SettingsError.
    """
    named = str(uri)
    folder, name = snapshot_location(named, rank)
    # Of the file, whatever names it; and not with the query of a presigned URL, which is a secret.
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
    """The tensors a loader would not write again, copied at construction, put back by `restore`.

    `kept` holds the copies (uint8, 1-D), each with its offset in the image, in image order. `loadable` are
    the tensors of the image that a loader has to write: parameters and persistent buffers.
    """

    def __init__(self, module: nn.Module, image: Image) -> None:
        """Raises UserError where the module's `state_dict` raises."""
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
        """The addresses of the storages that the tensors lie in."""
        return frozenset(region.untyped_storage().data_ptr() for region in self._regions)

    @property
    def nbytes(self) -> int:
        """The memory the copies take."""
        return sum(copy.nbytes for _, copy in self.kept)

    def restore(self) -> None:
        """Put the bytes back as they were before the transfer."""
        with torch.no_grad():
            for region, (_, copy) in zip(self._regions, self.kept, strict=True):
                region.copy_(copy)


def load_into_clean_module(module: nn.Module, derived: DerivedTensors | None, fallback: Fallback) -> None:
    """Load one way into a clean model. Raises RforkError kinds, whatever the loader raised.

    A loader that leaves a part of the model as it was has failed: UserError names the first such tensor.
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
            f"{fallback.name} did not fill {left[0]} ({len(left)} such)",
            hint="a loader has to fill all parameters and persistent buffers: name those that are not to be"
            " forked in exclude=",
        )


def run_fallbacks(
    module: nn.Module,
    derived: DerivedTensors | None,
    fallbacks: Sequence[Fallback],
    reasons: Sequence[RforkError],
    load_out_of_place: Callable[[Fallback], None] | None = None,
) -> Fallback:
    """Try each way into a clean model; returns the one that worked.

    `reasons` are the failures so far; `load_out_of_place` runs those that build a model of their own. Raises
    AllSourcesFailed, with those and each way's own, when none worked: the module's content is then undefined.
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
            # A way that could not be offered is tried all the same, and mostly fails alike.
            failures = [one for one in failures if (one.kind, str(one)) != (error.kind, str(error))]
            failures.append(error)
        else:
            return fallback
    failure_text = "; ".join(f"{error.kind}: {error}" for error in failures) or "no source and no fallback was given"
    raise AllSourcesFailed(
        f"no way to get the weights is left: {failure_text}",
        failures,
        hint=_advice(failures, tried=bool(fallbacks)),
    )


def _check_version(snapshot: Snapshot, version: str | None) -> None:
    """Raise CheckpointError for a snapshot of other weights than those of `version`."""
    recorded = snapshot.manifest_file.version
    if version is None or recorded == version:
        return
    if recorded is None and version.startswith("weights:"):
        return  # derived from this very snapshot, which records none
    raise CheckpointError(
        f"snapshot {snapshot.uri} holds version {short(recorded)}, and this instance wants {short(version)}",
        hint="write the snapshot again from an instance of that version, or unset RFORK_SNAPSHOT",
    )


def _advice(failures: Sequence[RforkError], *, tried: bool) -> str:
    """What to do: the hint of the last failure that has one, or of a fallback that does not fit its own."""
    if tried and failures and isinstance(failures[-1], UserError):
        return failures[-1].hint or FIX_FALLBACK_HINT
    return next((error.hint for error in reversed(failures) if error.hint), ALTERNATIVES_HINT)


def _validate_uri(uri: str) -> str:
    """A URI as it is told to the planner. Raises SettingsError where that would refuse it."""
    try:
        return _text.validate_python(uri)
    except ValidationError as error:
        why = error.errors()[0]["msg"]
        raise SettingsError(f"{uri[:200]!r} cannot be told to the planner: {why}") from None


def _is_path(uri: str | Path) -> bool:
    return isinstance(uri, Path) or "://" not in uri


def _loadable(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers, less those that the module itself leaves out of its state."""
    try:
        state = module.state_dict(keep_vars=True)
        objects = {id(value) for value in state.values()}
    except Exception as error:  # a module's own code may raise anything
        raise UserError(f"the module's state_dict() raised {_one_line(error)}") from error
    return {name: tensor for name, tensor in registered_state(module).items() if name in state or id(tensor) in objects}


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _with_bytes(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors that hold its bytes, each element its own."""
    return (plain for plain in plain_tensors(tensor) if can_be_poisoned(plain))


def _inside(extent: ranges.Range, merged: Sequence[ranges.Range]) -> bool:
    index = bisect_right(merged, extent[0], key=itemgetter(0)) - 1
    return index >= 0 and extent[1] <= merged[index][1]

"""The ways to fill a module without a peer: offered to the planner, and what a fork ends with.

Runs on the target. A transfer that failed may have left any bytes in any tensor. A checkpoint or an
engine's loader writes the parameters and persistent buffers again, but not what the model computed
for itself when it was built (rotary tables, masks): those are kept before the first byte arrives.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from rfork.errors import NothingLeft, RforkError, StorageError, UserError
from rfork.fields import StorageKind
from rfork.image import ranges
from rfork.image.capture import capture
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.storage.base import Storage
from rfork.storage.checkpoint import Checkpoint
from rfork.storage.pieces import CheckpointChunks, NotByteForByte
from rfork.storage.snapshot import Snapshot

log = logger(__name__)

Loader = Callable[[nn.Module], None]
OpenStorage = Callable[[nn.Module, Image, "Derived"], Storage | None]


@dataclass(frozen=True, slots=True)
class Fallback:
    """One way to fill a module without a peer; `name` is the word for it in the report.

    `kind` and `uri` are what it reads, as the planner is told; a `uri` only where that has a name.
    `open` gives what can be read chunk by chunk, or None where `load` has to do it all; it raises
    CheckpointError or StorageError where neither will work. It is called at any time of the fork, on
    a thread of its own, so it must not look at the bytes of the tensors. Without it, `load` does it.
    """

    name: str
    load: Loader
    kind: StorageKind = "loader"
    uri: str = ""
    open: OpenStorage | None = None


def checkpoint_fallback(folder: Path) -> Fallback:
    """Load a Hugging Face folder of safetensors files."""

    def chunks(module: nn.Module, image: Image, derived: Derived) -> Storage | None:
        checkpoint = Checkpoint.open(folder)
        checkpoint.check(module)
        try:
            return CheckpointChunks.open(checkpoint, module, image, derived.kept)
        except NotByteForByte as error:
            log.info("the checkpoint can only be loaded whole", folder=str(folder), because=str(error))
            return None

    return Fallback(
        f"checkpoint {folder}",
        lambda module: Checkpoint.open(folder).load_into(module),
        "checkpoint",
        folder.resolve().as_uri(),
        chunks,
    )


def loader_fallback(loader: Loader) -> Fallback:
    """Call the caller's own loader."""
    return Fallback("loader", loader)


def snapshot_fallback(uri: str, exclude: Sequence[str] = ()) -> Fallback:
    """Read a snapshot (``file:///…``), whose image leaves out what matches `exclude`; see `capture`."""

    def load(module: nn.Module) -> None:
        image = capture(module, exclude=exclude)
        snapshot = Snapshot.open(uri, image.layout)
        try:
            for index, (begin, end) in enumerate(image.layout.chunks):
                with image.writable(begin, end) as views:
                    snapshot.read(begin, end, views)
                if image.digest(index) != snapshot.manifest.digests[index]:
                    raise StorageError(f"{uri}: chunk {index} does not match its digest")
        finally:
            snapshot.close()

    def chunks(module: nn.Module, image: Image, derived: Derived) -> Storage:
        return Snapshot.open(uri, image.layout)

    return Fallback(f"snapshot {uri}", load, "snapshot", uri, chunks)


class Derived:
    """The tensors a loader would not write again, copied at construction, put back by `restore`.

    `kept` holds the copies (uint8, 1-D), each with its offset in the image, in image order.
    """

    def __init__(self, module: nn.Module, image: Image) -> None:
        state = module.state_dict(keep_vars=False).values()
        loaded = ranges.normalise(_span(value) for value in state if isinstance(value, torch.Tensor))
        begins = [begin for begin, _ in loaded]
        self.kept: list[tuple[int, torch.Tensor]] = []
        self._regions: list[torch.Tensor] = []
        offset = 0
        for region in image.regions:
            begin, end = _span(region)
            nearest = bisect_right(begins, begin) - 1
            if nearest < 0 or loaded[nearest][1] < end:
                self.kept.append((offset, region.clone()))
                self._regions.append(region)
            offset += region.numel()

    @property
    def nbytes(self) -> int:
        """The memory the copies take."""
        return sum(copy.nbytes for _, copy in self.kept)

    def restore(self) -> None:
        """Put the bytes back as they were before the transfer."""
        with torch.no_grad():
            for region, (_, copy) in zip(self._regions, self.kept, strict=True):
                region.copy_(copy)


def load_clean(module: nn.Module, derived: Derived | None, way: Fallback) -> None:
    """Load one way into a clean model. Raises RforkError kinds, whatever the loader raised."""
    if derived is not None:
        derived.restore()
    try:
        way.load(module)
    except RforkError:
        raise
    except Exception as error:  # the caller's loader may raise anything
        raise UserError(f"{way.name}: {type(error).__name__}: {error}") from error


def fall_back(
    module: nn.Module, derived: Derived | None, ways: Sequence[Fallback], reasons: Sequence[RforkError]
) -> Fallback:
    """Try each way into a clean model; returns the one that worked.

    `reasons` are the failures so far. Raises NothingLeft, with those and each way's own, when none
    worked: the module's content is then undefined.
    """
    failures = list(reasons)
    for way in ways:
        log.warning("falling back", to=way.name, because=str(failures[-1]) if failures else "")
        try:
            load_clean(module, derived, way)
        except RforkError as error:
            failures.append(error)
        else:
            return way
    told = "; ".join(f"{error.kind}: {error}" for error in failures) or "no source and no fallback was given"
    raise NothingLeft(
        f"no way to get the weights is left: {told}",
        failures,
        hint="start a seed, or give a checkpoint folder to fall back to",
    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.nbytes

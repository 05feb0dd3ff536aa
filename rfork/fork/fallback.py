"""What a fork does when no source works: the ways left, in order, each into a clean model.

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

from rfork.errors import NothingLeft, RforkError, UserError
from rfork.image import ranges
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.storage.checkpoint import Checkpoint

log = logger(__name__)

Loader = Callable[[nn.Module], None]


@dataclass(frozen=True, slots=True)
class Fallback:
    """One way to fill a module without a peer; `name` is the word for it in the report."""

    name: str
    load: Loader


def checkpoint_fallback(folder: Path) -> Fallback:
    """Load a Hugging Face folder of safetensors files."""
    return Fallback(f"checkpoint {folder}", lambda module: Checkpoint.open(folder).load_into(module))


def loader_fallback(loader: Loader) -> Fallback:
    """Call the caller's own loader."""
    return Fallback("loader", loader)


class Derived:
    """The tensors a loader would not write again, copied at construction, put back by `restore`."""

    def __init__(self, module: nn.Module, image: Image) -> None:
        state = module.state_dict(keep_vars=False).values()
        loaded = ranges.normalise(_span(value) for value in state if isinstance(value, torch.Tensor))
        begins = [begin for begin, _ in loaded]
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        for region in image.regions:
            begin, end = _span(region)
            nearest = bisect_right(begins, begin) - 1
            if nearest < 0 or loaded[nearest][1] < end:
                self._kept.append((region, region.clone()))

    @property
    def nbytes(self) -> int:
        """The memory the copies take."""
        return sum(copy.nbytes for _, copy in self._kept)

    def restore(self) -> None:
        """Put the bytes back as they were before the transfer."""
        with torch.no_grad():
            for region, copy in self._kept:
                region.copy_(copy)


def fall_back(
    module: nn.Module, derived: Derived | None, ways: Sequence[Fallback], reasons: Sequence[RforkError]
) -> str:
    """Try each way into a clean module; returns the name of the one that worked.

    `reasons` are the failures so far. Raises NothingLeft, with those and each way's own, when none
    worked: the module's content is then undefined.
    """
    failures = list(reasons)
    for way in ways:
        if derived is not None:
            derived.restore()
        log.warning("falling back", to=way.name, because=str(failures[-1]) if failures else "")
        try:
            way.load(module)
        except RforkError as error:
            failures.append(error)
        except Exception as error:  # the caller's loader may raise anything; the next way is tried
            failures.append(UserError(f"{way.name}: {type(error).__name__}: {error}"))
        else:
            return way.name
    told = "; ".join(f"{error.kind}: {error}" for error in failures) or "no source and no fallback was given"
    raise NothingLeft(
        f"no way to get the weights is left: {told}",
        failures,
        hint="start a seed, or give a checkpoint folder to fall back to",
    )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.nbytes

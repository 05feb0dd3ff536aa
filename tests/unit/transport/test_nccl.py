"""NCCL groups that break, with what torch would do played by fakes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rfork.errors import RforkError, SourceGone, SourceStalled
from rfork.transport.collective import nccl
from rfork.transport.collective.nccl import NcclGroup
from tests.unit.clock import Clock

CPU = torch.device("cpu")


class Stream:
    """A CUDA stream that counts how often it was waited for."""

    def __init__(self) -> None:
        self.waited = 0

    def synchronize(self) -> None:
        self.waited += 1


class Breaking:
    """A process group whose work never ends, or breaks; as its own work. Each look at it takes a second."""

    def __init__(self, clock: Clock, *, breaks: bool) -> None:
        self._clock = clock
        self._breaks = breaks

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> Breaking:
        return self

    def is_completed(self) -> bool:
        self._clock.now += 1.0
        if self._breaks:
            raise RuntimeError("a rank is gone")
        return False

    def abort(self) -> None:
        return


@pytest.mark.parametrize(("breaks", "error"), [(True, SourceGone), (False, SourceStalled)])
def test_no_kernel_touches_a_block_after_its_move_has_failed(
    breaks: bool, error: type[RforkError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort returns before its kernels have ended, at least to whoever is second: they are waited for."""
    stream, clock = Stream(), Clock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(nccl, "time", SimpleNamespace(monotonic=clock))
    group = NcclGroup(Breaking(clock, breaks=breaks), CPU)  # type: ignore[arg-type]
    with pytest.raises(error):
        group.broadcast(torch.zeros(1), clock.now + 2.0)
    assert 1 == stream.waited

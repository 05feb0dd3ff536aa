"""NCCL groups that fail, with fakes for torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rfork.errors import RforkError, SourceTimeout, SourceUnavailable
from rfork.transport.collective import nccl
from rfork.transport.collective.nccl import NcclGroup
from tests.unit.fake_clock import FakeClock

CPU = torch.device("cpu")


class FakeStream:
    """A CUDA stream that counts its synchronizations."""

    def __init__(self) -> None:
        self.synchronized = 0

    def synchronize(self) -> None:
        self.synchronized += 1


class FailingProcessGroup:
    """A process group, and its own work handle, that never completes or fails. Each poll takes a second."""

    def __init__(self, clock: FakeClock, *, fails: bool) -> None:
        self._clock = clock
        self._fails = fails

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> FailingProcessGroup:
        return self

    def is_completed(self) -> bool:
        self._clock.now += 1.0
        if self._fails:
            raise RuntimeError("a rank died")
        return False

    def abort(self) -> None:
        return


@pytest.mark.parametrize(("fails", "error"), [(True, SourceUnavailable), (False, SourceTimeout)])
def test_a_failed_transfer_waits_for_its_kernels(
    fails: bool, error: type[RforkError], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort may return before its kernels have finished, so the stream is synchronized."""
    stream, clock = FakeStream(), FakeClock()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(nccl, "time", SimpleNamespace(monotonic=clock))
    group = NcclGroup(FailingProcessGroup(clock, fails=fails), CPU)  # type: ignore[arg-type]
    with pytest.raises(error):
        group.broadcast(torch.zeros(1), clock.now + 2.0)
    assert 1 == stream.synchronized

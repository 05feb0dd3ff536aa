"""gloo groups that do not form: what is given back, without a second process."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from rfork.errors import RforkError, SourceBusy, SourceGone, SourceStalled
from rfork.transport.collective.gloo import GlooBackend
from rfork.transport.packet_filter import PacketFilter

FORM_S = 30.0


class FailingKeys:
    """`Keys` that fail where a rank tells where it listens, or asks for the others."""

    def __init__(self, fails: str, error: RforkError) -> None:
        self._fails = fails
        self._error = error

    def put(self, key: str, value: bytes) -> None:
        if self._fails == "put":
            raise self._error

    def ask(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        raise self._error


@pytest.mark.parametrize("fails", ["put", "ask"])
@pytest.mark.parametrize("error", [SourceGone("over"), SourceStalled("late"), SourceBusy("full")])
def test_a_gloo_group_that_does_not_form_leaves_no_port(
    fails: str, error: RforkError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever ends it, the filter lets go of the listener: else that is open until the memory is tidied."""
    closed: list[PacketFilter] = []
    monkeypatch.setattr(PacketFilter, "close", lambda port: closed.append(port))
    with pytest.raises(type(error), match=str(error)):
        GlooBackend("127.0.0.1").form(
            FailingKeys(fails, error), 0, 2, "127.0.0.1", torch.device("cpu"), time.monotonic() + FORM_S
        )
    assert 1 == len(closed)

"""gloo groups that do not form, in one process: their resources are released."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest
import torch

from rfork.errors import RforkError, SourceBusy, SourceTimeout, SourceUnavailable
from rfork.transport.bpf_filter import PacketFilter
from rfork.transport.collective.gloo import GlooBackend

FORM_TIMEOUT_S = 30.0


class FailingKeyStore:
    """`KeyValueStore` that fails when a rank publishes its address, or waits for the others."""

    def __init__(self, fails: str, error: RforkError) -> None:
        self._fails = fails
        self._error = error
        self.closed = False

    def put(self, key: str, value: bytes) -> None:
        if self._fails == "put":
            raise self._error

    def get_values(self, keys: Sequence[str], deadline: float, *, wait: bool) -> list[bytes | None]:
        raise self._error


@pytest.mark.parametrize("fails", ["put", "get_values"])
@pytest.mark.parametrize("error", [SourceUnavailable("over"), SourceTimeout("late"), SourceBusy("full")])
def test_a_gloo_group_that_does_not_form_leaves_no_port(
    fails: str, error: RforkError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On any error the filter closes the listener: otherwise it stays open until garbage collection."""
    closed: list[PacketFilter] = []
    monkeypatch.setattr(PacketFilter, "close", lambda port: closed.append(port))
    with pytest.raises(type(error), match=str(error)):
        GlooBackend("127.0.0.1").form(
            FailingKeyStore(fails, error),
            0,
            2,
            "127.0.0.1",
            torch.device("cpu"),
            time.monotonic() + FORM_TIMEOUT_S,
        )
    assert 1 == len(closed)

"""Fixtures: a fleet that is closed after each test, and a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from rfork.receiver import spool
from tests.unit.receiver.fleet import NEVER_S, Fleet, live_transfer_threads
from tests.unit.receiver.sessions import Model


@pytest.fixture(autouse=True)
def _long_flush_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the flush timeout: the spool writer has a low priority, and the test machine may be busy."""
    monkeypatch.setattr(spool, "FLUSH_TIMEOUT_S", NEVER_S)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """Yield an empty fleet and check that the test leaves no transfer thread running."""
    empty_fleet = Fleet()
    yield empty_fleet
    empty_fleet.close()
    assert [] == live_transfer_threads()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Return a folder with a checkpoint of Model(7.0)."""
    save_file({"weight": Model(7.0).weight.detach()}, tmp_path / "model.safetensors")
    return tmp_path

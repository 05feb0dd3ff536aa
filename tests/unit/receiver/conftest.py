"""A fleet for each test, closed after it, and a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from rfork.receiver import chunk_persister
from tests.unit.receiver.fleet import NEVER_S, Fleet, live_transfer_threads
from tests.unit.receiver.sessions import Model


@pytest.fixture(autouse=True)
def _long_flush_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spool is opened and left in time, though its writer stands back for all else on this machine."""
    monkeypatch.setattr(chunk_persister, "FLUSH_TIMEOUT_S", NEVER_S)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """An empty fleet. Whatever a test did, no thread of a pull may be left when it ends."""
    made = Fleet()
    yield made
    made.close()
    assert [] == live_transfer_threads()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder that holds Model(7.0)."""
    save_file({"weight": Model(7.0).weight.detach()}, tmp_path / "model.safetensors")
    return tmp_path

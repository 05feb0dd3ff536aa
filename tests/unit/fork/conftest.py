"""A fleet for each test, closed after it, and a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import save_file

from rfork.fork import keeper
from tests.unit.fork.fleet import NEVER_S, Fleet, working_threads
from tests.unit.fork.sessions import Model


@pytest.fixture(autouse=True)
def _patient_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A spool is opened and left in time, though its writer stands back for all else on this machine."""
    monkeypatch.setattr(keeper, "PATIENCE_S", NEVER_S)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """An empty fleet. Whatever a test did, no thread of a pull may be left when it ends."""
    made = Fleet()
    yield made
    made.close()
    assert [] == working_threads()


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A folder that holds Model(7.0)."""
    save_file({"weight": Model(7.0).weight.detach()}, tmp_path / "model.safetensors")
    return tmp_path

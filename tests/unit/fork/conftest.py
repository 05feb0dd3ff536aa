"""A fleet for each test, closed after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.unit.fork.fleet import Fleet, working_threads


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    """An empty fleet. Whatever a test did, no thread of a pull may be left when it ends."""
    made = Fleet()
    yield made
    made.close()
    assert [] == working_threads()

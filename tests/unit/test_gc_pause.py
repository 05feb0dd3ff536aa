"""Pausing the garbage collector: concurrent blocks, and its state afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rfork.gc_pause import gc_paused


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """Enable the collector before and after a test, as in most processes."""
    gc.enable()
    yield
    gc.enable()


def test_the_last_block_enables_it_again() -> None:
    """The end of one block does not end that of another thread."""
    seen: list[bool] = []
    first, second = gc_paused(), gc_paused()
    for step in (first.__enter__, second.__enter__):
        step()
        seen.append(gc.isenabled())
    for block in (first, second):
        block.__exit__(None, None, None)
        seen.append(gc.isenabled())
    assert [False, False, False, True] == seen


def test_a_disabled_collector_stays_disabled() -> None:
    """A process that has disabled the collector finds it disabled afterwards."""
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


def test_an_error_enables_it_again() -> None:
    """After an unreadable header the collector is enabled again."""
    with pytest.raises(ValueError, match="broken"), gc_paused():
        raise ValueError("broken")
    assert gc.isenabled()

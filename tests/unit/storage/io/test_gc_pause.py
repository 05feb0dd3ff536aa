"""The garbage collector is held off, by several at once, and left as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from rfork.storage.io.gc_pause import gc_paused


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    """As it is in most processes, before and after."""
    gc.enable()
    yield
    gc.enable()


def test_it_is_on_again_when_the_last_has_left() -> None:
    """The end of one block does not end what another, on some other thread, still holds."""
    seen: list[bool] = []
    first, second = gc_paused(), gc_paused()
    for step in (first.__enter__, second.__enter__):
        step()
        seen.append(gc.isenabled())
    for block in (first, second):
        block.__exit__(None, None, None)
        seen.append(gc.isenabled())
    assert [False, False, False, True] == seen


def test_a_process_without_it_stays_so() -> None:
    """Who turned it off for good has it off afterwards."""
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


def test_it_is_on_again_after_an_error() -> None:
    """A header that cannot be read leaves the process as it was."""
    with pytest.raises(ValueError, match="broken"), gc_paused():
        raise ValueError("broken")
    assert gc.isenabled()

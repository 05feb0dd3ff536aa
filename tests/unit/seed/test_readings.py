"""The reads that whoever changes an image's bytes waits for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from rfork.seed.readings import Readings

NEVER_S = 60.0


@contextlib.contextmanager
def stuck(readings: Readings, said: list[str], name: str) -> Iterator[threading.Event]:
    """A read on a thread of its own that ends once it is cut, or let go by the event."""
    begun, ended = threading.Event(), threading.Event()

    def read() -> None:
        with readings.held(cut):
            begun.set()
            ended.wait(NEVER_S)
            said.append(f"{name} ended")

    def cut() -> None:
        said.append(f"{name} cut")
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(NEVER_S)
    try:
        yield ended
    finally:
        ended.set()
        thread.join()


def test_nobody_reads() -> None:
    """There is nothing to wait for."""
    assert 0 == Readings().settle(NEVER_S)


def test_a_read_that_ends_is_not_cut() -> None:
    """It is waited for."""
    said: list[str] = []
    readings = Readings()
    with stuck(readings, said, "one") as ended:
        threading.Timer(0.01, ended.set).start()
        cut = readings.settle(NEVER_S)
    assert (0, ["one ended"]) == (cut, said)


def test_reads_that_do_not_end_are_cut() -> None:
    """All of them, and only then is it over."""
    said: list[str] = []
    readings = Readings()
    with stuck(readings, said, "one"), stuck(readings, said, "two"):
        cut = readings.settle(0.0)
        assert (2, 4) == (cut, len(said))


def test_a_later_read_is_not_waited_for() -> None:
    """Who begins after the bytes were fenced reads nothing that changes: the first's cut begins one here."""
    said: list[str] = []
    readings = Readings()
    with contextlib.ExitStack() as first, contextlib.ExitStack() as later:

        def cut() -> None:
            later.enter_context(readings.held(lambda: said.append("later cut")))
            first.close()

        first.enter_context(readings.held(cut))
        assert (1, []) == (readings.settle(0.0), said)


def test_a_read_that_fails_is_over() -> None:
    """Whatever it raises, nobody waits for it."""
    readings = Readings()
    with pytest.raises(OSError, match="broken pipe"), readings.held(lambda: None):
        raise OSError("broken pipe")
    assert 0 == readings.settle(NEVER_S)

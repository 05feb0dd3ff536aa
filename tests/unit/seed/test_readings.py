"""The reads that whoever changes an image's bytes waits for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from rfork.seed import readings as readings_module
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


def test_a_read_that_goes_on_after_it_was_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is waited for however long it takes, and the log says so: here it ends for that."""
    said: list[str] = []
    begun, ended = threading.Event(), threading.Event()
    watcher = Watcher(ended, said)
    monkeypatch.setattr(readings_module, "log", watcher)
    monkeypatch.setattr(readings_module, "WARN_S", 0.0)
    readings = Readings()

    def read() -> None:
        with readings.held(lambda: said.append("cut")):
            begun.set()
            ended.wait(NEVER_S)
            said.append("ended")

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(NEVER_S)
    readings.settle(0.0)
    thread.join()
    assert ["cut", "warned", "ended"] == said


class Watcher:
    """A log whose first warning ends the read."""

    def __init__(self, ended: threading.Event, said: list[str]) -> None:
        self._ended = ended
        self._said = said

    def warning(self, event: str, *, reads: int) -> None:
        if not self._ended.is_set():
            self._said.append("warned")
            self._ended.set()


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

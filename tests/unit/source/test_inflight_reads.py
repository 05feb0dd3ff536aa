"""Inflight reads, which are drained before the bytes of an image change."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest

from rfork.source import channels
from rfork.source.channels import InflightReads

NEVER_S = 60.0


@contextlib.contextmanager
def blocked_read(inflight: InflightReads, events: list[str], name: str) -> Iterator[threading.Event]:
    """Read on a separate thread until the read is aborted or the yielded event is set."""
    started, ended = threading.Event(), threading.Event()

    def read() -> None:
        with inflight.track(abort):
            started.set()
            ended.wait(NEVER_S)
            events.append(f"{name} ended")

    def abort() -> None:
        events.append(f"{name} aborted")
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    assert started.wait(NEVER_S)
    try:
        yield ended
    finally:
        ended.set()
        thread.join()


def test_draining_without_reads_returns_immediately() -> None:
    """There is nothing to wait for."""
    assert 0 == InflightReads().drain(NEVER_S)


def test_a_read_that_ends_in_time_is_not_aborted() -> None:
    """`drain` waits for it."""
    events: list[str] = []
    inflight = InflightReads()
    with blocked_read(inflight, events, "one") as ended:
        threading.Timer(0.01, ended.set).start()
        aborted = inflight.drain(NEVER_S)
    assert 0 == aborted
    assert ["one ended"] == events


def test_reads_that_do_not_end_in_time_are_aborted() -> None:
    """`drain` aborts all of them and returns after they have ended."""
    events: list[str] = []
    inflight = InflightReads()
    with blocked_read(inflight, events, "one"), blocked_read(inflight, events, "two"):
        aborted = inflight.drain(0.0)
        assert 2 == aborted
        assert 4 == len(events)


def test_a_read_that_continues_after_its_abort_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """`drain` waits for it without a limit and logs a warning; here the warning ends the read."""
    events: list[str] = []
    started, ended = threading.Event(), threading.Event()
    ending_log = EndingLog(ended, events)
    monkeypatch.setattr(channels, "log", ending_log)
    monkeypatch.setattr(channels, "WARN_S", 0.0)
    inflight = InflightReads()

    def read() -> None:
        with inflight.track(lambda: events.append("aborted")):
            started.set()
            ended.wait(NEVER_S)
            events.append("ended")

    thread = threading.Thread(target=read)
    thread.start()
    assert started.wait(NEVER_S)
    inflight.drain(0.0)
    thread.join()
    assert ["aborted", "warned", "ended"] == events


class EndingLog:
    """A log whose first warning ends the read."""

    def __init__(self, ended: threading.Event, events: list[str]) -> None:
        self._ended = ended
        self._events = events

    def warning(self, event: str, *, reads: int) -> None:
        if not self._ended.is_set():
            self._events.append("warned")
            self._ended.set()


def test_a_later_read_is_not_waited_for() -> None:
    """A read that begins after the fence reads no changing bytes. Here the abort of the first read begins a
    later one.
    """
    events: list[str] = []
    inflight = InflightReads()
    with contextlib.ExitStack() as first, contextlib.ExitStack() as later:

        def abort() -> None:
            later.enter_context(inflight.track(lambda: events.append("later read aborted")))
            first.close()

        first.enter_context(inflight.track(abort))
        assert 1 == inflight.drain(0.0)
        assert [] == events


def test_a_failed_read_has_ended() -> None:
    """`drain` does not wait for a read that raised."""
    inflight = InflightReads()
    with pytest.raises(OSError, match="broken pipe"), inflight.track(lambda: None):
        raise OSError("broken pipe")
    assert 0 == inflight.drain(NEVER_S)

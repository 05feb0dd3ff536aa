"""Progress of an opaque loader, observed from outside."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rfork.receiver import runner
from rfork.receiver.runner import LoaderLiveness
from tests.unit.receiver.fleet import NEVER_S


def test_a_blocked_thread_is_inactive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last activity stays unchanged however often it is polled."""
    monkeypatch.setattr(runner, "PROCESS_IO", tmp_path / "none")
    monkeypatch.setattr(runner, "MIN_CPU_S", 0.1)  # starting to wait costs some CPU time too
    created: list[LoaderLiveness] = []
    ready, finished = threading.Event(), threading.Event()

    def wait() -> None:
        created.append(LoaderLiveness())
        ready.set()
        finished.wait(NEVER_S)

    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait(NEVER_S)
    is_active = [created[0].last_activity() for _ in range(3)]
    finished.set()
    thread.join()
    assert 1 == len(set(is_active))


def test_cpu_time_counts_as_activity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the CPU time of the observed thread counts."""
    monkeypatch.setattr(runner, "PROCESS_IO", tmp_path / "none")
    liveness = LoaderLiveness()
    before = liveness.last_activity()
    sum(range(2_000_000))
    assert liveness.last_activity() > before


@pytest.mark.parametrize(("count", "is_active"), [(runner.MIN_BYTES, True), (10, False)])
def test_reads_count_as_activity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, is_active: bool) -> None:
    """Reads of the process count even on other threads; a few bytes do not."""
    io_file = tmp_path / "io"
    io_file.write_text("rchar: 1000\nwchar: 5\nread_bytes: 0\n")
    monkeypatch.setattr(runner, "PROCESS_IO", io_file)
    monkeypatch.setattr(runner, "MIN_CPU_S", NEVER_S)
    liveness = LoaderLiveness()
    before = liveness.last_activity()
    io_file.write_text(f"rchar: 1000\nwchar: 5\nread_bytes: {count}\n")
    assert is_active == (liveness.last_activity() > before)

"""Whether a loader does anything, as seen from outside."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from rfork.fork import pulse
from rfork.fork.pulse import Pulse
from tests.unit.fork.fleet import NEVER_S


def test_a_thread_that_waits_has_no_pulse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was last seen of it stays as it was, however often one looks."""
    monkeypatch.setattr(pulse, "IO", tmp_path / "none")
    monkeypatch.setattr(pulse, "LEAST_CPU_S", 0.1)  # to begin to wait takes some, too
    made: list[Pulse] = []
    ready, over = threading.Event(), threading.Event()

    def wait() -> None:
        made.append(Pulse())
        ready.set()
        over.wait(NEVER_S)

    thread = threading.Thread(target=wait)
    thread.start()
    ready.wait(NEVER_S)
    seen = [made[0].at() for _ in range(3)]
    over.set()
    thread.join()
    assert 1 == len(set(seen))


def test_work_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU time of its thread counts."""
    monkeypatch.setattr(pulse, "IO", tmp_path / "none")
    own = Pulse()
    before = own.at()
    sum(range(2_000_000))
    assert own.at() > before


@pytest.mark.parametrize(("count", "seen"), [(pulse.LEAST_BYTES, True), (10, False)])
def test_reading_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int, seen: bool) -> None:
    """What its process reads counts, be it on other threads; a few bytes do not."""
    told = tmp_path / "io"
    told.write_text("rchar: 1000\nwchar: 5\nread_bytes: 0\n")
    monkeypatch.setattr(pulse, "IO", told)
    monkeypatch.setattr(pulse, "LEAST_CPU_S", NEVER_S)
    own = Pulse()
    before = own.at()
    told.write_text(f"rchar: 1000\nwchar: 5\nread_bytes: {count}\n")
    assert seen == (own.at() > before)

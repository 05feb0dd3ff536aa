"""Loading artifacts from storage respects the deadline, whatever storage does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rfork import artifacts
from rfork.errors import DeadlineExceeded
from rfork.image.memory import Image
from rfork.settings import ArtifactSettings, load
from rfork.storage.snapshots.snapshot import Snapshot

MAX_WAIT_S = 20.0


@pytest.fixture
def saved(tmp_path: Path) -> str:
    """Return the URI of a saved cache with one file."""
    folder = tmp_path / "a"
    folder.mkdir(mode=0o755)
    (folder / "k.so").write_bytes(b"elf")
    uri = (tmp_path / "s").as_uri()
    artifacts.save(uri, artifacts=settings(folder))
    return uri


@pytest.fixture
def finished() -> Iterator[threading.Event]:
    """Set when the test ends."""
    event = threading.Event()
    yield event
    event.set()


def settings(folder: Path) -> ArtifactSettings:
    return load(
        ArtifactSettings,
        kinds="inductor",
        dirs=f"inductor={folder}",
        quiet_period_s=0,
    )


def test_storage_that_hangs_is_abandoned_at_the_deadline(
    saved: str, finished: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start continues while the read still hangs; the report contains the reason."""
    ended: list[bool] = []

    def hangs(self: Snapshot, image: Image, **_: Callable[[int], None] | None) -> None:
        finished.wait(MAX_WAIT_S)
        ended.append(True)

    monkeypatch.setattr(Snapshot, "fill", hangs)
    report = artifacts.load(saved, artifacts=settings(tmp_path / "b"), deadline_s=0.5)
    assert [] == ended
    assert "DeadlineExceeded" == (report.reason or "").partition(":")[0]
    assert report.source is None
    assert not (tmp_path / "b").exists()


def test_a_slow_read_ends_at_the_deadline(
    saved: str, finished: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first bytes that arrive after the deadline end the read."""
    errors: list[BaseException] = []
    ended = threading.Event()

    def trickles(self: Snapshot, image: Image, *, progress: Callable[[int], None] | None = None, **_: None) -> None:
        try:
            while not finished.wait(0.01):
                assert progress is not None
                progress(1)
        except BaseException as error:
            errors.append(error)
            raise
        finally:
            ended.set()

    monkeypatch.setattr(Snapshot, "fill", trickles)
    report = artifacts.load(saved, artifacts=settings(tmp_path / "b"), deadline_s=0.5)
    assert ended.wait(MAX_WAIT_S)
    assert "DeadlineExceeded" == (report.reason or "").partition(":")[0]
    assert [DeadlineExceeded] == [type(error) for error in errors]

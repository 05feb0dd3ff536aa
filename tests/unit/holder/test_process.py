"""The holder's process, with a fake planner and images that fetch nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from rfork.errors import PlannerUnreachable, SettingsError
from rfork.holder import process
from rfork.holder.host import WatchedProcess, host_lock
from rfork.holder.image_keeper import ImageKeeper, State
from rfork.holder.process import Holder, HolderOptions
from rfork.planner_client.client import PlannerClient
from rfork.schema import HeldImage, HolderAck, HolderReport, ImageSelector, Rank, WantedImage
from rfork.settings import InstanceSettings

GB = 10**9


def wanted(model: str, size: int = 1) -> WantedImage:
    """Return an image of `size` GB that an engine on the host has."""
    return WantedImage(
        model=model, version="v1", rank=Rank(), layout_id="a" * 32, image_bytes=size * GB, cause="engine", reason=""
    )


class FakeKeeper:
    """An image whose state the test sets."""

    def __init__(self, image: WantedImage, events: list[str]) -> None:
        self.wanted = image
        self.state: State = "fetching"
        self.failure = ""
        self.used_at = 0.0
        self.has_readers = False
        self.drained = threading.Event()
        self.drained.set()
        self._events = events

    def start(self) -> None:
        """Record the fetch."""
        self._events.append(f"fetch {self.wanted.model}")

    def close(self, drain_s: float = 0.0) -> None:
        """Wait until the test lets the readers end."""
        self.drained.wait(30)
        self.state = "closed"
        self._events.append(f"close {self.wanted.model}")

    def report(self) -> HeldImage:
        """Return its state."""
        image = self.wanted
        return HeldImage(
            instance_id=image.model,
            model=image.model,
            version=image.version,
            rank=image.rank,
            layout_id=image.layout_id,
            image_bytes=image.image_bytes,
            state="ready" if self.state == "ready" else "fetching",
        )


class FakePlanner:
    """A planner whose responses the test sets. It stops the holder once the test's steps are done."""

    def __init__(self, holder: HolderOfTest) -> None:
        self.wants: tuple[WantedImage, ...] = ()
        self.reachable = True
        self.removed: list[str] = []
        self.reports: list[HolderReport] = []
        self._holder = holder

    def report_holder(self, report: HolderReport) -> HolderAck:
        """Run the next step of the test, then respond."""
        self.reports.append(report)
        if self._holder.steps:
            self._holder.steps.pop(0)()
        else:
            self._holder.stopped = True
        if not self.reachable:
            raise PlannerUnreachable("no response")
        return HolderAck(heartbeat_s=0.0, wanted=self.wants)

    def remove_holder(self, holder_id: str) -> None:
        """Record the end."""
        self.removed.append(holder_id)


class HolderOfTest:
    """A holder with 2 GB; each heartbeat runs one step of the test first."""

    def __init__(self, options: HolderOptions | None = None) -> None:
        self.events: list[str] = []
        self.keepers: dict[str, FakeKeeper] = {}
        self.steps: list[Callable[[], None]] = []
        self.stopped = False
        self.now = 100.0
        self.planner = FakePlanner(self)
        self.holder = Holder(
            InstanceSettings(node_name="node"),
            options or HolderOptions(memory_bytes=2 * GB),
            cast("PlannerClient", self.planner),
            create_keeper=self._keeper,
            clock=lambda: self.now,
        )

    def _keeper(self, image: WantedImage) -> ImageKeeper:
        keeper = self.keepers[image.model] = FakeKeeper(image, self.events)
        return cast("ImageKeeper", keeper)

    def run(self, *steps: Callable[[], None]) -> str:
        """Run the holder through the steps, and a last heartbeat, after which it is stopped."""
        self.steps = list(steps)
        return self.holder.run(lambda: self.stopped)

    def want(self, *images: WantedImage) -> Callable[[], None]:
        """Return the step in which the planner begins to want these images."""

        def step() -> None:
            self.planner.wants = images

        return step

    def finish(self, model: str, state: State = "ready", failure: str = "") -> Callable[[], None]:
        """Return the step in which a fetch ends."""

        def step() -> None:
            self.keepers[model].state = state
            self.keepers[model].failure = failure

        return step

    @property
    def last_report(self) -> HolderReport:
        """The last report to the planner."""
        return self.planner.reports[-1]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats without a pause."""
    monkeypatch.setattr(process, "HEARTBEAT_S", 0.0)


def nothing() -> None:
    """Let a heartbeat pass."""


def test_wanted_images_are_fetched_and_reported() -> None:
    """The next report has them."""
    test = HolderOfTest()
    assert "stopped" == test.run(test.want(wanted("a")))
    assert ["fetch a", "close a"] == test.events
    assert ["a"] == [image.model for image in test.last_report.images]
    assert GB == test.last_report.used_bytes


def test_two_images_are_fetched_at_once() -> None:
    """The third one once another is complete."""
    test = HolderOfTest(HolderOptions(memory_bytes=9 * GB))
    test.run(test.want(wanted("a"), wanted("b"), wanted("c")), lambda: test.events.append("-"), test.finish("b"))
    assert ["fetch a", "fetch b", "-", "fetch c"] == test.events[:4]


def test_images_are_refused_for_lack_of_memory() -> None:
    """The planner learns why."""
    test = HolderOfTest()
    test.run(test.want(wanted("a", 2), wanted("b")))
    assert ["b"] == [refused.model for refused in test.last_report.refused]
    assert "needs 1 GB" in test.last_report.refused[0].reason


def test_a_fetch_waits_for_the_memory_of_an_evicted_image() -> None:
    """Readers of the evicted image use it until they have finished."""
    test = HolderOfTest()

    def evict() -> None:
        test.finish("a")()
        test.keepers["a"].drained.clear()
        test.planner.wants = (wanted("b", 2),)

    def check() -> None:
        assert "fetch b" not in test.events
        assert 2 * GB == test.last_report.used_bytes
        keeper = test.keepers["a"]
        keeper.drained.set()
        (thread,) = (each for each in threading.enumerate() if each.name == "rfork-evict")
        thread.join()

    test.run(test.want(wanted("a", 2)), evict, check)
    assert ["fetch a", "close a", "fetch b", "close b"] == test.events


def test_a_failed_fetch_is_reported_and_repeated_later() -> None:
    """Its pause has not passed at the next heartbeat."""
    test = HolderOfTest()

    def pass_time() -> None:
        assert ["no source"] == [refused.reason for refused in test.last_report.refused]
        test.now += process.RETRY_S[0]

    test.run(test.want(wanted("a")), test.finish("a", "failed", "no source"), pass_time)
    assert ["fetch a", "close a", "fetch a"] == test.events[:3]


def test_consecutive_failures_are_repeated_later_and_later() -> None:
    """The second pause is longer."""
    test = HolderOfTest()

    def pass_time() -> None:
        test.now += process.RETRY_S[0]

    fail = test.finish("a", "failed", "no source")
    test.run(test.want(wanted("a")), fail, pass_time, fail, pass_time)
    assert 2 == test.events.count("fetch a")


def test_images_are_kept_while_the_planner_is_unreachable() -> None:
    """They are reported again once it responds."""
    test = HolderOfTest()

    def lose_planner() -> None:
        test.finish("a")()
        test.planner.reachable = False
        test.planner.wants = ()

    test.run(test.want(wanted("a")), lose_planner, nothing)
    assert ["a"] == [image.model for image in test.last_report.images]


def test_an_image_that_is_no_longer_wanted_is_kept() -> None:
    """As long as there is memory."""
    test = HolderOfTest()
    test.run(test.want(wanted("a")), test.finish("a"), test.want(), nothing)
    assert ["a"] == [image.model for image in test.last_report.images]


def test_a_stopped_holder_leaves_the_planner() -> None:
    """After its images are closed."""
    test = HolderOfTest()
    test.run(test.want(wanted("a")))
    assert "close a" == test.events[-1]
    assert [test.holder.holder_id] == test.planner.removed


def one_shot(until_pid: int | None = None) -> HolderOfTest:
    """Return a one-shot holder."""
    selector = ImageSelector(model="a", version=None)
    return HolderOfTest(
        HolderOptions(memory_bytes=2 * GB, selectors=(selector,), follows_host=False, until_pid=until_pid)
    )


def test_a_one_shot_holder_ends_once_nothing_is_wanted() -> None:
    """The engine has its weights."""
    test = one_shot()
    assert "the engine has its weights" == test.run(test.want(wanted("a")), test.finish("a"), test.want())


def test_a_one_shot_holder_waits_for_its_readers() -> None:
    """A fork that reads from it ends first."""
    test = one_shot()

    def read() -> None:
        test.finish("a")()
        test.planner.wants = ()
        test.keepers["a"].has_readers = True

    def finish_reading() -> None:
        test.events.append("finished")
        test.keepers["a"].has_readers = False

    assert "the engine has its weights" == test.run(test.want(wanted("a")), read, nothing, finish_reading)
    assert ["fetch a", "finished", "close a"] == test.events


def test_a_one_shot_holder_of_unknown_weights_ends() -> None:
    """There is nothing to fetch."""
    assert "no instance has the weights" == one_shot().run(nothing)


def test_a_one_shot_holder_with_a_process_waits_for_weights() -> None:
    """Some instance may have them before the engine does."""
    test = one_shot(os.getpid())
    assert "the engine has its weights" == test.run(nothing, test.want(wanted("a")), test.finish("a"), test.want())


def test_a_one_shot_holder_with_a_process_does_not_wait_for_ever() -> None:
    """After a minute its engine loads the weights itself."""
    test = one_shot(os.getpid())

    def pass_time() -> None:
        test.now += process.NO_SOURCE_TIMEOUT_S

    assert "no instance has the weights" == test.run(nothing, pass_time)


def test_a_one_shot_holder_whose_source_left_ends_with_that_reason() -> None:
    """The engine will not find the weights here."""
    test = one_shot()
    failed = test.finish("a", "failed", "no source")
    assert "no instance has the weights" == test.run(test.want(wanted("a")), failed, test.want())


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that runs until it is killed."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def test_a_holder_ends_with_its_process(child: subprocess.Popen[bytes]) -> None:
    """Also if it is a zombie, for which no parent waits."""
    test = one_shot(child.pid)

    def kill() -> None:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert f"process {child.pid} has ended" == test.run(test.want(wanted("a")), kill)


def test_a_process_that_does_not_exist_has_ended(child: subprocess.Popen[bytes]) -> None:
    """Its id may be observed too late."""
    assert not WatchedProcess(child.pid).has_ended
    child.kill()
    child.wait()
    assert WatchedProcess(child.pid).has_ended


def test_a_one_shot_holder_ends_after_a_time() -> None:
    """If no engine forks."""
    test = one_shot()

    def pass_time() -> None:
        test.now += process.ONE_SHOT_TIMEOUT_S

    assert "no engine used the weights within 1800 s" == test.run(test.want(wanted("a")), pass_time)


def test_one_holder_runs_on_a_host(tmp_path: Path) -> None:
    """A second one is refused, until the first has ended."""
    settings = InstanceSettings(node_name="node/1", unix_socket_dir=tmp_path)
    with host_lock(settings), pytest.raises(SettingsError, match="already running on node/1"), host_lock(settings):
        pass
    with host_lock(settings):
        pass


def test_holders_of_other_hosts_may_share_the_folder(tmp_path: Path) -> None:
    """As in tests of several hosts on one machine."""
    first = InstanceSettings(node_name="one", unix_socket_dir=tmp_path)
    with host_lock(first), host_lock(first.model_copy(update={"node_name": "two"})):
        pass


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """The error has a hint."""
    settings = InstanceSettings(node_name="node", unix_socket_dir=tmp_path / "missing")
    with pytest.raises(SettingsError, match="cannot create") as raised, host_lock(settings):
        pass
    assert "RFORK_UNIX_SOCKET_DIR" in raised.value.hint

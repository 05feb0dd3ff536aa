"""The heartbeat: registration, outages, rejected tokens and clock differences."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from rfork.errors import SettingsError
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.heartbeat import Heartbeat
from rfork.planner_client.planner_clock import MAX_SKEW_S, PlannerClock
from rfork.planner_client.token_file import TokenFile
from rfork.schema import InstanceAck, InstanceReport, Placement

REPORT = InstanceReport(
    instance_id="i", model="m", layout_id="a" * 32, image_bytes=1, chunk_count=1, state="loading",
    address="h:1", placement=Placement(host="h"),
)  # fmt: skip
WAIT_S = 20.0


@pytest.fixture
def events(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Return a function that lists the log events so far, without fields."""
    caplog.set_level(logging.INFO, logger="rfork.heartbeat")
    # By name: records of other loggers reach `caplog` too if an earlier test has set their level.
    return lambda: [
        record.rfork_fields["event"]
        for record in caplog.records
        if record.name == "rfork.heartbeat" and hasattr(record, "rfork_fields")
    ]


class FakePlanner:
    """Acknowledges reports while it is reachable, and records the method of each request."""

    def __init__(self, *, heartbeat_s: float = 3600.0) -> None:
        self.methods: queue.Queue[str] = queue.Queue()
        self.unreachable = threading.Event()
        self.heartbeat_s = heartbeat_s
        self.client = PlannerClient("http://p", transport=httpx.MockTransport(self._handle))

    def _handle(self, request: httpx.Request) -> httpx.Response:
        self.methods.put(request.method)
        if self.unreachable.is_set():
            raise httpx.ConnectError("refused")
        if request.method == "DELETE":
            return httpx.Response(204)
        return httpx.Response(200, json={"heartbeat_s": self.heartbeat_s, "lease_keys": ["a2V5"]})

    def next_method(self) -> str:
        """Wait for the next request and return its method."""
        return self.methods.get(timeout=WAIT_S)


def fast_heartbeat(planner: FakePlanner, acks: queue.Queue[InstanceAck]) -> Heartbeat:
    """Return a heartbeat, not yet started, that reports and retries without pauses."""
    return Heartbeat(planner.client, lambda: REPORT, acks.put, retry_s=0.001, min_interval_s=0.0)


def test_it_reports_at_start_and_on_request_and_removes_at_the_end() -> None:
    """With an interval of an hour, only start, send_now and stop send requests."""
    planner, acks = FakePlanner(), queue.Queue[InstanceAck]()
    heartbeat = fast_heartbeat(planner, acks)
    heartbeat.start()
    assert ("a2V5",) == acks.get(timeout=WAIT_S).lease_keys
    heartbeat.send_now()
    acks.get(timeout=WAIT_S)
    assert heartbeat.is_registered
    heartbeat.stop(remove=True)
    heartbeat.stop(remove=True)
    assert ["PUT", "PUT", "DELETE"] == list(planner.methods.queue)


def test_it_reports_within_the_planners_interval() -> None:
    """A short interval causes report after report, without send_now."""
    planner, acks = FakePlanner(heartbeat_s=0.001), queue.Queue[InstanceAck]()
    heartbeat = fast_heartbeat(planner, acks)
    heartbeat.start()
    assert ["PUT"] * 5 == [planner.next_method() for _ in range(5)]
    heartbeat.stop(remove=False)


def test_an_outage_is_logged_once(events: Callable[[], list[str]]) -> None:
    """Its begin and its end are logged, however many reports failed."""
    planner, acks = FakePlanner(), queue.Queue[InstanceAck]()
    planner.unreachable.set()
    heartbeat = fast_heartbeat(planner, acks)
    heartbeat.start()
    for _ in range(3):
        planner.next_method()
    assert not heartbeat.is_registered
    planner.unreachable.clear()
    assert heartbeat.wait_connected(WAIT_S)
    heartbeat.stop(remove=False)
    assert ["planner unreachable, retrying", "planner reachable again"] == events()


def test_stopping_without_a_planner_logs_a_warning(events: Callable[[], list[str]]) -> None:
    """The planner removes a silent instance after a timeout."""
    planner, acks = FakePlanner(), queue.Queue[InstanceAck]()
    heartbeat = fast_heartbeat(planner, acks)
    heartbeat.start()
    acks.get(timeout=WAIT_S)
    planner.unreachable.set()
    heartbeat.stop(remove=True)
    assert ["instance not removed"] == events()


def test_a_report_that_raises_does_not_stop_the_heartbeat(events: Callable[[], list[str]]) -> None:
    """The error is logged, and the next report is sent."""
    planner, acks = FakePlanner(), queue.Queue[InstanceAck]()
    failures = iter([ValueError("broken"), None])

    def report() -> InstanceReport:
        failure = next(failures, None)
        if failure is not None:
            raise failure
        return REPORT

    heartbeat = Heartbeat(planner.client, report, acks.put, retry_s=0.001, min_interval_s=0.0)
    heartbeat.start()
    assert heartbeat.wait_connected(WAIT_S)
    heartbeat.stop(remove=False)
    assert ["heartbeat failed", "planner reachable again"] == events()


@pytest.mark.parametrize("remove", [True, False])
def test_a_heartbeat_that_was_never_started_stops(remove: bool) -> None:
    """There is nothing to join and nothing to remove."""
    planner = FakePlanner()
    fast_heartbeat(planner, queue.Queue()).stop(remove=remove)
    Heartbeat(planner.client, lambda: REPORT, lambda ack: None, instance_id="i").stop(remove=remove)
    assert [] == list(planner.methods.queue)


def test_a_heartbeat_that_stops_before_its_first_report_still_removes_the_instance() -> None:
    """The planner may know the instance from a fork request."""

    class DelayedHeartbeat(Heartbeat):
        def _run(self) -> None:
            self._stopping.wait(WAIT_S)
            super()._run()

    planner, acks = FakePlanner(), queue.Queue[InstanceAck]()
    heartbeat = DelayedHeartbeat(planner.client, lambda: REPORT, acks.put, instance_id="i")
    heartbeat.start()
    heartbeat.stop(remove=True)
    assert ["DELETE"] == list(planner.methods.queue)


def test_waiting_for_a_report_skips_the_minimum_interval() -> None:
    """The next report is sent immediately, and is acknowledged when the call returns."""
    planner, acks = FakePlanner(), queue.Queue[InstanceAck]()
    heartbeat = Heartbeat(planner.client, lambda: REPORT, acks.put, min_interval_s=3600.0)
    heartbeat.start()
    acks.get(timeout=WAIT_S)
    heartbeat.send_now()  # from here on it waits for the minimum interval
    assert heartbeat.wait_acked(WAIT_S)
    assert 1 == acks.qsize()
    heartbeat.stop(remove=False)


def test_waiting_for_a_report_fails_immediately_without_a_planner() -> None:
    """After a failed report, the call returns False without waiting."""
    planner, acks = FakePlanner(), queue.Queue[InstanceAck]()
    planner.unreachable.set()
    heartbeat = Heartbeat(planner.client, lambda: REPORT, acks.put, retry_s=3600.0)
    heartbeat.start()
    assert "PUT" == planner.next_method()
    assert not heartbeat.wait_acked(threading.TIMEOUT_MAX)
    heartbeat.stop(remove=False)


class TokenCheckingPlanner(httpx.BaseTransport):
    """A planner that accepts only `tokens`, and counts the requests with other tokens in `refused`."""

    def __init__(self, *tokens: str) -> None:
        self.tokens = set(tokens)
        self.refused = threading.Semaphore(0)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if request.headers.get("Authorization", "").removeprefix("Bearer ") in self.tokens:
            return httpx.Response(200, json={"heartbeat_s": 3600.0, "lease_keys": []})
        self.refused.release()
        problem = {
            "type": "https://rfork.dev/problems/unauthorized",
            "title": "x",
            "status": 401,
            "detail": "no",
        }
        return httpx.Response(401, json=problem)


def replace_file(file: Path, token: str) -> None:
    """Replace a token file atomically, as Kubernetes does."""
    new_file = file.with_suffix(".new")
    new_file.write_text(token)
    new_file.rename(file)


def test_a_replaced_token_is_used_immediately(tmp_path: Path) -> None:
    """The file is read again when it changes."""
    file = tmp_path / "token"
    file.write_text("old\n")
    token_planner = TokenCheckingPlanner("old")
    client = PlannerClient("http://p", token=TokenFile(file), transport=token_planner)
    client.report(REPORT)
    token_planner.tokens = {"new"}
    replace_file(file, "new")
    client.report(REPORT)
    assert not token_planner.refused.acquire(blocking=False)


def test_an_unusable_token_file_keeps_the_previous_token(tmp_path: Path) -> None:
    """An incomplete rotation does not remove an instance from the fleet."""
    file = tmp_path / "token"
    file.write_text("old")
    client = PlannerClient("http://p", token=TokenFile(file), transport=TokenCheckingPlanner("old"))
    file.write_text("")
    client.report(REPORT)
    file.unlink()
    client.report(REPORT)


@pytest.mark.parametrize("content", [None, b"", b"two words", b"\xff"])
def test_an_unusable_token_file_is_a_settings_error(tmp_path: Path, content: bytes | None) -> None:
    """The error is raised by the constructor and names the setting and the file."""
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=r"RFORK_TOKEN_FILE: .*/token"):
        TokenFile(file)


def test_a_rejected_instance_registers_again_when_its_token_is_accepted(
    tmp_path: Path, events: Callable[[], list[str]]
) -> None:
    """It is enough to replace the token file after the planner's; no restart is needed."""
    file = tmp_path / "token"
    file.write_text("old")
    token_planner = TokenCheckingPlanner("new")
    client = PlannerClient("http://p", token=TokenFile(file), transport=token_planner)
    heartbeat = Heartbeat(client, lambda: REPORT, lambda _: None, retry_s=0.001, min_interval_s=0.0)
    heartbeat.start()
    for _ in range(3):
        assert token_planner.refused.acquire(timeout=WAIT_S)
    assert not heartbeat.is_registered
    replace_file(file, "new")
    assert heartbeat.wait_connected(WAIT_S)
    heartbeat.stop(remove=False)
    assert ["planner rejects this instance: forks cannot find it", "planner reachable again"] == events()


def test_a_persistent_rejection_is_logged_repeatedly(events: Callable[[], list[str]]) -> None:
    """It is logged every `remind_s` seconds, by default a minute."""
    token_planner = TokenCheckingPlanner()
    client = PlannerClient("http://p", token="wrong", transport=token_planner)
    heartbeat = Heartbeat(client, lambda: REPORT, lambda _: None, retry_s=0.001, min_interval_s=0.0, remind_s=0.0)
    heartbeat.start()
    for _ in range(3):
        assert token_planner.refused.acquire(timeout=WAIT_S)
    heartbeat.stop(remove=False)
    assert events().count("planner rejects this instance: forks cannot find it") >= 2


def test_a_clock_difference_is_logged_once(events: Callable[[], list[str]]) -> None:
    """Later acknowledgements with the same difference are not logged."""
    ack = {"heartbeat_s": 3600.0, "lease_keys": [], "unix_s": 1.0}
    client = PlannerClient("http://p", transport=httpx.MockTransport(lambda _: httpx.Response(200, json=ack)))
    clock = PlannerClock()
    heartbeat = Heartbeat(client, lambda: REPORT, lambda _: None, min_interval_s=0.0, clock=clock)
    heartbeat.start()
    assert heartbeat.wait_acked(WAIT_S)
    assert heartbeat.wait_acked(WAIT_S)
    heartbeat.stop(remove=False)
    assert ["clock differs from the planner's"] == events()
    assert clock.skew_s is not None
    assert clock.skew_s > MAX_SKEW_S

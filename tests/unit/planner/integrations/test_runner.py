"""The runner of the integrations: failures, restarts, stops, and the probe endpoints."""

from __future__ import annotations

import asyncio
import logging
import threading
from asyncio import TaskGroup  # type: ignore[attr-defined]  # Python 3.11: see runner.py
from builtins import ExceptionGroup  # type: ignore[attr-defined]  # Python 3.11
from collections.abc import Awaitable, Callable

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge
from pydantic import SecretStr

from planner.integrations.health import IntegrationMetrics, IntegrationStatus, probes_app
from planner.integrations.runner import InProcessRunner, IntegrationMain, IntegrationRunner, create_in_process_runner
from rfork.errors import MissingExtra, RforkError, SettingsError
from rfork.settings import InstanceSettings, IntegrationName, KubernetesSettings, PlannerSettings

SETTINGS = (KubernetesSettings(), InstanceSettings())


class IdleIntegration:
    """An integration that runs until it is cancelled."""

    def __init__(self) -> None:
        self.stopped = False

    async def __call__(
        self, kubernetes_settings: KubernetesSettings, settings: InstanceSettings, status: IntegrationStatus
    ) -> None:
        status.ready()
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped = True


def failing(error: Exception | None) -> IntegrationMain:
    """Return an integration that fails immediately, or ends."""

    async def run(
        kubernetes_settings: KubernetesSettings, settings: InstanceSettings, status: IntegrationStatus
    ) -> None:
        if error is not None:
            raise error

    return run


@pytest.mark.parametrize(
    ("failure", "error_type", "text"),
    [
        (SettingsError("a setting"), SettingsError, "a setting"),
        (ExceptionGroup("tasks", [ValueError("x"), SettingsError("a setting")]), SettingsError, "a setting"),
        (ValueError("odd"), RforkError, "integration webhook failed: ValueError: odd"),
        (ExceptionGroup("tasks", [ValueError("odd")]), RforkError, "integration webhook failed: ValueError: odd"),
        (None, RforkError, "integration webhook ended unexpectedly"),
        (
            ModuleNotFoundError("No module named 'lightkube'", name="lightkube.core"),
            MissingExtra,
            "integration webhook is not available: No module named 'lightkube'",
        ),
        (
            ModuleNotFoundError("No module named 'planner.x'", name="planner.x"),
            RforkError,
            "integration webhook failed: ModuleNotFoundError: No module named 'planner.x'",
        ),
    ],
)
async def test_a_failure_ends_all_integrations(
    failure: Exception | None, error_type: type[RforkError], text: str
) -> None:
    """In their own process the others are stopped, and the failure is raised as one RforkError."""
    idle = IdleIntegration()
    runner: dict[IntegrationName, IntegrationMain] = {"webhook": failing(failure), "scaler": idle}
    with pytest.raises(RforkError) as caught:
        await IntegrationRunner(["scaler", "webhook"], *SETTINGS, restart_on_failure=False, integrations=runner).run()
    assert error_type is type(caught.value)
    assert text == str(caught.value)
    assert idle.stopped


async def test_a_missing_extra_is_named() -> None:
    """The hint is the command that installs it."""
    runner: dict[IntegrationName, IntegrationMain] = {"webhook": failing(ImportError("no", name="lightkube"))}
    with pytest.raises(MissingExtra) as caught:
        await IntegrationRunner(["webhook"], *SETTINGS, restart_on_failure=False, integrations=runner).run()
    assert "pip install 'rfork[kubernetes]'" == caught.value.hint


async def test_cancelling_waits_for_cleanup() -> None:
    """The cleanup of an integration finishes before `run` returns."""
    idle = IdleIntegration()
    running = asyncio.create_task(
        IntegrationRunner(["webhook"], *SETTINGS, restart_on_failure=False, integrations={"webhook": idle}).run()
    )
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert idle.stopped


class RecordedPauses:
    """Records sleeps instead of waiting, and ends after a number of them."""

    def __init__(self, max_pauses: int) -> None:
        self.seen: list[float] = []
        self.finished = asyncio.Event()
        self._max_pauses = max_pauses

    async def __call__(self, seconds: float) -> None:
        self.seen.append(seconds)
        if len(self.seen) == self._max_pauses:
            self.finished.set()
            await asyncio.Event().wait()


async def run_until(event: asyncio.Event, runner: IntegrationRunner) -> None:
    """Run the integrations until the event is set, then stop them."""
    running = asyncio.create_task(runner.run())
    await event.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_failed_integration_is_restarted(caplog: pytest.LogCaptureFixture) -> None:
    """With growing pauses up to a minute; the other one is not affected, and each restart logs a line."""
    pauses, idle = RecordedPauses(8), IdleIntegration()
    runner = IntegrationRunner(
        ["webhook", "scaler"],
        *SETTINGS,
        restart_on_failure=True,
        integrations={"webhook": failing(SettingsError("no port")), "scaler": idle},
        sleep=pauses,
        monotonic=lambda: 0.0,
    )
    with caplog.at_level(logging.ERROR):
        await run_until(pauses.finished, runner)
    assert [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0] == pauses.seen
    assert 8 == sum("integration failed" in record.getMessage() for record in caplog.records)
    assert ["webhook: not ready: failed: no port", "scaler: ready"] == [str(status) for status in runner.statuses()]


async def test_the_restart_pause_is_reset_after_a_long_run() -> None:
    """A failure after more than a minute counts as the first."""
    pauses, times = RecordedPauses(4), iter((0, 1, 1, 2, 2, 100, 100, 101))
    runner = IntegrationRunner(
        ["webhook"],
        *SETTINGS,
        restart_on_failure=True,
        integrations={"webhook": failing(SettingsError("no port"))},
        sleep=pauses,
        monotonic=lambda: float(next(times)),
    )
    await run_until(pauses.finished, runner)
    assert [1.0, 2.0, 1.0, 2.0] == pauses.seen


async def test_an_integration_that_fails_while_stopping_is_not_restarted() -> None:
    """A task group raises the failure instead of its cancellation."""
    pauses, began = RecordedPauses(1), asyncio.Event()

    async def fails() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("odd") from None

    async def run(
        kubernetes_settings: KubernetesSettings, settings: InstanceSettings, status: IntegrationStatus
    ) -> None:
        async with TaskGroup() as tasks:
            tasks.create_task(fails())

    await run_until(
        began,
        IntegrationRunner(["webhook"], *SETTINGS, restart_on_failure=True, integrations={"webhook": run}, sleep=pauses),
    )
    assert [] == pauses.seen


ProbeRequest = Callable[[str], Awaitable[httpx.Response]]


@pytest.fixture
def statuses() -> list[IntegrationStatus]:
    return [IntegrationStatus("webhook"), IntegrationStatus("controller")]


@pytest.fixture
def get_probe(statuses: list[IntegrationStatus]) -> ProbeRequest:
    """Return the response to a GET of a probe path."""
    registry = CollectorRegistry()
    registry.register(IntegrationMetrics(lambda: statuses))

    async def get(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=probes_app(lambda: statuses, registry))
        async with httpx.AsyncClient(transport=transport, base_url="http://probes") as client:
            return await client.get(path)

    return get


async def test_readiness_covers_all_integrations(statuses: list[IntegrationStatus], get_probe: ProbeRequest) -> None:
    """/readyz has each integration's state and leadership; /healthz only shows that the process runs."""
    before = await get_probe("/readyz")
    for status in statuses:
        status.ready()
    statuses[1].leader(True)
    after = await get_probe("/readyz")
    statuses[0].not_ready("no certificate yet")
    again = await get_probe("/readyz")
    assert [
        (503, "webhook: not ready: starting\ncontroller: not ready: starting\n"),
        (200, "webhook: ready\ncontroller: ready, leader\n"),
        (503, "webhook: not ready: no certificate yet\ncontroller: ready, leader\n"),
        (200, "ok\n"),
        (404, "not found: there are /healthz, /readyz and /metrics\n"),
    ] == [
        (response.status_code, response.text)
        for response in (before, after, again, await get_probe("/healthz"), await get_probe("/else"))
    ]


async def test_metrics_of_all_integrations_are_on_one_page(
    statuses: list[IntegrationStatus], get_probe: ProbeRequest
) -> None:
    """The integrations' own metrics, plus readiness and leadership of each."""
    Gauge("rfork_webhook_something", "Metric of an integration", registry=statuses[0].registry).set(7)
    statuses[1].leader(False)
    lines = (await get_probe("/metrics")).text.splitlines()
    assert [
        'rfork_integration_ready{integration="webhook"} 0.0',
        'rfork_integration_ready{integration="controller"} 0.0',
        'rfork_integration_leader{integration="controller"} 0.0',
        "rfork_webhook_something 7.0",
    ] == [line for line in lines if not line.startswith("#")]


def test_a_planner_without_integrations_starts_no_runner() -> None:
    """Nothing is read, started or required."""
    with create_in_process_runner(PlannerSettings(), "http://127.0.0.1:8700") as runner:
        assert runner is None


def test_the_in_process_runner_waits_for_cleanup() -> None:
    """The planner requests the stop on exit, and the cleanup has finished when it returns."""
    began, ending, may_end = threading.Event(), threading.Event(), threading.Event()
    loops, done = list[asyncio.AbstractEventLoop](), list[str]()

    async def run(
        kubernetes_settings: KubernetesSettings, settings: InstanceSettings, status: IntegrationStatus
    ) -> None:
        loops.append(asyncio.get_running_loop())
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.to_thread(may_end.wait)
            done.append("cleaned up")

    async def yield_to_loop() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    with InProcessRunner(["controller"], *SETTINGS) as runner:
        runner._runner = IntegrationRunner(
            ["controller"], *SETTINGS, restart_on_failure=True, integrations={"controller": run}
        )
        runner.start()
        assert began.wait(30)
        runner.stop()
        assert ending.wait(30)
        runner.stop()
        try:
            asyncio.run_coroutine_threadsafe(yield_to_loop(), loops[0]).result(30)
        finally:
            may_end.set()
    assert ["cleaned up"] == done


def test_an_in_process_webhook_needs_a_planner_url_for_pods() -> None:
    """The planner's loopback address is useless for Pods: the error names the setting."""
    settings = PlannerSettings(integrations=("webhook",))
    with (
        pytest.raises(SettingsError) as caught,
        create_in_process_runner(settings, "http://127.0.0.1:8700"),
    ):
        pass
    assert "set RFORK_K8S_POD_PLANNER_URL" == caught.value.hint


@pytest.mark.parametrize(
    ("environment", "expected", "pods"),
    [
        ({}, ("http://127.0.0.1:8700", "own"), None),
        ({"RFORK_PLANNER": "http://service:80"}, ("http://service:80", "own"), "http://service:80"),
        (
            {"RFORK_K8S_POD_PLANNER_URL": "http://service:80", "RFORK_TOKEN": "operator"},
            ("http://127.0.0.1:8700", "operator"),
            "http://service:80",
        ),
    ],
)
def test_in_process_integrations_use_their_planner(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    expected: tuple[str, str],
    pods: str | None,
) -> None:
    """With its token, over loopback if it listens on all addresses. Explicit settings have priority."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    planner = PlannerSettings(integrations=("controller",), token=SecretStr("own"))
    with create_in_process_runner(planner, "http://0.0.0.0:8700") as runner:
        assert runner is not None
        kubernetes_settings, settings = runner._runner._settings_pair
    token = settings.token.get_secret_value() if settings.token else ""
    assert expected == (settings.planner, token)
    assert pods == kubernetes_settings.pod_planner_url

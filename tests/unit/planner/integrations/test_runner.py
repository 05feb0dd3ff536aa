"""What runs the hooks, without any of them: failures, starting anew, stopping, and what probes are told."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge
from pydantic import SecretStr

from planner.integrations.health import IntegrationMetrics, IntegrationStatus, probes_app
from planner.integrations.in_process import InProcessRunner, create_in_process_runner
from planner.integrations.runner import IntegrationMain, IntegrationRunner
from rfork.errors import MissingExtra, RforkError, SettingsError
from rfork.settings import InstanceSettings, IntegrationName, KubernetesSettings, PlannerSettings

SETTINGS = (KubernetesSettings(), InstanceSettings())


class IdleIntegration:
    """A hook that runs until it is cancelled."""

    def __init__(self) -> None:
        self.stopped = False

    async def __call__(
        self, hook_settings: KubernetesSettings, settings: InstanceSettings, status: IntegrationStatus
    ) -> None:
        status.ready()
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped = True


def failing(error: Exception | None) -> IntegrationMain:
    """A hook that fails at once, or ends."""

    async def run(hook_settings: KubernetesSettings, settings: InstanceSettings, status: IntegrationStatus) -> None:
        if error is not None:
            raise error

    return run


@pytest.mark.parametrize(
    ("failure", "error_type", "text"),
    [
        (SettingsError("a setting"), SettingsError, "a setting"),
        (ExceptionGroup("tasks", [ValueError("x"), SettingsError("a setting")]), SettingsError, "a setting"),
        (ValueError("odd"), RforkError, "hook webhook failed: ValueError: odd"),
        (ExceptionGroup("tasks", [ValueError("odd")]), RforkError, "hook webhook failed: ValueError: odd"),
        (None, RforkError, "hook webhook ended by itself"),
        (
            ModuleNotFoundError("No module named 'lightkube'", name="lightkube.core"),
            MissingExtra,
            "hook webhook is not available: No module named 'lightkube'",
        ),
        (
            ModuleNotFoundError("No module named 'planner.x'", name="planner.x"),
            RforkError,
            "hook webhook failed: ModuleNotFoundError: No module named 'planner.x'",
        ),
    ],
)
async def test_all_end_with_one_that_fails(failure: Exception | None, error_type: type[RforkError], text: str) -> None:
    """In a process of their own the others are stopped, and the failure is one error of ours."""
    idle = IdleIntegration()
    hooks: dict[IntegrationName, IntegrationMain] = {"webhook": failing(failure), "scaler": idle}
    with pytest.raises(RforkError) as caught:
        await IntegrationRunner(["scaler", "webhook"], *SETTINGS, restart_on_failure=False, integrations=hooks).run()
    assert (error_type, text, True) == (type(caught.value), str(caught.value), idle.stopped)


async def test_a_missing_extra_is_named() -> None:
    """The hint is the command that brings it."""
    hooks: dict[IntegrationName, IntegrationMain] = {"webhook": failing(ImportError("no", name="lightkube"))}
    with pytest.raises(MissingExtra) as caught:
        await IntegrationRunner(["webhook"], *SETTINGS, restart_on_failure=False, integrations=hooks).run()
    assert "pip install 'rfork[kubernetes]'" == caught.value.hint


async def test_cancelling_stops_them_in_order() -> None:
    """What a hook does at its end is done before `run` ends."""
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
    """Instead of sleeping: what was asked for, and an end after so many."""

    def __init__(self, max_pauses: int) -> None:
        self.seen: list[float] = []
        self.finished = asyncio.Event()
        self._max_pauses = max_pauses

    async def __call__(self, seconds: float) -> None:
        self.seen.append(seconds)
        if len(self.seen) == self._max_pauses:
            self.finished.set()
            await asyncio.Event().wait()


async def run_until(event: asyncio.Event, hooks: IntegrationRunner) -> None:
    """Run the hooks until the event is set, and stop them."""
    running = asyncio.create_task(hooks.run())
    await event.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_kept_hook_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    """Each time later, up to a minute; the other hook does not notice, and the log has a line for each."""
    pauses, idle = RecordedPauses(8), IdleIntegration()
    hooks = IntegrationRunner(
        ["webhook", "scaler"],
        *SETTINGS,
        restart_on_failure=True,
        integrations={"webhook": failing(SettingsError("no port")), "scaler": idle},
        sleep=pauses,
        monotonic=lambda: 0.0,
    )
    with caplog.at_level(logging.ERROR):
        await run_until(pauses.finished, hooks)
    assert (
        [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0],
        8,
        ["webhook: not ready: it failed: no port", "scaler: ready"],
    ) == (
        pauses.seen,
        sum("hook failed" in record.getMessage() for record in caplog.records),
        [str(status) for status in hooks.statuses()],
    )


async def test_a_hook_that_ran_for_long_is_started_again_soon() -> None:
    """A failure after more than a minute counts as the first."""
    pauses, times = RecordedPauses(4), iter((0, 1, 1, 2, 2, 100, 100, 101))
    hooks = IntegrationRunner(
        ["webhook"],
        *SETTINGS,
        restart_on_failure=True,
        integrations={"webhook": failing(SettingsError("no port"))},
        sleep=pauses,
        monotonic=lambda: float(next(times)),
    )
    await run_until(pauses.finished, hooks)
    assert [1.0, 2.0, 1.0, 2.0] == pauses.seen


async def test_a_hook_that_fails_as_it_is_stopped_is_not_started_again() -> None:
    """Of a group of tasks the failure is told, and not that it was cancelled."""
    pauses, began = RecordedPauses(1), asyncio.Event()

    async def fails() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("odd") from None

    async def run(hook_settings: KubernetesSettings, settings: InstanceSettings, status: IntegrationStatus) -> None:
        async with asyncio.TaskGroup() as tasks:
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
    """GET of one path of the probes."""
    registry = CollectorRegistry()
    registry.register(IntegrationMetrics(lambda: statuses))

    async def get(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=probes_app(lambda: statuses, registry))
        async with httpx.AsyncClient(transport=transport, base_url="http://hook") as client:
            return await client.get(path)

    return get


async def test_it_is_ready_when_each_hook_is(statuses: list[IntegrationStatus], get_probe: ProbeRequest) -> None:
    """/readyz says of each hook whether it is ready, or why not, and which leads; /healthz only lives."""
    before = await get_probe("/readyz")
    for status in statuses:
        status.ready()
    statuses[1].leader(True)
    after = await get_probe("/readyz")
    statuses[0].not_ready("no certificate yet")
    again = await get_probe("/readyz")
    assert [
        (503, "webhook: not ready: it is starting\ncontroller: not ready: it is starting\n"),
        (200, "webhook: ready\ncontroller: ready, leader\n"),
        (503, "webhook: not ready: no certificate yet\ncontroller: ready, leader\n"),
        (200, "ok\n"),
        (404, "not found: there are /healthz, /readyz and /metrics\n"),
    ] == [
        (response.status_code, response.text)
        for response in (before, after, again, await get_probe("/healthz"), await get_probe("/else"))
    ]


async def test_metrics_of_all_hooks_are_one_page(statuses: list[IntegrationStatus], get_probe: ProbeRequest) -> None:
    """Each hook's own, and of each whether it is ready and leads."""
    Gauge("rfork_webhook_something", "A hook's own", registry=statuses[0].registry).set(7)
    statuses[1].leader(False)
    lines = (await get_probe("/metrics")).text.splitlines()
    assert [
        'rfork_hook_ready{hook="webhook"} 0.0',
        'rfork_hook_ready{hook="controller"} 0.0',
        'rfork_hook_leader{hook="controller"} 0.0',
        "rfork_webhook_something 7.0",
    ] == [line for line in lines if not line.startswith("#")]


def test_a_planner_without_hooks_has_none() -> None:
    """Nothing is read, started or required."""
    with create_in_process_runner(PlannerSettings(), "http://127.0.0.1:8700") as hooks:
        assert hooks is None


def test_beside_the_planner_they_end_in_order() -> None:
    """The planner tells them to stop, and leaves them: what a hook does at its end is done by then."""
    began, ending, may_end = threading.Event(), threading.Event(), threading.Event()
    loops, done = list[asyncio.AbstractEventLoop](), list[str]()

    async def run(hook_settings: KubernetesSettings, settings: InstanceSettings, status: IntegrationStatus) -> None:
        loops.append(asyncio.get_running_loop())
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.to_thread(may_end.wait)
            done.append("in order")

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
    assert ["in order"] == done


def test_beside_the_planner_pods_need_an_address_of_it() -> None:
    """Its own loopback address is not told to Pods: the setting is asked for."""
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
def test_beside_the_planner_hooks_ask_that_planner(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    expected: tuple[str, str],
    pods: str | None,
) -> None:
    """With its own token, by loopback where it listens everywhere; settings go first."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    planner = PlannerSettings(integrations=("controller",), token=SecretStr("own"))
    with create_in_process_runner(planner, "http://0.0.0.0:8700") as hooks:
        assert hooks is not None
        hook_settings, settings = hooks._runner._settings_pair
    token = settings.token.get_secret_value() if settings.token else ""
    assert (expected, pods) == ((settings.planner, token), hook_settings.pod_planner_url)

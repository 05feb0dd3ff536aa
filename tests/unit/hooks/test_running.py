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

from planner.hooks.beside import HooksBeside, hooks_beside
from planner.hooks.probes import HookMetrics, Status, probes_app
from planner.hooks.running import Hooks, Run
from rfork.errors import MissingExtra, RforkError, SettingsError
from rfork.settings import HookName, HookSettings, PlannerSettings, Settings

SETTINGS = (HookSettings(), Settings())


class Stand:
    """A hook that runs until it is cancelled."""

    def __init__(self) -> None:
        self.stopped = False

    async def __call__(self, hook_settings: HookSettings, settings: Settings, status: Status) -> None:
        status.ready()
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped = True


def failing(error: Exception | None) -> Run:
    """A hook that fails at once, or ends."""

    async def run(hook_settings: HookSettings, settings: Settings, status: Status) -> None:
        if error is not None:
            raise error

    return run


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
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
async def test_all_end_with_one_that_fails(
    failure: Exception | None, kind: type[RforkError], text: str
) -> None:
    """In a process of their own the others are stopped, and the failure is one error of ours."""
    stand = Stand()
    hooks: dict[HookName, Run] = {"webhook": failing(failure), "scaler": stand}
    with pytest.raises(RforkError) as caught:
        await Hooks(["scaler", "webhook"], *SETTINGS, keep=False, hooks=hooks).run()
    assert (kind, text, True) == (type(caught.value), str(caught.value), stand.stopped)


async def test_a_missing_extra_is_named() -> None:
    """The hint is the command that brings it."""
    hooks: dict[HookName, Run] = {"webhook": failing(ImportError("no", name="lightkube"))}
    with pytest.raises(MissingExtra) as caught:
        await Hooks(["webhook"], *SETTINGS, keep=False, hooks=hooks).run()
    assert "pip install 'rfork[kubernetes]'" == caught.value.hint


async def test_cancelling_stops_them_in_order() -> None:
    """What a hook does at its end is done before `run` ends."""
    stand = Stand()
    running = asyncio.create_task(Hooks(["webhook"], *SETTINGS, keep=False, hooks={"webhook": stand}).run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert stand.stopped


class Pauses:
    """Instead of sleeping: what was asked for, and an end after so many."""

    def __init__(self, most: int) -> None:
        self.seen: list[float] = []
        self.over = asyncio.Event()
        self._most = most

    async def __call__(self, seconds: float) -> None:
        self.seen.append(seconds)
        if len(self.seen) == self._most:
            self.over.set()
            await asyncio.Event().wait()


async def until(event: asyncio.Event, hooks: Hooks) -> None:
    """Run the hooks until the event is set, and stop them."""
    running = asyncio.create_task(hooks.run())
    await event.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_kept_hook_is_started_again(caplog: pytest.LogCaptureFixture) -> None:
    """Each time later, up to a minute; the other hook does not notice, and the log has a line for each."""
    pauses, stand = Pauses(8), Stand()
    hooks = Hooks(
        ["webhook", "scaler"],
        *SETTINGS,
        keep=True,
        hooks={"webhook": failing(SettingsError("no port")), "scaler": stand},
        sleep=pauses,
        monotonic=lambda: 0.0,
    )
    with caplog.at_level(logging.ERROR):
        await until(pauses.over, hooks)
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
    pauses, times = Pauses(4), iter((0, 1, 1, 2, 2, 100, 100, 101))
    hooks = Hooks(
        ["webhook"],
        *SETTINGS,
        keep=True,
        hooks={"webhook": failing(SettingsError("no port"))},
        sleep=pauses,
        monotonic=lambda: float(next(times)),
    )
    await until(pauses.over, hooks)
    assert [1.0, 2.0, 1.0, 2.0] == pauses.seen


async def test_a_hook_that_fails_as_it_is_stopped_is_not_started_again() -> None:
    """Of a group of tasks the failure is told, and not that it was cancelled."""
    pauses, began = Pauses(1), asyncio.Event()

    async def fails() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise ValueError("odd") from None

    async def run(hook_settings: HookSettings, settings: Settings, status: Status) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fails())

    await until(began, Hooks(["webhook"], *SETTINGS, keep=True, hooks={"webhook": run}, sleep=pauses))
    assert [] == pauses.seen


Ask = Callable[[str], Awaitable[httpx.Response]]


@pytest.fixture
def statuses() -> list[Status]:
    return [Status("webhook"), Status("controller")]


@pytest.fixture
def ask(statuses: list[Status]) -> Ask:
    """GET of one path of the probes."""
    registry = CollectorRegistry()
    registry.register(HookMetrics(lambda: statuses))

    async def get(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app=probes_app(lambda: statuses, registry))
        async with httpx.AsyncClient(transport=transport, base_url="http://hook") as client:
            return await client.get(path)

    return get


async def test_it_is_ready_when_each_hook_is(statuses: list[Status], ask: Ask) -> None:
    """/readyz says of each hook whether it is ready, or why not, and which leads; /healthz only lives."""
    before = await ask("/readyz")
    for status in statuses:
        status.ready()
    statuses[1].leader(True)
    after = await ask("/readyz")
    statuses[0].not_ready("no certificate yet")
    again = await ask("/readyz")
    assert [
        (503, "webhook: not ready: it is starting\ncontroller: not ready: it is starting\n"),
        (200, "webhook: ready\ncontroller: ready, leader\n"),
        (503, "webhook: not ready: no certificate yet\ncontroller: ready, leader\n"),
        (200, "ok\n"),
        (404, "not found: there are /healthz, /readyz and /metrics\n"),
    ] == [
        (answer.status_code, answer.text)
        for answer in (before, after, again, await ask("/healthz"), await ask("/else"))
    ]


async def test_metrics_of_all_hooks_are_one_page(statuses: list[Status], ask: Ask) -> None:
    """Each hook's own, and of each whether it is ready and leads."""
    Gauge("rfork_webhook_something", "A hook's own", registry=statuses[0].registry).set(7)
    statuses[1].leader(False)
    lines = (await ask("/metrics")).text.splitlines()
    assert [
        'rfork_hook_ready{hook="webhook"} 0.0',
        'rfork_hook_ready{hook="controller"} 0.0',
        'rfork_hook_leader{hook="controller"} 0.0',
        "rfork_webhook_something 7.0",
    ] == [line for line in lines if not line.startswith("#")]


def test_a_planner_without_hooks_has_none() -> None:
    """Nothing is read, started or required."""
    with hooks_beside(PlannerSettings(), "http://127.0.0.1:8700") as hooks:
        assert hooks is None


def test_beside_the_planner_they_end_in_order() -> None:
    """The planner tells them to stop, and leaves them: what a hook does at its end is done by then."""
    began, ending, may_end = threading.Event(), threading.Event(), threading.Event()
    loops, done = list[asyncio.AbstractEventLoop](), list[str]()

    async def run(hook_settings: HookSettings, settings: Settings, status: Status) -> None:
        loops.append(asyncio.get_running_loop())
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await asyncio.to_thread(may_end.wait)
            done.append("in order")

    async def turns() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    with HooksBeside(["controller"], *SETTINGS) as beside:
        beside._hooks = Hooks(["controller"], *SETTINGS, keep=True, hooks={"controller": run})
        beside.start()
        assert began.wait(30)
        beside.stop()
        assert ending.wait(30)
        beside.stop()
        try:
            asyncio.run_coroutine_threadsafe(turns(), loops[0]).result(30)
        finally:
            may_end.set()
    assert ["in order"] == done


def test_beside_the_planner_pods_need_an_address_of_it() -> None:
    """Its own loopback address is not told to Pods: the setting is asked for."""
    settings = PlannerSettings(hooks=("webhook",))
    with (
        pytest.raises(SettingsError) as caught,
        hooks_beside(settings, "http://127.0.0.1:8700"),
    ):
        pass
    assert "set RFORK_HOOK_PLANNER" == caught.value.hint


@pytest.mark.parametrize(
    ("environment", "told", "pods"),
    [
        ({}, ("http://127.0.0.1:8700", "own"), None),
        ({"RFORK_PLANNER": "http://service:80"}, ("http://service:80", "own"), "http://service:80"),
        (
            {"RFORK_HOOK_PLANNER": "http://service:80", "RFORK_TOKEN": "operator"},
            ("http://127.0.0.1:8700", "operator"),
            "http://service:80",
        ),
    ],
)
def test_beside_the_planner_hooks_ask_that_planner(
    monkeypatch: pytest.MonkeyPatch,
    environment: dict[str, str],
    told: tuple[str, str],
    pods: str | None,
) -> None:
    """With its own token, by loopback where it listens everywhere; settings go first."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    planner = PlannerSettings(hooks=("controller",), token=SecretStr("own"))
    with hooks_beside(planner, "http://0.0.0.0:8700") as hooks:
        assert hooks is not None
        hook_settings, settings = hooks._hooks._told
    token = settings.token.get_secret_value() if settings.token else ""
    assert (told, pods) == ((settings.planner, token), hook_settings.planner)

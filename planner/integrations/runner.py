"""The integrations by name, and their runner: in the planner's process and for `rfork k8s`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from typing_extensions import Self

from planner.http_server import address_of, listen, run_server
from planner.integrations.health import IntegrationMetrics, IntegrationStatus, probes_app, raise_if_cancelled
from rfork.errors import MissingExtra, RforkError, SettingsError
from rfork.logs import logger
from rfork.settings import InstanceSettings, IntegrationName, KubernetesSettings, PlannerSettings, load
from rfork.tracing import get_tracer

MIN_PYTHON: Final = (3, 11)
"""Task groups, and `Task.cancelling`."""
STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
STOP_S: Final = 8.0
"""Maximum seconds that integrations may take to stop. A Pod is killed after 30."""
BACKOFF_S: Final = (1.0, 60.0)
"""Minimum and maximum seconds before a failed integration in the planner's process is restarted."""
EXTRA: Final = "kubernetes"
EXTRA_MODULES: Final = frozenset({"cryptography", "httpx2", "lightkube", "msgspec", "yaml"})
"""Modules of the extra."""
WEBHOOK: Final = "rfork-webhook"
CONTROLLER: Final = "rfork-controller"
SCALER: Final = "rfork-scaler"
"""Service names in traces, whichever process they run in."""
IntegrationMain = Callable[[KubernetesSettings, InstanceSettings, IntegrationStatus], Awaitable[None]]
log = logger("planner.integrations")


async def _webhook(
    kubernetes_settings: KubernetesSettings, settings: InstanceSettings, status: IntegrationStatus
) -> None:
    from planner.integrations.kubernetes import webhook

    await webhook.run(kubernetes_settings, settings, status, get_tracer(WEBHOOK))


async def _controller(
    kubernetes_settings: KubernetesSettings, settings: InstanceSettings, status: IntegrationStatus
) -> None:
    from planner.integrations.kubernetes.cluster import connect
    from planner.integrations.kubernetes.controller import controller
    from planner.integrations.planner_api import AsyncPlannerClient

    async with contextlib.AsyncExitStack() as closing:
        planner_api = AsyncPlannerClient(settings)
        closing.push_async_callback(planner_api.close)
        cluster = connect(kubernetes_settings)
        closing.push_async_callback(cluster.close)
        await controller.run(kubernetes_settings, cluster, planner_api, status, tracer=get_tracer(CONTROLLER))


async def _scaler(
    kubernetes_settings: KubernetesSettings, settings: InstanceSettings, status: IntegrationStatus
) -> None:
    from planner.integrations.keda import scaler
    from planner.integrations.planner_api import AsyncPlannerClient

    planner_api = AsyncPlannerClient(settings)
    try:
        await scaler.run(kubernetes_settings, planner_api, status, get_tracer(SCALER))
    finally:
        await planner_api.close()


INTEGRATIONS: Final[Mapping[IntegrationName, IntegrationMain]] = {
    "webhook": _webhook,
    "controller": _controller,
    "scaler": _scaler,
}


class IntegrationRunner:
    """Runs integrations on one event loop.

    With `restart_on_failure` a failed one is restarted; otherwise its failure ends all.
    """

    def __init__(
        self,
        names: Sequence[IntegrationName],
        kubernetes_settings: KubernetesSettings,
        settings: InstanceSettings,
        *,
        restart_on_failure: bool,
        integrations: Mapping[IntegrationName, IntegrationMain] = INTEGRATIONS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        if sys.version_info < MIN_PYTHON:
            raise SettingsError("the planner's integrations need Python 3.11 or newer")
        self._settings_pair = (kubernetes_settings, settings)
        self._restart_on_failure = restart_on_failure
        self._integrations, self._sleep, self._monotonic = integrations, sleep, monotonic
        self._statuses: dict[IntegrationName, IntegrationStatus] = {name: IntegrationStatus(name) for name in names}

    def statuses(self) -> Sequence[IntegrationStatus]:
        """Return the current status of each integration. Thread-safe."""
        return tuple(self._statuses.values())

    async def run(self) -> None:
        """Run until cancelled. Without `restart_on_failure`, until one fails, which raises an RforkError."""
        tasks = [
            asyncio.create_task(
                self._restart_loop(name) if self._restart_on_failure else self._once(name),
                name=f"rfork-{name}",
            )
            for name in self._statuses
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended, unfinished = await asyncio.wait(tasks, timeout=STOP_S)
            failed = [error for task in ended if not task.cancelled() and (error := task.exception())]
            for task in unfinished:
                log.error("integration does not stop, exiting without it", task=task.get_name())
        for error in failed:
            raise error

    async def _once(self, name: IntegrationName) -> None:
        status = self._statuses[name]
        try:
            await self._integrations[name](*self._settings_pair, status)
        except Exception as error:
            raise _to_rfork_error(name, error) from error
        raise RforkError(f"integration {name} ended unexpectedly")

    async def _restart_loop(self, name: IntegrationName) -> None:
        min_pause_s, max_pause_s = BACKOFF_S
        pause_s = min_pause_s
        while True:
            began = self._monotonic()
            try:
                await self._once(name)
            except RforkError as error:
                reason = str(error)
                pause_s = min_pause_s if self._monotonic() - began > max_pause_s else pause_s
                log.error("integration failed", integration=name, reason=reason, hint=error.hint, retry_in_s=pause_s)
                self._statuses[name].not_ready(f"failed: {reason}")
            raise_if_cancelled()
            await self._sleep(pause_s)
            pause_s = min(2 * pause_s, max_pause_s)
            self._statuses[name] = IntegrationStatus(name)


async def run_integrations(
    names: Sequence[IntegrationName],
    kubernetes_settings: KubernetesSettings,
    settings: InstanceSettings,
    *,
    restart_on_failure: bool,
) -> None:
    """Run integrations and the probe server until cancelled. Without `restart_on_failure`, until one fails.

    Raises RforkError: PortInUse, SettingsError, MissingExtra, or the failure of an integration.
    """
    integrations = IntegrationRunner(names, kubernetes_settings, settings, restart_on_failure=restart_on_failure)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(IntegrationMetrics(integrations.statuses))
    bind = kubernetes_settings.bind
    listener = listen(bind, kubernetes_settings.health_port, prefix="RFORK_K8S_", port_setting="HEALTH_PORT")
    async with run_server(probes_app(integrations.statuses, registry), listener):
        log.info("integrations started", integrations=",".join(names), probes=f"http://{address_of(bind, listener)}")
        await integrations.run()


def run_until_signal(
    names: Sequence[IntegrationName], kubernetes_settings: KubernetesSettings, settings: InstanceSettings
) -> None:
    """Run integrations until SIGINT or SIGTERM, or until one fails. Raises as `run_integrations` does."""
    asyncio.run(_until_signal(names, kubernetes_settings, settings))


async def _until_signal(
    names: Sequence[IntegrationName], kubernetes_settings: KubernetesSettings, settings: InstanceSettings
) -> None:
    loop = asyncio.get_running_loop()
    integrations = asyncio.create_task(
        run_integrations(names, kubernetes_settings, settings, restart_on_failure=False), name="rfork-integrations"
    )

    def stop(number: int) -> None:
        log.info("stopping integrations", signal=signal.Signals(number).name)
        integrations.cancel()
        for each in STOP_SIGNALS:  # a second signal ends the process immediately
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop, number)
    with contextlib.suppress(asyncio.CancelledError):
        await integrations


def _to_rfork_error(name: IntegrationName, error: Exception) -> RforkError:
    """Convert any failure of an integration to one RforkError; from a task group, take the first one."""
    leaves = list(_leaves(error))
    for leaf in leaves:
        if isinstance(leaf, RforkError):
            return leaf
    first_error = leaves[0]
    if isinstance(first_error, ImportError) and (first_error.name or "").split(".")[0] in EXTRA_MODULES:
        return MissingExtra(f"integration {name}", extra=EXTRA, reason=str(first_error))
    log.error("unexpected error in an integration", integration=name, exc_info=error)
    return RforkError(f"integration {name} failed: {type(first_error).__name__}: {first_error}")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if sys.version_info >= (3, 11) and isinstance(error, BaseExceptionGroup):  # noqa: F821 (it is a builtin)
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error


class InProcessRunner:
    """Runs integrations on a thread with its own event loop, so that they do not delay requests.

    A context manager: leaving it stops them.
    """

    def __init__(
        self, names: Sequence[IntegrationName], kubernetes_settings: KubernetesSettings, settings: InstanceSettings
    ) -> None:
        self._runner = IntegrationRunner(names, kubernetes_settings, settings, restart_on_failure=True)
        self.metrics = IntegrationMetrics(self._runner.statuses)
        """Their metrics, for the planner's registry."""
        self._thread = threading.Thread(target=self._run, name="rfork-integrations", daemon=True)
        self._stopping = threading.Event()

    def start(self) -> None:
        """Start the thread. From then on a failed integration is restarted."""
        log.info(
            "integrations started", integrations=",".join(status.integration for status in self._runner.statuses())
        )
        self._thread.start()

    def stop(self) -> None:
        """Request a stop and return immediately."""
        self._stopping.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(STOP_S + 2)

    def _run(self) -> None:
        try:
            asyncio.run(self._run_until_stopped())
        except Exception:  # outermost handler of the thread: the planner continues without integrations
            log.exception("integrations stopped unexpectedly")

    async def _run_until_stopped(self) -> None:
        runner = asyncio.create_task(self._runner.run())
        stopping = asyncio.create_task(asyncio.to_thread(self._stopping.wait))
        try:
            await asyncio.wait({runner, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._stopping.set()  # ends the waiting thread
        runner.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await runner


@contextlib.contextmanager
def create_in_process_runner(planner_settings: PlannerSettings, url: str) -> Iterator[InProcessRunner | None]:
    """Yield a runner, not yet started, for the integrations of the planner at `url`, or None without any.

    Unless RFORK_PLANNER names another planner, they use this one, with its own token. Raises SettingsError if
    KubernetesSettings is invalid or does not define the planner URL for Pods.
    """
    if not planner_settings.integrations:
        yield None
        return
    kubernetes_settings, settings = load(KubernetesSettings), load(InstanceSettings)
    is_for_pods = kubernetes_settings.pod_planner_url or settings.planner
    if is_for_pods is None and "webhook" in planner_settings.integrations:
        raise SettingsError(
            "the webhook does not know the URL at which Pods reach the planner", hint="set RFORK_K8S_POD_PLANNER_URL"
        )
    for everywhere, loopback in (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        url = url.replace(everywhere, loopback)
    with InProcessRunner(
        tuple(dict.fromkeys(planner_settings.integrations)),
        kubernetes_settings.model_copy(update={"pod_planner_url": is_for_pods}),
        settings.model_copy(
            update={
                "planner": settings.planner or url,
                "token": settings.token or planner_settings.token,
            }
        ),
    ) as runner:
        yield runner

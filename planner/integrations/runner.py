"""The integrations by name, and their runner: used by the planner's process and by `rfork k8s`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from planner.http_server import address_of, listen, run_server
from planner.integrations.cancellation import raise_if_cancelled
from planner.integrations.health import IntegrationMetrics, IntegrationStatus, probes_app
from rfork.errors import MissingExtra, RforkError
from rfork.logs import logger
from rfork.settings import InstanceSettings, IntegrationName, KubernetesSettings
from rfork.tracing import get_tracer

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
    from planner.integrations.kubernetes.cluster_client import connect
    from planner.integrations.kubernetes.controller import loop as controller
    from planner.integrations.planner_client import PlannerRestClient

    async with contextlib.AsyncExitStack() as closing:
        planner_api = PlannerRestClient(settings)
        closing.push_async_callback(planner_api.close)
        cluster = connect(kubernetes_settings)
        closing.push_async_callback(cluster.close)
        await controller.run(kubernetes_settings, cluster, planner_api, status, tracer=get_tracer(CONTROLLER))


async def _scaler(
    kubernetes_settings: KubernetesSettings, settings: InstanceSettings, status: IntegrationStatus
) -> None:
    from planner.integrations.keda import scaler
    from planner.integrations.planner_client import PlannerRestClient

    planner_api = PlannerRestClient(settings)
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
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error

"""The hooks by name, and what runs them: a process of their own (`rfork hook`), or the planner's."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from planner.hooks.heeding import heed_cancellation
from planner.hooks.probes import HookMetrics, Status, probes_app
from planner.listening import address_of, listen, serving
from rfork.errors import MissingExtra, RforkError
from rfork.logs import logger
from rfork.settings import HookName, HookSettings, Settings
from rfork.tracing import tracer

STOPS: Final = (signal.SIGINT, signal.SIGTERM)
STOP_S: Final = 8.0
"""Most seconds that hooks may take to stop; a Pod has 30 before it is killed."""
BACKOFF_S: Final = (1.0, 60.0)
"""Seconds before a hook that failed beside the planner is started again: at first, and at most."""
EXTRA: Final = "kubernetes"
BROUGHT: Final = frozenset({"cryptography", "httpx2", "lightkube", "msgspec", "yaml"})
"""What the extra brings."""
WEBHOOK: Final = "rfork-webhook"
CONTROLLER: Final = "rfork-controller"
SCALER: Final = "rfork-scaler"
"""What collectors of spans know the hooks as, whichever process they run in."""
Run = Callable[[HookSettings, Settings, Status], Awaitable[None]]
log = logger("planner.hooks")


async def _webhook(hook_settings: HookSettings, settings: Settings, status: Status) -> None:
    from planner.hooks.kubernetes import webhook

    await webhook.run(hook_settings, settings, status, tracer(WEBHOOK))


async def _controller(hook_settings: HookSettings, settings: Settings, status: Status) -> None:
    from planner.hooks.kubernetes.api import connect
    from planner.hooks.kubernetes.controller import run as controller
    from planner.hooks.rest import RestFleet

    async with contextlib.AsyncExitStack() as closing:
        fleet = RestFleet(settings)
        closing.push_async_callback(fleet.close)
        cluster = connect(hook_settings)
        closing.push_async_callback(cluster.close)
        await controller.run(hook_settings, cluster, fleet, status, tracer=tracer(CONTROLLER))


async def _scaler(hook_settings: HookSettings, settings: Settings, status: Status) -> None:
    from planner.hooks.keda import scaler
    from planner.hooks.rest import RestFleet

    fleet = RestFleet(settings)
    try:
        await scaler.run(hook_settings, fleet, status, tracer(SCALER))
    finally:
        await fleet.close()


HOOKS: Final[Mapping[HookName, Run]] = {
    "webhook": _webhook,
    "controller": _controller,
    "scaler": _scaler,
}


class Hooks:
    """Some hooks on one event loop. With `keep` one that fails is started again; else all end with it."""

    def __init__(
        self,
        names: Sequence[HookName],
        hook_settings: HookSettings,
        settings: Settings,
        *,
        keep: bool,
        hooks: Mapping[HookName, Run] = HOOKS,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._told = (hook_settings, settings)
        self._keep = keep
        self._hooks, self._sleep, self._monotonic = hooks, sleep, monotonic
        self._statuses: dict[HookName, Status] = {name: Status(name) for name in names}

    def statuses(self) -> Sequence[Status]:
        """What each hook says now; may be asked on any thread."""
        return tuple(self._statuses.values())

    async def run(self) -> None:
        """Run until cancelled; without `keep` until one fails, which is raised as an RforkError."""
        tasks = [
            asyncio.create_task(self._kept(name) if self._keep else self._once(name), name=f"rfork-{name}")
            for name in self._statuses
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended, stuck = await asyncio.wait(tasks, timeout=STOP_S)
            failed = [error for task in ended if not task.cancelled() and (error := task.exception())]
            for task in stuck:
                log.error("a hook does not stop", task=task.get_name())
        for error in failed:
            raise error

    async def _once(self, name: HookName) -> None:
        status = self._statuses[name]
        try:
            await self._hooks[name](*self._told, status)
        except Exception as error:
            raise _plain(name, error) from error
        raise RforkError(f"hook {name} ended by itself")

    async def _kept(self, name: HookName) -> None:
        least, most = BACKOFF_S
        pause = least
        while True:
            began = self._monotonic()
            try:
                await self._once(name)
            except RforkError as error:
                why = str(error)
                pause = least if self._monotonic() - began > most else pause
                log.error("hook failed", hook=name, why=why, hint=error.hint, again_in_s=pause)
                self._statuses[name].not_ready(f"it failed: {why}")
            heed_cancellation()
            await self._sleep(pause)
            pause = min(2 * pause, most)
            self._statuses[name] = Status(name)


async def run_hooks(
    names: Sequence[HookName],
    hook_settings: HookSettings,
    settings: Settings,
    *,
    keep: bool,
) -> None:
    """Run hooks until this is cancelled, with the probes; without `keep` until one fails, which is raised.

    Raises RforkError: PortInUse, SettingsError, MissingExtra, or what a hook failed with.
    """
    hooks = Hooks(names, hook_settings, settings, keep=keep)
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    registry.register(HookMetrics(hooks.statuses))
    bind = hook_settings.bind
    listener = listen(bind, hook_settings.health_port, prefix="RFORK_HOOK_", port_setting="HEALTH_PORT")
    async with serving(probes_app(hooks.statuses, registry), listener):
        log.info("hooks run", hooks=",".join(names), probes=f"http://{address_of(bind, listener)}")
        await hooks.run()


def run_until_signal(names: Sequence[HookName], hook_settings: HookSettings, settings: Settings) -> None:
    """`rfork hook`: run hooks until SIGINT or SIGTERM, or until one fails. Raises as `run_hooks`."""
    asyncio.run(_until_signal(names, hook_settings, settings))


async def _until_signal(names: Sequence[HookName], hook_settings: HookSettings, settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    hooks = asyncio.create_task(run_hooks(names, hook_settings, settings, keep=False), name="rfork-hooks")

    def stop(number: int) -> None:
        log.info("hooks stop", signal=signal.Signals(number).name)
        hooks.cancel()
        for each in STOPS:  # the second one ends the process at once
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_DFL)

    for number in STOPS:
        loop.add_signal_handler(number, stop, number)
    with contextlib.suppress(asyncio.CancelledError):
        await hooks


def _plain(name: HookName, error: Exception) -> RforkError:
    """One error of ours for whatever a hook failed with; of a group of tasks, the first of ours."""
    leaves = list(_leaves(error))
    for leaf in leaves:
        if isinstance(leaf, RforkError):
            return leaf
    first = leaves[0]
    if isinstance(first, ImportError) and (first.name or "").split(".")[0] in BROUGHT:
        return MissingExtra(f"hook {name}", extra=EXTRA, why=str(first))
    log.error("a hook failed in a way that it should not", hook=name, exc_info=error)
    return RforkError(f"hook {name} failed: {type(first).__name__}: {first}")


def _leaves(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from _leaves(part)
    else:
        yield error

"""Hooks in the planner's process (RFORK_PLANNER_HOOKS)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from planner.hooks.probes import HookMetrics
from planner.hooks.running import STOP_S, Hooks
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.settings import HookName, HookSettings, PlannerSettings, Settings, load

log = logger("planner.hooks")


class HooksBeside:
    """Hooks on a thread of the planner's process, with an event loop of their own: its requests do not wait.

    A context manager: leaving it stops what runs.
    """

    def __init__(self, names: Sequence[HookName], hook_settings: HookSettings, settings: Settings) -> None:
        self._hooks = Hooks(names, hook_settings, settings, keep=True)
        self.metrics = HookMetrics(self._hooks.statuses)
        """What they tell Prometheus, for the planner's own registry."""
        self._thread = threading.Thread(target=self._run, name="rfork-hooks", daemon=True)
        self._stop: Callable[[], None] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the thread; from then on hooks that fail are started again."""
        log.info("hooks run", hooks=",".join(status.hook for status in self._hooks.statuses()))
        self._thread.start()

    def stop(self) -> None:
        """Tell them to stop; does not wait."""
        with self._lock:
            self._stopped = True
            stop, self._stop = self._stop, None  # a second cancellation would break off what the first began
            if stop is not None:
                stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(STOP_S + 2)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception:  # the thread's outermost edge: the planner goes on without hooks
            log.exception("the hooks ended")

    async def _main(self) -> None:
        loop, hooks = asyncio.get_running_loop(), asyncio.create_task(self._hooks.run())
        with self._lock:
            if self._stopped:
                hooks.cancel()
            else:
                self._stop = lambda: _cancel(loop, hooks)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await hooks
        finally:  # from then on there is no loop to call
            with self._lock:
                self._stop = None


@contextlib.contextmanager
def hooks_beside(planner_settings: PlannerSettings, url: str) -> Iterator[HooksBeside | None]:
    """The hooks that run beside the planner at `url`, not yet started; None: there are to be none.

    Where RFORK_PLANNER says nothing else they ask that planner, with its own token. Raises SettingsError
    where HookSettings cannot be used, or do not say where Pods find the planner.
    """
    if not planner_settings.hooks:
        yield None
        return
    hook_settings, settings = load(HookSettings), load(Settings)
    for_pods = hook_settings.planner or settings.planner
    if for_pods is None and "webhook" in planner_settings.hooks:
        raise SettingsError(
            "the webhook does not know where Pods find this planner", hint="set RFORK_HOOK_PLANNER"
        )
    for everywhere, loopback in (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        url = url.replace(everywhere, loopback)
    with HooksBeside(
        tuple(dict.fromkeys(planner_settings.hooks)),
        hook_settings.model_copy(update={"planner": for_pods}),
        settings.model_copy(
            update={
                "planner": settings.planner or url,
                "token": settings.token or planner_settings.token,
            }
        ),
    ) as hooks:
        yield hooks


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    loop.call_soon_threadsafe(task.cancel)

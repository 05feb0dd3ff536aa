"""Hooks in the planner's process (RFORK_PLANNER_INTEGRATIONS)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from planner.integrations.health import IntegrationMetrics
from planner.integrations.runner import STOP_S, IntegrationRunner
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.settings import InstanceSettings, IntegrationName, KubernetesSettings, PlannerSettings, load

log = logger("planner.integrations")


class InProcessRunner:
    """Hooks on a thread of the planner's process, with an event loop of their own: its requests do not wait.

    A context manager: leaving it stops what runs.
    """

    def __init__(
        self, names: Sequence[IntegrationName], kubernetes_settings: KubernetesSettings, settings: InstanceSettings
    ) -> None:
        self._runner = IntegrationRunner(names, kubernetes_settings, settings, restart_on_failure=True)
        self.metrics = IntegrationMetrics(self._runner.statuses)
        """What they tell Prometheus, for the planner's own registry."""
        self._thread = threading.Thread(target=self._run, name="rfork-hooks", daemon=True)
        self._stop: Callable[[], None] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the thread; from then on hooks that fail are started again."""
        log.info("hooks run", hooks=",".join(status.integration for status in self._runner.statuses()))
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
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if self._thread.ident is not None:
            self._thread.join(STOP_S + 2)

    def _run(self) -> None:
        try:
            asyncio.run(self._run_until_stopped())
        except Exception:  # the thread's outermost edge: the planner goes on without hooks
            log.exception("the hooks ended")

    async def _run_until_stopped(self) -> None:
        loop, runner = asyncio.get_running_loop(), asyncio.create_task(self._runner.run())
        with self._lock:
            if self._stopped:
                runner.cancel()
            else:
                self._stop = lambda: _cancel(loop, runner)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await runner
        finally:  # from then on there is no loop to call
            with self._lock:
                self._stop = None


@contextlib.contextmanager
def create_in_process_runner(planner_settings: PlannerSettings, url: str) -> Iterator[InProcessRunner | None]:
    """The hooks that run beside the planner at `url`, not yet started; None: there are to be none.

    Where RFORK_PLANNER says nothing else they ask that planner, with its own token. Raises SettingsError
    where KubernetesSettings cannot be used, or do not say where Pods find the planner.
    """
    if not planner_settings.integrations:
        yield None
        return
    kubernetes_settings, settings = load(KubernetesSettings), load(InstanceSettings)
    is_for_pods = kubernetes_settings.pod_planner_url or settings.planner
    if is_for_pods is None and "webhook" in planner_settings.integrations:
        raise SettingsError(
            "the webhook does not know where Pods find this planner", hint="set RFORK_K8S_POD_PLANNER_URL"
        )
    for everywhere, loopback in (("//0.0.0.0:", "//127.0.0.1:"), ("//[::]:", "//[::1]:")):
        url = url.replace(everywhere, loopback)
    with InProcessRunner(
        tuple(dict.fromkeys(planner_settings.integrations)),
        kubernetes_settings.model_copy(update={"planner": is_for_pods}),
        settings.model_copy(
            update={
                "planner": settings.planner or url,
                "token": settings.token or planner_settings.token,
            }
        ),
    ) as runner:
        yield runner


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    loop.call_soon_threadsafe(task.cancel)

"""Runs integrations in the planner's process (RFORK_PLANNER_INTEGRATIONS)."""

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
        self._stop: Callable[[], None] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the thread. From then on a failed integration is restarted."""
        log.info(
            "integrations started", integrations=",".join(status.integration for status in self._runner.statuses())
        )
        self._thread.start()

    def stop(self) -> None:
        """Request a stop and return immediately."""
        with self._lock:
            self._stopped = True
            stop, self._stop = (
                self._stop,
                None,
            )  # a second cancellation would interrupt the cleanup that the first one started
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
        except Exception:  # outermost handler of the thread: the planner continues without integrations
            log.exception("integrations stopped unexpectedly")

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
        finally:  # the event loop is closed from here on
            with self._lock:
                self._stop = None


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


def _cancel(loop: asyncio.AbstractEventLoop, task: asyncio.Task[None]) -> None:
    loop.call_soon_threadsafe(task.cancel)

"""Drains a server's instances on SIGTERM. Runs in the launcher process.

SGLang first finishes its running requests, then stops its schedulers. In that time the instances
accept no new readers, and current readers may finish before the schedulers exit.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from rfork.engines.monkeypatch import call_after, call_before
from rfork.engines.sglang import hook_targets
from rfork.errors import RforkError
from rfork.logs import logger
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.drain import drain_replica
from rfork.planner_client.ownership import owner_secret
from rfork.settings import InstanceSettings

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import SignalHandler, TokenizerManager

log = logger(__name__)


def install(settings: InstanceSettings) -> None:
    """Install the hooks in this process."""
    drain = SigtermDrain(settings)
    hook_targets.hook(hook_targets.ON_SIGTERM, call_after(drain.on_sigterm))
    hook_targets.hook(hook_targets.DISPATCH, call_before(drain.before_dispatch))


class SigtermDrain:
    """Drains the instances of one server through the planner, once and for a limited time."""

    def __init__(self, settings: InstanceSettings) -> None:
        self._settings = settings
        owner_secret(settings)  # read now: the file may be removed before the server exits
        self._drained = threading.Event()
        self._until: float | None = None

    def on_sigterm(self, _: None, handler: SignalHandler, *args: object, **kwargs: object) -> None:
        """Start draining on a thread. Called on the server's event loop, so it must not block."""
        if self._until is None:
            self._until = time.monotonic() + self._settings.drain_timeout_s
            threading.Thread(target=self._drain, name="rfork-drain", daemon=True).start()

    def before_dispatch(self, manager: TokenizerManager, obj: object) -> None:
        """Wait for the drain before the schedulers are stopped. All requests have finished by then."""
        from sglang.srt.managers.io_struct import ShutdownReq

        if isinstance(obj, ShutdownReq) and self._until is not None:
            self._drained.wait(max(self._until - time.monotonic(), 0.0))

    def _drain(self) -> None:
        try:
            with PlannerClient.of(self._settings) as client:
                for drained in drain_replica(
                    client, str(self._settings.replica), wait_s=self._settings.drain_timeout_s, force=True
                ):
                    log.info("drained", instance_id=drained.instance_id, reason=drained.reason)
        except RforkError as error:
            log.info("failed to drain the seeds, exiting", reason=str(error), hint=error.hint)
        finally:
            self._drained.set()

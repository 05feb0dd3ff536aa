"""What a server does about its instances when it is told to end: in the launcher's process, on SIGTERM.

SGLang first answers the requests that it has, then asks its schedulers to end. Meanwhile they take no new
readers; those there are may finish before the schedulers are asked.
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
    """Hook this process's SGLang."""
    leaving = SigtermDrain(settings)
    hook_targets.hook(hook_targets.ON_SIGTERM, call_after(leaving.on_sigterm))
    hook_targets.hook(hook_targets.DISPATCH, call_before(leaving.before_dispatch))


class SigtermDrain:
    """Drains the instances of one server by way of the planner; only once, and never for long."""

    def __init__(self, settings: InstanceSettings) -> None:
        self._settings = settings
        owner_secret(settings)  # read now: its file may be gone when the server ends
        self._drained = threading.Event()
        self._until: float | None = None

    def on_sigterm(self, _: None, handler: SignalHandler, *more: object, **named: object) -> None:
        """On the server's event loop: what takes time is done on a thread."""
        if self._until is None:
            self._until = time.monotonic() + self._settings.drain_timeout_s
            threading.Thread(target=self._drain, name="rfork-drain", daemon=True).start()

    def before_dispatch(self, manager: TokenizerManager, obj: object) -> None:
        """The schedulers are about to be asked to end: no request is left, and nothing else is to do."""
        from sglang.srt.managers.io_struct import ShutdownReq

        if isinstance(obj, ShutdownReq) and self._until is not None:
            self._drained.wait(max(self._until - time.monotonic(), 0.0))

    def _drain(self) -> None:
        try:
            with PlannerClient.of(self._settings) as client:
                for one in drain_replica(
                    client, str(self._settings.replica), wait_s=self._settings.drain_timeout_s, force=True
                ):
                    log.info("drained", instance=one.instance_id, because=one.reason)
        except RforkError as error:
            log.info("the server ends undrained", because=str(error), hint=error.hint)
        finally:
            self._drained.set()

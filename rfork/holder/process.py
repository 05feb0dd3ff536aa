"""The holder's process: reports to the planner, and fetches, keeps and evicts images as it is advised.

Without a planner's response it keeps and serves what it has. A one-shot holder serves the start of one engine: it ends
once the planner wants nothing of it any more, because the engine has its weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import uuid4

from rfork.errors import NetworkError
from rfork.holder.announced_caches import AnnouncedCaches
from rfork.holder.host import WatchedProcess
from rfork.holder.image_keeper import ImageKeeper, LayoutOf
from rfork.holder.inventory import KeptImage, Refusal, next_fetches, plan_inventory
from rfork.logs import logger
from rfork.planner_client.client import PlannerClient
from rfork.schema import HolderReport, ImageKey, ImageSelector, RefusedImage, WantedImage
from rfork.settings import InstanceSettings

log = logger(__name__)

HEARTBEAT_S: Final = 2.0
"""Interval of reports until the planner names another one."""
MIN_PAUSE_S: Final = 0.1
RETRY_S: Final = (2.0, 5.0, 15.0, 60.0)
"""Pauses after consecutive failures of one image; the last one repeats."""
STOP_S: Final = 5.0
"""Maximum time to end what does not drain, as a fetch that waits for a source."""
NO_SOURCE_TIMEOUT_S: Final = 60.0
"""Maximum time that a one-shot holder waits for a first source: by then its engine loads the weights itself."""
ONE_SHOT_TIMEOUT_S: Final = 1800.0
"""Maximum time that a one-shot holder waits for its engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HolderOptions:
    """Options of a holder."""

    memory_bytes: int
    """Memory that its images may use."""
    selectors: tuple[ImageSelector, ...] = ()
    follows_host: bool = True
    """False: one-shot."""
    device: str = "cpu"
    until_pid: int | None = None
    """Process with which the holder ends."""


@dataclass(slots=True)
class _Failure:
    """Failed attempts to fetch one image."""

    reason: str
    attempts: int = 0
    retry_at: float = 0.0


CreateKeeper = Callable[[WantedImage], ImageKeeper]


@dataclass(slots=True)
class _Closing:
    """An evicted image whose memory is not released yet."""

    thread: threading.Thread
    image_bytes: int = 0


class Holder:
    """One holder. `run` is its main loop; `stop` may be called from any thread or signal handler."""

    def __init__(
        self,
        settings: InstanceSettings,
        options: HolderOptions,
        planner: PlannerClient,
        *,
        layout_of: LayoutOf | None = None,
        own_wanted: Sequence[WantedImage] = (),
        caches: AnnouncedCaches | None = None,
        create_keeper: CreateKeeper | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`own_wanted`: images that it keeps whatever the planner wants, as those of a snapshot. `caches`: pulls
        the JIT caches of announced models.
        """
        self.holder_id = f"hold-{uuid4().hex}"
        self._settings = settings
        self._options = options
        self._planner = planner
        self._until = WatchedProcess(options.until_pid) if options.until_pid is not None else None
        self._layout_of = layout_of
        self._own_wanted = tuple(own_wanted)
        self._create_keeper = create_keeper or self._keeper
        self._caches = caches
        self._keepers: dict[ImageKey, ImageKeeper] = {}
        self._failures: dict[ImageKey, _Failure] = {}
        self._closing: list[_Closing] = []
        self._wanted: tuple[WantedImage, ...] = ()
        self._refused: tuple[Refusal, ...] = ()
        self._changed = threading.Event()
        self._is_reachable = True
        self._clock = clock
        self._began_at = clock()

    def run(self, is_stopped: Callable[[], bool]) -> str:
        """Report and keep images until `is_stopped` or a one-shot holder is done; return why it ended."""
        try:
            while True:
                pause_s = self._heartbeat()
                self._apply(self._clock())
                if (reason := self._end_reason(is_stopped)) is not None:
                    return reason
                self._pause(pause_s, is_stopped)
        finally:
            self._close()

    @property
    def used_bytes(self) -> int:
        """Memory of its images, evicted ones that still have readers included."""
        kept = sum(keeper.wanted.image_bytes for keeper in self._keepers.values())
        return kept + sum(each.image_bytes for each in self._closing)

    def report(self) -> HolderReport:
        """Return its state for the planner."""
        options = self._options
        return HolderReport(
            holder_id=self.holder_id,
            placement=self._settings.placement,
            memory_bytes=options.memory_bytes,
            used_bytes=self.used_bytes,
            selectors=options.selectors,
            follows_host=options.follows_host,
            images=tuple(keeper.report() for keeper in self._keepers.values()),
            refused=tuple(
                RefusedImage(
                    model=each.image.model,
                    version=each.image.version,
                    rank_key=each.image.rank.key,
                    reason=each.reason,
                )
                for each in self._refused
            ),
        )

    def _heartbeat(self) -> float:
        """Report to the planner and receive what it wants; return the seconds until the next report."""
        try:
            ack = self._planner.report_holder(self.report())
        except NetworkError as error:
            if self._is_reachable:
                log.warning("planner unreachable, keeping what is here", reason=str(error))
            self._is_reachable = False
            return HEARTBEAT_S
        if not self._is_reachable:
            log.info("planner reachable again")
        self._is_reachable = True
        self._wanted = ack.wanted
        if self._caches is not None:
            self._caches.announce({each.model for each in ack.wanted if each.cause == "announced"})
        return ack.heartbeat_s

    def _apply(self, now: float) -> None:
        """Evict and fetch images as the inventory decides."""
        wanted_images = (*self._wanted, *self._own_wanted)
        self._closing = [each for each in self._closing if each.thread.is_alive()]
        self._collect_failures(now)
        kept = {key: KeptImage(keeper.wanted.image_bytes, keeper.used_at) for key, keeper in self._keepers.items()}
        wanted_keys = {ImageKey.of(image) for image in wanted_images}
        self._failures = {
            key: each for key, each in self._failures.items() if key in wanted_keys or now < each.retry_at
        }
        failures = {key: each.reason for key, each in self._failures.items() if now < each.retry_at}
        plan = plan_inventory(wanted_images, kept, self._options.memory_bytes, failures)
        for refusal in set(plan.refused).difference(self._refused):
            log.warning("image refused", model=refusal.image.model, rank=refusal.image.rank.key, reason=refusal.reason)
        self._refused = plan.refused
        for key in plan.evict:
            self._evict(key)
        fetching = [keeper.wanted for keeper in self._keepers.values() if keeper.state == "fetching"]
        for wanted in next_fetches(plan.fetch, fetching):
            if self.used_bytes + wanted.image_bytes > self._options.memory_bytes:
                break  # evicted images are still being read
            keeper = self._keepers[ImageKey.of(wanted)] = self._create_keeper(wanted)
            keeper.start()

    def _collect_failures(self, now: float) -> None:
        for key, keeper in list(self._keepers.items()):
            if keeper.state == "ready":
                self._failures.pop(key, None)
            elif keeper.state == "failed":
                del self._keepers[key]
                keeper.close()
                failure = self._failures.setdefault(key, _Failure(keeper.failure))
                failure.reason = keeper.failure
                failure.retry_at = now + RETRY_S[min(failure.attempts, len(RETRY_S) - 1)]
                failure.attempts += 1

    def _evict(self, key: ImageKey) -> None:
        keeper = self._keepers.pop(key)
        log.info("image evicted", model=key.model, version=key.version, rank=key.rank_key)
        thread = threading.Thread(
            target=keeper.close, args=(self._settings.drain_timeout_s,), name="rfork-evict", daemon=True
        )
        self._closing.append(_Closing(thread, keeper.wanted.image_bytes))
        thread.start()

    def _end_reason(self, is_stopped: Callable[[], bool]) -> str | None:
        options = self._options
        if is_stopped():
            return "stopped"
        if self._until is not None and self._until.has_ended:
            return f"process {self._until.pid} has ended"
        if options.follows_host:
            return None
        if self._is_reachable and not self._wanted and not any(each.has_readers for each in self._keepers.values()):
            # An image that it has, or fetches, stays wanted while the engine needs it.
            if self._keepers:
                return "the engine has its weights"
            if self._until is None or self._clock() >= self._began_at + NO_SOURCE_TIMEOUT_S:
                return "no instance has the weights"
        if self._clock() >= self._began_at + ONE_SHOT_TIMEOUT_S:
            return f"no engine used the weights within {ONE_SHOT_TIMEOUT_S:g} s"
        return None

    def _pause(self, pause_s: float, is_stopped: Callable[[], bool]) -> None:
        """Wait until the next report is due, an image changes, or the process is stopped."""
        until = self._clock() + pause_s
        while not is_stopped() and (remaining := until - self._clock()) > 0:
            if self._changed.wait(min(remaining, MIN_PAUSE_S)):
                self._changed.clear()
                return

    def _close(self) -> None:
        """Drain all images and leave the planner."""
        if self._caches is not None:
            self._caches.stop()
        for key in list(self._keepers):
            self._evict(key)
        until = self._clock() + self._settings.drain_timeout_s + STOP_S
        for closing in self._closing:
            closing.thread.join(max(0.0, until - self._clock()))
        try:
            self._planner.remove_holder(self.holder_id)
        except NetworkError as error:
            log.debug("the planner was not notified", reason=str(error))

    def _keeper(self, wanted: WantedImage) -> ImageKeeper:
        options = self._options
        return ImageKeeper(
            wanted,
            self.holder_id,
            self._settings,
            self._changed.set,
            device=options.device,
            layout_of=self._layout_of,
            is_transient=not options.follows_host,
        )

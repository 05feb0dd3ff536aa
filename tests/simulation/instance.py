"""One simulated instance: its memory, its serving side and its heartbeat.

The served image is production's; this module replaces threads, sockets and memory.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from rfork.errors import NetworkError
from rfork.image.chunks import ChunkState
from rfork.image.layout import Layout, Manifest
from rfork.planner_client.lease import decode_key
from rfork.schema import InstanceAck, InstanceReport, Placement
from rfork.source.served_image import InstanceIdentity, ServedImage
from tests.simulation.content import UNKNOWN, layout_of, manifest_of

if TYPE_CHECKING:
    from tests.simulation.world import World

MODEL = "org/model"
TRANSPORTS = ("shared_memory", "http")
MIN_REPORT_INTERVAL_S = 0.1
REPORT_FRACTION = 0.8
"""Fraction of the planner's heartbeat interval after which an instance reports."""
FIRST_RETRY_S = 0.25


class Process:
    """A process, whose faults are those of all its images."""

    def __init__(self, name: str, host: str | None = None) -> None:
        """`host`: by default one of its own."""
        self.name = name
        self.host = host or f"host-{name}"
        self.alive = True
        self.stopped = False
        """True while the process is suspended (SIGSTOP)."""
        self.corrupt = False
        """True if it sends wrong bytes."""
        self.bad_memory = False
        """True if its memory damages what a peer sends."""
        self.slow = 1.0
        """Factor by which its link is slower."""
        self.images: list[Instance] = []

    def kill(self) -> None:
        """End the process at once."""
        self.alive = False
        for image in self.images:
            image.notify_readers()


class Instance:
    """One image of a process. `files` is the content that it could load by itself; None: it has none."""

    def __init__(
        self,
        world: World,
        name: str,
        *,
        version: str | None,
        files: tuple[bytes, ...] | None,
        content: tuple[bytes, ...] | None = None,
        max_readers: int,
        host: str | None = None,
        holder: str | None = None,
        layout: Layout | None = None,
        identity: InstanceIdentity | None = None,
        process: Process | None = None,
        is_producer: bool = False,
    ) -> None:
        """With `content`, the instance starts as a seed. `host`: by default one of its own; `holder`: the id of the
        holder whose image it is, if it is not an engine. `layout`, `identity` and `process`: by default those of a
        single rank in a process of its own. `is_producer`: see `ServedImage`.
        """
        layout = layout or layout_of(world.chunks)
        self.world = world
        self.name = name
        self.process = process or Process(name, host)
        self.process.images.append(self)
        self.host = self.process.host
        self.holder = holder
        self.own_version = version
        self.files = files
        self.memory = list(content or (UNKNOWN,) * len(layout.chunks))
        self.is_closed = False
        """True once its image is no longer served, although its process may run."""
        self.served = ServedImage(
            layout,
            identity or InstanceIdentity(MODEL, instance_id=name, version=version, holder=holder),
            max_readers,
            chunk_state=None if content else ChunkState(layout.chunks),
            manifest=manifest_of(layout, content) if content else None,
            is_producer=is_producer,
        )
        self.listeners: list[Callable[[], None]] = []
        self._report_due: float | None = None
        self._reported_at = -1e9
        self._interval_s = 1.0
        self._reporting = False
        self._again = False
        self._on_acked: list[Callable[[], None]] = []
        self.served.chunk_state.subscribe(self.notify_readers)

    @property
    def alive(self) -> bool:
        """Return whether it still serves."""
        return self.process.alive and not self.is_closed

    @property
    def stopped(self) -> bool:
        """Return whether its process is suspended."""
        return self.process.stopped

    @property
    def manifest(self) -> Manifest:
        """Return the manifest of what its memory has now."""
        return manifest_of(self.served.layout, tuple(self.memory))

    # -- the serving state, as the target's side of this instance sets it -------------------------------

    def notify_readers(self) -> None:
        """Wake the progress streams."""
        for listener in list(self.listeners):
            listener()

    def set_storage_activity(self, storage_at: Callable[[], float] | None, *, relayed: bool) -> None:
        """Report when storage was last read, here or upstream."""
        if self.served.set_storage_activity(storage_at, relayed=relayed):
            self.notify_readers()

    def fence(self) -> None:
        """Stop serving: the bytes are about to change."""
        self.served.clear()
        self._changed_generation()

    def invalidate(self, chunks: tuple[int, ...]) -> None:
        """Stop serving these chunks."""
        self.served.invalidate(chunks)
        self._changed_generation()

    def publish(self, version: str | None) -> None:
        """Serve the complete image in memory."""
        choose = None if version is None else lambda _: version
        self.served.publish(self.manifest, self.served.generation, choose)
        self.notify_readers()
        self.send_report()

    def update(self, version: str, content: tuple[bytes, ...], duration_s: float) -> None:
        """Change the weights in place, as a trainer does."""
        self.fence()
        self.memory[:] = [UNKNOWN] * len(content)

        def finish() -> None:
            if self.alive:
                self.memory[:] = content
                self.publish(version)

        self.world.later(duration_s, finish, on=self)

    def _changed_generation(self) -> None:
        self.notify_readers()
        self.send_report()

    # -- the heartbeat ----------------------------------------------------------------------------------

    def send_report(self) -> None:
        """Report to the planner soon."""
        self._schedule_report(max(self.world.now, self._reported_at + MIN_REPORT_INTERVAL_S))

    def when_acked(self, call: Callable[[], None]) -> None:
        """Report now, and call a function once the planner has acknowledged this state or a later one."""
        self._on_acked.append(call)
        self.send_report()

    def _schedule_report(self, at: float) -> None:
        if self._reporting:
            self._again = True
        elif self._report_due is None or at < self._report_due:
            self._report_due = at
            self.world.later(at - self.world.now, lambda: self._report_if_due(at), on=self)

    def _report_if_due(self, at: float) -> None:
        if self._report_due == at and self.alive and not self._reporting:
            self._report_due, self._reporting, self._reported_at = None, True, self.world.now
            self.world.start(self._report())

    async def _report(self) -> None:
        report, pause_s = self.report(), FIRST_RETRY_S
        on_acked, self._on_acked = self._on_acked, []
        with suppress(NetworkError):
            ack = await self.world.planner.call(
                self.name, self.host, lambda service, claimant: service.report(report, claimant)
            )
            self._receive_ack(ack)
            pause_s = REPORT_FRACTION * ack.heartbeat_s
            for call in on_acked:
                call()
        self._reporting = False
        if self.alive and not self.world.ended:
            again, self._again = self._again, False
            self._schedule_report(self.world.now + (MIN_REPORT_INTERVAL_S if again else pause_s))

    def _receive_ack(self, ack: InstanceAck) -> None:
        if self.alive:
            self.served.leases.set_keys([decode_key(key) for key in ack.lease_keys], self.world.unix_s)

    def report(self) -> InstanceReport:
        """Return the report for the planner."""
        return self.served.report(self.world.unix_s, f"{self.name}:1", TRANSPORTS, Placement(host=self.host))

"""What the readers of a seed ask: the exporters' `Gate`, and the peer service's `PeerHost`.

Runs on the source.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from uuid import uuid4

from rfork.control.lease import LeaseClaims
from rfork.control.planner_clock import PlannerClock
from rfork.errors import LayoutMismatch, SourceBusy, SourceChanged, TransportUnusable
from rfork.image.board import ChunkBoard
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.seed.channels import Channels
from rfork.seed.given import Given
from rfork.seed.governor import Governor
from rfork.seed.holding import VersionOf
from rfork.seed.latency import FLOOR_RATE, LatencyGuard
from rfork.seed.leases import LeaseBook
from rfork.seed.pacing import Pacing
from rfork.seed.suspending import Suspending
from rfork.settings import Settings
from rfork.tracing import Tracer
from rfork.transport.base import Endpoint, Gate, Line, Transport
from rfork.weights_version import is_single, of_update, of_weights, unnamed
from rfork.wire import Rank

READY_S = 3.0
"""What a transport gets to become ready, when a reader asks for it, before the next one is taken."""
LEAST_A_READER = 4 << 20
"""Bytes a second: above `Settings.min_rate` for each chunk of a reader's usual window."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Who an instance is to the planner: one rank of one model in one process."""

    model: str
    rank: Rank = field(default_factory=Rank)
    instance_id: str = field(default_factory=lambda: uuid4().hex)
    version: str | None = None
    """Of its own weights; None: it takes over the version that is served."""
    replica: str | None = None
    """The replica that it is a rank of, if its ranks agreed on a name."""

    @classmethod
    def of(
        cls,
        model: str,
        rank: Rank,
        server: str | None,
        *,
        version: str | None = None,
        replica: str | None = None,
    ) -> Identity:
        """One with an id of its own at each start, under its server's name (`Settings.replica`) if any.

        So all ranks of a server can be drained together, and whoever gave it the name knows them.
        """
        instance_id = uuid4().hex
        if server is not None:
            instance_id = f"{server}-{rank.key}-dp{rank.dp}-{instance_id[:8]}"
        return cls(model, rank, instance_id, version, replica)


class Answering(Suspending):
    """What an instance holds, given to whoever shows a lease, within the rate that its governor allows."""

    def __init__(
        self,
        image: Image,
        identity: Identity,
        settings: Settings,
        transports: Sequence[Transport],
        board: ChunkBoard | None,
        manifest: Manifest | None,
        tracer: Tracer,
    ) -> None:
        super().__init__(image, board, manifest, transports)
        self.identity = identity
        self.version = identity.version
        self.settings = settings
        self.given_bytes = 0
        self._planner_clock = PlannerClock()
        self._leases = LeaseBook(
            identity.instance_id,
            settings.max_readers,
            layout_id=image.layout.layout_id,
            clock=self._planner_clock.now,
        )
        self._given = Given(tracer, lambda: self._governor.held, identity.instance_id)
        self._channels = Channels(self._leases, self._exports, self._tell, self._given)
        self._latency = LatencyGuard(settings.latency_setpoint, floor=self._floor)
        self._governor = Governor(settings.egress_rate, self._latency, part=self._part_granted)
        self._pacing: Pacing | None = None

    @property
    def takes_any_version(self) -> bool:
        """Whether the version is not this instance's own: it takes over the one that is served."""
        return self.identity.version is None

    def version_by_content(self, manifest: Manifest) -> str:
        """Return a version for weights of which nothing is known but their bytes."""
        identity = self.identity
        if is_single(identity.rank):
            return of_weights(manifest.weights_id)
        return unnamed(identity.replica or identity.instance_id)

    def version_after_update(self, stated: str | None, count: int) -> VersionOf:
        """See `Holding.version_after_update`: the stated version, else one that only these weights have."""
        identity, before, sealed = self.identity, self.version, self._sealed_id

        def choose(manifest: Manifest) -> str | None:
            if stated is not None and stated != before:
                return stated
            if not is_single(identity.rank):
                return of_update(identity.replica or identity.instance_id, count)
            return before if manifest.weights_id == sealed else of_weights(manifest.weights_id)

        return choose

    @property
    def _gate(self) -> Gate:
        return self

    def _floor(self) -> int:
        """So much is given however long the engine's work takes: none of the readers must look stalled."""
        return max(FLOOR_RATE, LEAST_A_READER * len(self._leases.readers))

    # -- Gate: what the exporters ask --------------------------------------------------------------

    def admit(self, token: str, begin: int, end: int) -> str:
        """See `rfork.transport.base.Gate.admit`."""
        claims = self._claims(token)
        if not self.board.holds(begin, end):
            self._claims(token)  # it may have been fenced between the two
            raise SourceBusy(f"bytes {begin}-{end} are not verified here yet")
        return claims.fork_id

    @contextmanager
    def reading(self, token: str, begin: int, end: int, cut: Callable[[], None]) -> Iterator[None]:
        """See `rfork.transport.base.Gate.reading`."""
        with self._readings.held(cut):
            # Asked only now: a fence that comes later waits for this block, one that came before refuses it.
            self.admit(token, begin, end)
            yield

    def grant(self, most: int, fork_id: str) -> int:
        """See `rfork.transport.base.Gate.grant`."""
        granted = self._governor.grant(most, fork_id)
        with self._lock:
            self.given_bytes += granted
        self._given.add(fork_id, granted)
        return granted

    def etag(self) -> str:
        """See `rfork.transport.base.Gate.etag`."""
        return f"{self.identity.instance_id}-{self.generation}"

    def _claims(self, token: str) -> LeaseClaims:
        manifest = self._manifest
        weights_id = manifest.weights_id if manifest is not None else None
        return self._leases.check(token, self.generation, weights_id)

    # -- PeerHost: what the peer service asks --------------------------------------------------------

    def check(self, token: str) -> str:
        """The fork_id a token was leased to; raises as `Gate.admit` does."""
        return self._claims(token).fork_id

    def open_channel(
        self, fork_id: str, layout_id: str, transports: list[str], address: str
    ) -> tuple[str, Endpoint]:
        """Give the reader at this address a slot, and an endpoint of the first transport both sides have."""
        if layout_id != self.image.layout.layout_id:
            raise LayoutMismatch(f"the source's layout is {self.image.layout.layout_id}, not {layout_id}")
        if self.draining:
            raise SourceBusy("the source is draining")
        if self.suspended:
            raise SourceBusy("the source has put its weights away for a while")
        self._settled.wait(READY_S)
        opened = self._open(fork_id, transports, address)
        self._tell()  # there is one more to share the rate with
        return opened

    def _open(self, fork_id: str, transports: list[str], address: str) -> tuple[str, Endpoint]:
        busy: SourceBusy | None = None
        for name in transports:
            exporter = self._exports.get(name)
            if exporter is None:
                continue
            # A reader that is sent to another transport stays there: the better one is worth a wait.
            if not exporter.ready(time.monotonic() + READY_S):
                busy = busy or SourceBusy(f"{name} is not ready yet")
                continue
            try:
                return self._channels.open(fork_id, name, address)
            except SourceBusy as error:  # maybe only not ready yet: it stays on offer
                busy = busy or error
            except TransportUnusable as error:
                # Only found out now, on a thread of its exporter's own: the next one is taken.
                self._exports.withdraw(name, error)
                self.poke()
        # Who may come again is told so; else why there is nothing to come for, which blames nobody.
        known = busy or self._exports.unusable(transports)
        raise known or SourceChanged(f"the source offers {sorted(self._exports)}, not {transports}")

    def has_channel(self, channel_id: str, fork_id: str) -> bool:
        """Whether this fork holds an open channel of this id."""
        return self._leases.holds(channel_id, fork_id)

    def converse(self, channel_id: str, line: Line) -> None:
        """Let what gives this channel its bytes talk with the reader until the line ends; blocks."""
        self._channels.converse(channel_id, line)

    def close_channel(self, channel_id: str) -> None:
        """Take a reader's place back."""
        self._channels.close(channel_id)
        self._tell()

    def _rate_told(self) -> int | None:
        return self._pacing.share() if self._pacing is not None else None

    def _part_granted(self) -> float:
        """What part of the rate passes the governor: readers on one-sided transports have the rest.

        Each that has a slot has the same; those without (a lease alone reads over http) share in what is
        granted, of which there is at least one reader's.
        """
        readers = len(self._leases.readers)
        return max(1, readers - self._channels.readers_on(self._exports.one_sided)) / max(1, readers)

    def _end_readers(self) -> None:
        if self._channels.end_all():
            self._tell()

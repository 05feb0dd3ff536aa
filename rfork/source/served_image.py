"""State machine of one served image: its chunks, generation and version, who may read it, and its reader slots.

Runs on the source. Pure: no thread, clock, socket or lock of its own. `rfork.source.seed` makes its changes one at a
time and calls its leases under a second lock; other reads see each attribute before or after a change. `unix_s` is
the planner's time in seconds since the epoch, which leases refer to; `now` is `time.monotonic()`.

Lease tokens are verified locally: the planner signs them with a key that it shares with this instance only, in the
response to each heartbeat. During a key rotation it sends several keys; a removed key verifies tokens until those
that it signed have expired. A lease is for one generation of the image. A change of the bytes begins a new
generation, so it rejects the readers of the previous one.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import uuid4

from rfork.errors import LayoutMismatch, LeaseRejected, SourceBusy, SourceWeightsChanged
from rfork.image import ranges
from rfork.image.chunks import ChunkState
from rfork.image.layout import Layout, Manifest
from rfork.peer.base import Progress, StorageActivity
from rfork.planner_client.lease import LeaseClaims, verify
from rfork.schema import InstanceReport, InstanceState, Placement, Rank, StorageCandidate
from rfork.weights_version import is_single, of_update, of_weights, unnamed

MAX_CHANNELS_PER_FORK: Final = 16
"""Maximum channels of one fork: it needs one, and a few more while it switches from one to the next."""
NOTIFY_INTERVAL_S: Final = 1.0
"""Readers are notified immediately if storage advanced by this much since the last notification, otherwise with
other changes.
"""

VersionOf = Callable[[Manifest], str | None]
"""Computes the version of complete weights from their manifest."""


@dataclass(frozen=True, slots=True)
class InstanceIdentity:
    """Identity of an instance at the planner: one rank of one model in one process."""

    model: str
    rank: Rank = field(default_factory=Rank)
    instance_id: str = field(default_factory=lambda: uuid4().hex)
    version: str | None = None
    """Version of its weights; None: it adopts the served version."""
    replica: str | None = None
    """Replica of this rank, if the ranks agreed on a name."""
    egress_share: float = 1.0
    """Share of the readers that the planner assigns to it, relative to other sources."""
    holder: str | None = None
    """Holder that keeps the image without an engine; None: an engine."""

    @classmethod
    def of(
        cls,
        model: str,
        rank: Rank,
        server: str | None,
        *,
        version: str | None = None,
        replica: str | None = None,
    ) -> InstanceIdentity:
        """Create an identity with a new id, prefixed by the server's name (`InstanceSettings.replica`) if
        there is one.

        The prefix allows draining all ranks of a server together.
        """
        instance_id = uuid4().hex
        if server is not None:
            instance_id = f"{server}-{rank.key}-dp{rank.dp}-{instance_id[:8]}"
        return cls(model, rank, instance_id, version, replica)


class ServedImage:
    """One image as its readers may see it.

    `manifest` is None until it is known; until then chunks are served under the digests of `chunk_state`.
    """

    def __init__(
        self,
        layout: Layout,
        identity: InstanceIdentity,
        max_readers: int,
        *,
        chunk_state: ChunkState | None = None,
        manifest: Manifest | None = None,
        is_producer: bool = False,
    ) -> None:
        """Without a chunk state, every chunk is verified. A holder's image accepts one more reader, on its host.

        `is_producer`: this process fills the image itself, so the planner may assign all chunks from the start.
        Readers wait for each until it is verified.
        """
        self.layout = layout
        self._is_producer = is_producer
        self.identity = identity
        self.chunk_state = chunk_state if chunk_state is not None else ChunkState.full(layout.chunks)
        self.manifest = manifest
        self.generation = 0
        self.version = identity.version
        """Version of the served weights; changes only while nothing is served."""
        self.state: InstanceState = "serving" if self.chunk_state.complete and manifest else "loading"
        self.suspended = False
        """True if its memory is released, or about to be."""
        self.storage: tuple[StorageCandidate, ...] = ()
        """Storage that this instance could read itself, as reported to the planner."""
        slots = max_readers + (identity.holder is not None)  # one for an engine on the holder's host
        self.leases = Leases(identity.instance_id, slots, layout_id=layout.layout_id)
        self._complete_weights_id = manifest.weights_id if manifest is not None else None
        """Digest of the last complete weights; kept while they change."""
        self._storage_read_at: Callable[[], float] | None = None
        self._storage_relayed = False
        self._storage_notified_at = 0.0

    # -- readers ----------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """True if it accepts no new readers."""
        return self.state == "draining"

    def check(self, token: str, unix_s: float) -> str:
        """Return the fork_id of a token's lease on the current generation.

        Raises LeaseRejected (none, expired, forged, for another source or layout) or SourceWeightsChanged
        (leased for another generation, or for other weights).
        """
        manifest = self.manifest
        weights_id = manifest.weights_id if manifest is not None else None
        return self.leases.check(token, self.generation, weights_id, unix_s).fork_id

    def authorize(self, token: str, begin: int, end: int, unix_s: float) -> str:
        """Return the fork_id of a token that may read bytes `[begin, end)`.

        Raises as `check`, and SourceBusy if not all of these chunks are verified.
        """
        fork_id = self.check(token, unix_s)
        if not self.chunk_state.contains_range(begin, end):
            self.check(token, unix_s)  # the image may have been fenced in between
            raise SourceBusy(f"bytes {begin}-{end} are not verified here yet")
        return fork_id

    def check_can_open(self, layout_id: str) -> None:
        """Raise LayoutMismatch or SourceBusy if no reader with this layout may open a channel."""
        if layout_id != self.layout.layout_id:
            raise LayoutMismatch(f"the source's layout is {self.layout.layout_id}, not {layout_id}")
        if self.draining:
            raise SourceBusy("the source is draining")
        if self.suspended:
            raise SourceBusy("the source has suspended its weights")

    def progress_since(self, reported: tuple[ranges.Range, ...], now: float, rate: int | None = None) -> Progress:
        """Return the message for a reader that was sent the `reported` chunks; see `Progress`."""
        storage, manifest = self._storage_activity(now), self.manifest
        if manifest is not None:
            chunks = ranges.subtract(self.chunk_state.verified, reported)
            return Progress(chunks, self.draining, weights_id=manifest.weights_id, storage_activity=storage, rate=rate)
        provisional_id, digests = self.chunk_state.provisional_state
        chunks = ranges.subtract(ranges.from_indices(digests), reported) if provisional_id is not None else ()
        new_digests = tuple(digests[index] for index in ranges.indices(chunks))
        return Progress(chunks, self.draining, new_digests, provisional_id, storage_activity=storage, rate=rate)

    def _storage_activity(self, now: float) -> StorageActivity | None:
        read_at = self._storage_read_at
        return None if read_at is None else StorageActivity(max(0.0, now - read_at()), self._storage_relayed)

    # -- the planner ------------------------------------------------------------------------------------

    @property
    def adopts_version(self) -> bool:
        """True if the instance adopts the served version instead of having its own."""
        return self.identity.version is None

    def version_by_content(self, manifest: Manifest) -> str:
        """Return a version derived from the weights' bytes."""
        identity = self.identity
        if is_single(identity.rank):
            return of_weights(manifest.weights_id)
        return unnamed(identity.replica or identity.instance_id)

    def version_after_update(self, stated: str | None, count: int) -> VersionOf:
        """Return the function that names the weights after update number `count`: by the `stated` version,
        otherwise by one that only these weights have.
        """
        identity, before, before_weights_id = self.identity, self.version, self._complete_weights_id

        def choose(manifest: Manifest) -> str | None:
            if stated is not None and stated != before:
                return stated
            if not is_single(identity.rank):
                return of_update(identity.replica or identity.instance_id, count)
            return before if manifest.weights_id == before_weights_id else of_weights(manifest.weights_id)

        return choose

    def report(
        self,
        unix_s: float,
        address: str,
        transports: tuple[str, ...],
        placement: Placement,
        *,
        egress_rate: int | None = None,
        clock_skew_s: float | None = None,
    ) -> InstanceReport:
        """Return the instance's complete report for the planner."""
        identity, layout, manifest = self.identity, self.layout, self.manifest
        provisional_id = self.chunk_state.provisional_id
        verified = ((0, len(layout.chunks)),) if self._is_producer else self.chunk_state.verified
        return InstanceReport(
            instance_id=identity.instance_id,
            model=identity.model,
            version=self.version,
            any_version=self.adopts_version and self.state == "loading",
            replica=identity.replica,
            rank=identity.rank,
            layout_id=layout.layout_id,
            weights_id=manifest.weights_id if manifest is not None else None,
            generation=self.generation,
            image_bytes=layout.image_bytes,
            chunk_count=len(layout.chunks),
            state=self.state,
            verified=verified if not self.suspended else (),
            # Without the suffix that distinguishes conflicting reads of the same files.
            provisional_id=provisional_id.partition("-")[0] if provisional_id is not None else None,
            storage=self.storage,
            address=address,
            transports=transports,
            placement=placement,
            max_readers=self.leases.max_readers,
            egress_share=identity.egress_share,
            egress_rate=egress_rate,
            readers=self.leases.readers(unix_s),
            has_lease_keys=self.leases.has_keys,
            clock_skew_s=clock_skew_s,
            holder=identity.holder,
        )

    # -- changes ----------------------------------------------------------------------------------------

    def set_manifest(self, manifest: Manifest) -> None:
        """Set the manifest of a relay's image, which can serve its verified chunks from now on."""
        if manifest.layout.layout_id != self.layout.layout_id:
            raise LayoutMismatch("the manifest has a different layout from the image")
        self.manifest = manifest
        self._complete_weights_id = manifest.weights_id

    def set_storage_activity(self, read_at: Callable[[], float] | None, *, relayed: bool = False) -> bool:
        """Record that this instance, or (`relayed`) its upstream, is reading from storage; returns whether readers
        must be notified now.

        `read_at` returns the time at which storage last delivered bytes; None: storage is not read.
        """
        changed = (read_at is None, relayed) != (self._storage_read_at is None, self._storage_relayed)
        self._storage_read_at, self._storage_relayed = read_at, relayed
        at = read_at() if read_at is not None else self._storage_notified_at
        if not changed and at - self._storage_notified_at < NOTIFY_INTERVAL_S:
            return False
        self._storage_notified_at = at
        return True

    def invalidate(self, chunks: Iterable[int]) -> None:
        """Mark chunks as wrong: a new generation rejects readers that have read them."""
        self.generation += 1
        self.chunk_state.invalidate(chunks)

    def clear(self) -> None:
        """Stop serving all chunks, because the bytes are about to change."""
        self.generation += 1
        self.manifest = None
        self._set_state("loading")
        self.chunk_state.clear()

    def publish(self, manifest: Manifest, generation: int, version: VersionOf | None = None) -> bool:
        """Serve complete weights whose digests were computed in this generation; returns whether they are
        served.

        They are not if the image was fenced since then, because the bytes may have changed under the digest.
        `version` names the weights; None: they are unchanged.
        """
        if self.generation != generation:
            return False
        if version is not None:
            self.version = version(manifest)
        self.set_manifest(manifest)
        for index, digest in enumerate(manifest.digests):
            self.chunk_state.mark_verified(index, digest)
        self.serve()
        return True

    def serve(self) -> None:
        """Become a seed: the image is complete and the engine is ready; a draining instance keeps draining."""
        self._storage_read_at = None
        self._set_state("serving")

    def drain(self) -> None:
        """Accept no new readers; permanent."""
        self.state = "draining"

    def suspend(self) -> None:
        """Serve nothing until `resume`: the memory is about to be released."""
        self.suspended = True

    def resume(self) -> None:
        """Allow serving again; `publish` serves the weights."""
        self.suspended = False

    def snapshot(self) -> tuple[int, Manifest]:
        """Return generation and manifest of the complete image. Raises SourceWeightsChanged if there is none."""
        if self.manifest is None or not self.chunk_state.complete:
            raise SourceWeightsChanged("there is no complete image: the seed is still receiving or changing it")
        return self.generation, self.manifest

    def _set_state(self, state: InstanceState) -> None:
        # A draining instance is about to end, regardless of its weights.
        if self.state != "draining" and not (self.suspended and state == "serving"):
            self.state = state


class Leases:
    """Verifies tokens and counts readers; a fork may have several channels but uses one slot."""

    def __init__(self, source_id: str, max_readers: int, *, layout_id: str) -> None:
        """`layout_id` is the layout of the served image."""
        self._source_id = source_id
        self._layout_id = layout_id
        self.max_readers = max_readers
        self._keys: tuple[bytes, ...] = ()
        self._withdrawn: dict[bytes, float] = {}  # removed keys, and until when they verify tokens
        self._opened_until: dict[bytes, float] = {}  # expiry of the last token that each key has verified
        self._known: dict[str, LeaseClaims] = {}
        self._channels: dict[str, str] = {}  # fork_id by channel_id
        self._expired: list[str] = []  # channels whose lease expired, not yet returned by `sweep`
        self._leased_until: dict[str, float] = {}

    def set_keys(self, keys: Sequence[bytes], unix_s: float) -> None:
        """Replace the keys with which tokens are signed."""
        if tuple(keys) == self._keys:
            return
        for key in self._keys:
            # Never extended again: a leaked key is useless after this time.
            self._withdrawn.setdefault(key, self._opened_until.get(key, 0.0))
        self._withdrawn = {key: until for key, until in self._withdrawn.items() if key not in keys and until > unix_s}
        self._keys = tuple(keys)
        self._opened_until = {key: until for key, until in self._opened_until.items() if key in keys}
        self._known.clear()

    @property
    def has_keys(self) -> bool:
        """True if the planner has sent keys."""
        return bool(self._keys)

    def check(self, token: str, generation: int, weights_id: str | None, unix_s: float) -> LeaseClaims:
        """Return the claims of a valid token for the current weights (None: not known yet).

        Raises LeaseRejected (none, expired, forged, for another source or layout) or SourceWeightsChanged
        (leased for another generation, or for other weights).
        """
        claims = self._known.get(token)
        if claims is None:
            claims = self._verify(token, unix_s)
        elif claims.expires_at <= unix_s:
            self._known.pop(token, None)
            raise LeaseRejected("the lease has expired", hint="request a new lease from the planner")
        if claims.generation != generation:
            raise SourceWeightsChanged(
                f"the lease is for generation {claims.generation} of the weights, but the current one is {generation}"
            )
        if claims.weights_id is not None and claims.weights_id != weights_id:
            current_text = (
                f"but the source has {weights_id}" if weights_id else "but those of the source are not known yet"
            )
            raise SourceWeightsChanged(f"the lease is for weights {claims.weights_id}, {current_text}")
        return claims

    def _verify(self, token: str, unix_s: float) -> LeaseClaims:
        if not token:
            raise LeaseRejected(
                "the request has no lease token", hint="send 'Authorization: Bearer TOKEN' with the token of the plan"
            )
        if not self._keys:
            raise LeaseRejected("this instance has not reached its planner yet, so it cannot check leases")
        keys = (*self._keys, *(key for key, until in self._withdrawn.items() if until > unix_s))
        claims = verify(token, keys, source_id=self._source_id, now=unix_s)
        if claims.layout_id != self._layout_id:
            raise LeaseRejected(f"the lease is for layout {claims.layout_id}, but the source has {self._layout_id}")
        opened_by = next(key for key in keys if self._is_signed_with(key, token, unix_s))
        if opened_by in self._keys:
            self._opened_until[opened_by] = max(claims.expires_at, self._opened_until.get(opened_by, 0.0))
        self._known = {text: known for text, known in self._known.items() if known.expires_at > unix_s}
        self._known[token] = claims
        self._leased_until[claims.fork_id] = max(claims.expires_at, self._leased_until.get(claims.fork_id, 0.0))
        return claims

    def _is_signed_with(self, key: bytes, token: str, unix_s: float) -> bool:
        try:
            verify(token, key, source_id=self._source_id, now=unix_s)
        except LeaseRejected:
            return False
        return True

    def open(self, fork_id: str, unix_s: float, channel_id: str | None = None) -> str:
        """Open a slot for a reader; return the channel's id, a random one by default.

        Raises SourceBusy if all slots are used, or this fork has `MAX_CHANNELS_PER_FORK` channels.
        """
        self._drop_expired(unix_s)
        holders = list(self._channels.values())
        readers = set(holders)
        if fork_id not in readers and len(readers) >= self.max_readers:
            raise SourceBusy(
                f"all {self.max_readers} reader slots of the source are used", hint="raise its RFORK_MAX_READERS"
            )
        if holders.count(fork_id) >= MAX_CHANNELS_PER_FORK:
            raise SourceBusy(f"fork {fork_id} has {MAX_CHANNELS_PER_FORK} channels open, which is the maximum")
        channel_id = channel_id or secrets.token_hex(8)
        self._channels[channel_id] = fork_id
        return channel_id

    def has_channel(self, channel_id: str, fork_id: str) -> bool:
        """Return whether this fork has an open channel with this id."""
        return self._channels.get(channel_id) == fork_id

    def close(self, channel_id: str) -> None:
        """Release a slot; an unknown channel is not an error."""
        self._channels.pop(channel_id, None)

    def sweep(self, unix_s: float) -> tuple[str, ...]:
        """Return the channels whose lease has expired since the last call; each is returned once."""
        self._drop_expired(unix_s)
        expired, self._expired = tuple(self._expired), []
        return expired

    def readers(self, unix_s: float) -> tuple[str, ...]:
        """Return the forks with a slot."""
        self._drop_expired(unix_s)
        return tuple(sorted(set(self._channels.values())))

    def _drop_expired(self, unix_s: float) -> None:
        # A reader that died without closing keeps its slot until its lease expires.
        self._leased_until = {fork: until for fork, until in self._leased_until.items() if until > unix_s}
        for channel_id, fork in list(self._channels.items()):
            if fork not in self._leased_until:
                del self._channels[channel_id]
                self._expired.append(channel_id)

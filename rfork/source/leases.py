"""Lease tokens and reader slots. Runs on the source.

Tokens are verified locally: the planner signs them with a key that it shares with this instance only, in the
response to each heartbeat. During a key rotation it sends several keys; a removed key verifies tokens until
those that it signed have expired.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Sequence

from rfork.errors import LeaseRejected, SourceBusy, SourceWeightsChanged
from rfork.planner_client.lease import LeaseClaims, verify

MAX_CHANNELS_PER_FORK = 16
"""Maximum channels of one fork: it needs one, and a few more while it switches from one to the next."""


class LeaseVerifier:
    """Verifies tokens and counts readers; a fork may have several channels but uses one slot.

    `clock` is wall time, in seconds since the epoch, as in the tokens.
    """

    def __init__(self, source_id: str, max_readers: int, *, layout_id: str, clock: Callable[[], float]) -> None:
        """`layout_id` is the layout of the served image."""
        self._source_id = source_id
        self._layout_id = layout_id
        self._max_readers = max_readers
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: tuple[bytes, ...] = ()
        self._withdrawn: dict[bytes, float] = {}  # removed keys, and until when they verify tokens
        self._opened_until: dict[bytes, float] = {}  # expiry of the last token that each key has verified
        self._known: dict[str, LeaseClaims] = {}
        self._channels: dict[str, str] = {}  # fork_id by channel_id
        self._expired: list[str] = []  # channels whose lease expired, not yet returned by `sweep`
        self._leased_until: dict[str, float] = {}

    def set_keys(self, keys: Sequence[bytes]) -> None:
        """Replace the keys with which tokens are signed."""
        with self._lock:
            if tuple(keys) == self._keys:
                return
            now = self._clock()
            for key in self._keys:
                # Never extended again: a leaked key is useless after this time.
                self._withdrawn.setdefault(key, self._opened_until.get(key, 0.0))
            self._withdrawn = {key: until for key, until in self._withdrawn.items() if key not in keys and until > now}
            self._keys = tuple(keys)
            self._opened_until = {key: until for key, until in self._opened_until.items() if key in keys}
            self._known.clear()

    @property
    def has_keys(self) -> bool:
        """True if the planner has sent keys."""
        return bool(self._keys)

    def check(self, token: str, generation: int, weights_id: str | None) -> LeaseClaims:
        """Return the claims of a valid token for the current weights (None: not known yet).

        Raises LeaseRejected (none, expired, forged, for another source or layout) or SourceWeightsChanged
        (leased for another generation, or for other weights).
        """
        claims = self._known.get(token)
        if claims is None:
            claims = self._verify(token)
        elif claims.expires_at <= self._clock():
            with self._lock:
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

    def _verify(self, token: str) -> LeaseClaims:
        if not token:
            raise LeaseRejected(
                "the request has no lease token", hint="send 'Authorization: Bearer TOKEN' with the token of the plan"
            )
        if not self._keys:
            raise LeaseRejected("this instance has not reached its planner yet, so it cannot check leases")
        now = self._clock()
        with self._lock:
            keys = (*self._keys, *(key for key, until in self._withdrawn.items() if until > now))
        claims = verify(token, keys, source_id=self._source_id, now=now)
        if claims.layout_id != self._layout_id:
            raise LeaseRejected(f"the lease is for layout {claims.layout_id}, but the source has {self._layout_id}")
        opened_by = next(key for key in keys if self._verify_with(key, token, now))
        with self._lock:
            if opened_by in self._keys:
                self._opened_until[opened_by] = max(claims.expires_at, self._opened_until.get(opened_by, 0.0))
            self._known = {text: known for text, known in self._known.items() if known.expires_at > now}
            self._known[token] = claims
            self._leased_until[claims.fork_id] = max(claims.expires_at, self._leased_until.get(claims.fork_id, 0.0))
        return claims

    def _verify_with(self, key: bytes, token: str, now: float) -> bool:
        try:
            verify(token, key, source_id=self._source_id, now=now)
        except LeaseRejected:
            return False
        return True

    def open(self, fork_id: str) -> str:
        """Open a slot for a reader; return the channel's id.

        Raises SourceBusy if all slots are used, or this fork has `MAX_CHANNELS_PER_FORK` channels.
        """
        with self._lock:
            self._drop_expired()
            holders = list(self._channels.values())
            readers = set(holders)
            if fork_id not in readers and len(readers) >= self._max_readers:
                raise SourceBusy(f"all reader slots are used: the source's RFORK_MAX_READERS is {self._max_readers}")
            if holders.count(fork_id) >= MAX_CHANNELS_PER_FORK:
                raise SourceBusy(f"fork {fork_id} has {MAX_CHANNELS_PER_FORK} channels open, which is the maximum")
            channel_id = secrets.token_hex(8)
            self._channels[channel_id] = fork_id
            return channel_id

    def has_channel(self, channel_id: str, fork_id: str) -> bool:
        """Return True if this fork has an open channel with this id."""
        with self._lock:
            return self._channels.get(channel_id) == fork_id

    def close(self, channel_id: str) -> None:
        """Release a slot; an unknown channel is not an error."""
        with self._lock:
            self._channels.pop(channel_id, None)

    def sweep(self) -> tuple[str, ...]:
        """Return the channels whose lease has expired since the last call; each is returned once."""
        with self._lock:
            self._drop_expired()
            expired, self._expired = tuple(self._expired), []
            return expired

    @property
    def readers(self) -> tuple[str, ...]:
        """Forks with a slot."""
        with self._lock:
            self._drop_expired()
            return tuple(sorted(set(self._channels.values())))

    def _drop_expired(self) -> None:
        # A reader that died without closing keeps its slot until its lease expires.
        now = self._clock()
        self._leased_until = {fork: until for fork, until in self._leased_until.items() if until > now}
        for channel_id, fork in list(self._channels.items()):
            if fork not in self._leased_until:
                del self._channels[channel_id]
                self._expired.append(channel_id)

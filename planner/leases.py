"""Mints lease tokens: the planner's half of `rfork.control.lease`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from rfork.control.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.wire import Lease


@dataclass(frozen=True)
class Clock:
    """The planner's two clocks, in seconds: one for ages, one for times that other machines compare."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time


class LeaseMint:
    """Signs leases under keys derived from one secret."""

    def __init__(self, secret: str | None, *, ttl_s: float, clock: Clock) -> None:
        """`secret` None draws a new one: leases from before a restart are then no longer accepted."""
        self._secret = secret.encode() if secret else os.urandom(32)
        self._ttl_s = ttl_s
        self._clock = clock

    def key_of(self, instance_id: str) -> str:
        """The key (base64url) that the instance checks tokens with."""
        return derive_key(self._secret, instance_id)

    def lease(
        self, *, fork_id: str, source_id: str, layout_id: str, weights_id: str | None, generation: int
    ) -> Lease:
        """The right for one fork to read one generation of one source's image, for the time to live."""
        claims = LeaseClaims(
            fork_id=fork_id,
            source_id=source_id,
            layout_id=layout_id,
            weights_id=weights_id,
            generation=generation,
            expires_at=self._clock.unix() + self._ttl_s,
        )
        token = sign(claims, decode_key(self.key_of(source_id)))
        return Lease(token=token, expires_in_s=self._ttl_s)

"""Signs lease tokens: the planner's counterpart of `rfork.planner_client.lease`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from rfork.errors import SettingsError
from rfork.planner_client.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.schema import Lease

KEY_CACHE_SIZE: Final = 32_768
"""Instances whose keys are cached instead of derived again: about 700 bytes each."""


@dataclass(frozen=True)
class Clock:
    """The planner's two clocks, in seconds: monotonic for ages, unix for times that other machines compare."""

    monotonic: Callable[[], float] = time.monotonic
    unix: Callable[[], float] = time.time


@dataclass(frozen=True)
class _InstanceKeys:
    """Derived keys of one instance."""

    verification_keys: tuple[str, ...]
    """Base64url, newest first."""
    signing_key: bytes


class LeaseSigner:
    """Signs leases with keys derived from the first secret; the other secrets are being phased out.

    To rotate the secret, restart with ``NEW,OLD``, and with ``NEW`` alone once every lease signed with the
    old one has expired: sources verify with the keys of both.
    """

    def __init__(self, secrets: Sequence[str], *, ttl_s: float, clock: Clock) -> None:
        """Without `secrets` a random one is generated: leases from before a restart are then rejected.

        Raises SettingsError for an empty secret, from which anyone could derive the keys.
        """
        if not all(secrets):
            raise SettingsError("RFORK_PLANNER_LEASE_KEYS contains an empty key")
        # In order and without duplicates: a source need not try the same key twice.
        self._secrets = tuple(dict.fromkeys(each.encode() for each in secrets)) or (os.urandom(32),)
        self._ttl_s = ttl_s
        self._clock = clock
        self._keys = lru_cache(KEY_CACHE_SIZE)(self._derive)

    @property
    def unix_time(self) -> float:
        """Time that lease expiry refers to, in seconds since the epoch."""
        return self._clock.unix()

    def keys_of(self, instance_id: str, owner: str = "") -> tuple[str, ...]:
        """Return the keys (base64url, newest first) with which the instance's owner verifies tokens."""
        return self._keys(instance_id, owner).verification_keys

    def lease(
        self,
        *,
        fork_id: str,
        source_id: str,
        layout_id: str,
        weights_id: str | None,
        generation: int,
        owner: str = "",
    ) -> Lease:
        """Return a lease for one fork to read one generation of one source's image until the TTL expires.

        `owner`: owner of the source's record.
        """
        claims = LeaseClaims(
            fork_id=fork_id,
            source_id=source_id,
            layout_id=layout_id,
            weights_id=weights_id,
            generation=generation,
            expires_at=self._clock.unix() + self._ttl_s,
        )
        return Lease(token=sign(claims, self._keys(source_id, owner).signing_key), expires_in_s=self._ttl_s)

    def _derive(self, instance_id: str, owner: str) -> _InstanceKeys:
        verification_keys = tuple(derive_key(secret, instance_id, owner) for secret in self._secrets)
        return _InstanceKeys(verification_keys, decode_key(verification_keys[0]))

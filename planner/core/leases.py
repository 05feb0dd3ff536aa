"""Signs lease tokens: the planner's counterpart of `rfork.planner_client.lease`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from planner.core.records import InstanceRecord
from rfork.errors import SettingsError
from rfork.planner_client.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.schema import Lease

KEY_CACHE_SIZE: Final = 32_768
"""Instances whose keys are cached instead of derived again: about 700 bytes each."""


@dataclass(frozen=True, slots=True)
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

    def __init__(self, secrets: Sequence[bytes], *, ttl_s: float) -> None:
        """Raise SettingsError for an empty secret, from which anyone could derive the keys."""
        if not all(secrets):
            raise SettingsError("RFORK_PLANNER_LEASE_KEYS contains an empty key")
        # In order and without duplicates: a source need not try the same key twice.
        self._secrets = tuple(dict.fromkeys(secrets))
        self._ttl_s = ttl_s
        self._keys = lru_cache(KEY_CACHE_SIZE)(self._derive)

    def keys_of(self, instance_id: str, owner: str = "") -> tuple[str, ...]:
        """Return the keys (base64url, newest first) with which the instance's owner verifies tokens."""
        return self._keys(instance_id, owner).verification_keys

    def lease(self, fork_id: str, source: InstanceRecord, unix_s: float) -> Lease:
        """Return a lease for one fork to read the current generation of a source's image until the TTL expires.

        `unix_s`: current time in seconds since the epoch.
        """
        report = source.report
        claims = LeaseClaims(
            fork_id=fork_id,
            source_id=report.instance_id,
            layout_id=report.layout_id,
            weights_id=report.weights_id,
            generation=report.generation,
            expires_at=unix_s + self._ttl_s,
        )
        signing_key = self._keys(report.instance_id, source.owner).signing_key
        return Lease(token=sign(claims, signing_key), expires_in_s=self._ttl_s)

    def _derive(self, instance_id: str, owner: str) -> _InstanceKeys:
        verification_keys = tuple(derive_key(secret, instance_id, owner) for secret in self._secrets)
        return _InstanceKeys(verification_keys, decode_key(verification_keys[0]))

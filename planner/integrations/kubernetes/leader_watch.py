"""Whether a controller leads, as the webhook sees it by the Lease: only then do Pods get the readiness gate.

The controller opens that gate. Where none lives, a Pod that has it would never be ready, so the webhook
leaves it out unless it surely saw a leader renew the Lease not long ago, and in all doubt. No clock of
another machine is believed: a Lease that never changes while this process looks is nobody's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

from planner.integrations.kubernetes.cluster import ClusterUnavailable, ObservedLease
from rfork.logs import logger
from rfork.settings import KubernetesSettings

LEASE_GRACE_FACTOR: Final = 2.0
"""Durations of the Lease for which a renewal counts; by then another has taken over, if there is one."""
MAX_POLL_S: Final = 5.0
"""Most seconds between two looks."""


class LeaseReader(Protocol):
    """What is asked of a `Cluster`."""

    async def read_lease(self, name: str, namespace: str) -> ObservedLease:
        """See `Cluster`."""


class LeaderWatch:
    """What is known of the controller's Lease, in memory of the webhook's process. For one event loop."""

    def __init__(self, settings: KubernetesSettings, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._name, self._namespace = settings.lease, settings.namespace
        self._lease_s = settings.lease_duration_s
        self._poll_interval_s = min(settings.poll_interval_s, MAX_POLL_S, settings.lease_duration_s / 2)
        self._monotonic = monotonic
        self._lease: ObservedLease | None = None
        self._observed_at = 0.0
        self._until: float | None = None
        self._logged_reason: str | None = None
        self._log = logger(__name__).bind(lease=f"{settings.namespace}/{settings.lease}")

    def __call__(self) -> bool:
        """Whether a controller leads now: a look into memory."""
        return self._until is not None and self._monotonic() < self._until

    async def follow(self, cluster: LeaseReader) -> None:
        """Look at the Lease, for ever: a task. Where it cannot be read, nobody leads until it can."""
        while True:
            began = self._monotonic()
            try:
                self.observe(await cluster.read_lease(self._name, self._namespace), began)
            except ClusterUnavailable as error:
                self._until = None
                self._log_change(f"the Lease cannot be read: {error}")
            await asyncio.sleep(self._poll_interval_s)

    def observe(self, lease: ObservedLease, at: float) -> None:
        """Take one look at the Lease, which was asked for at this time of the clock.

        What changed since the look before was renewed after that one was asked for; how long after is not
        known, so it counts from then.
        """
        previous, self._lease = self._lease, lease
        previous_at, self._observed_at = self._observed_at, at
        if lease.holder is None:
            self._until = None
        elif previous is not None and lease.renewed != previous.renewed:
            self._until = previous_at + LEASE_GRACE_FACTOR * (lease.duration_s or self._lease_s)
        if self():
            self._log_change("")
        elif lease.holder is None:
            self._log_change("nobody holds the Lease")
        elif previous is not None:
            self._log_change("nobody renews the Lease")

    def _log_change(self, reason: str) -> None:
        """One line for each change of what Pods get; empty: a controller leads."""
        if reason == self._logged_reason:
            return
        self._logged_reason = reason
        if reason:
            self._log.warning("no controller leads: new Pods get no readiness gate", because=reason)
        else:
            self._log.info("a controller leads: new Pods get the readiness gate")

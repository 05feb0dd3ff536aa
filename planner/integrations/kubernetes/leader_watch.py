"""Tracks the controller's Lease for the webhook: Pods get the readiness gate only while a controller leads.

The controller opens the gate. Without one, a gated Pod would never become ready, so the webhook adds the gate
only if it has recently observed a renewal of the Lease. Clocks of other machines are not trusted: a Lease
that does not change during observation has no holder.
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
"""Multiple of the Lease's duration for which a renewal counts. By then another replica has taken over, if
there is one.
"""
MAX_POLL_S: Final = 5.0
"""Maximum seconds between two polls."""


class LeaseReader(Protocol):
    """The part of `Cluster` that is needed here."""

    async def read_lease(self, name: str, namespace: str) -> ObservedLease:
        """See `Cluster`."""


class LeaderWatch:
    """Observed state of the controller's Lease, in the memory of the webhook's process. For one event loop."""

    def __init__(self, settings: KubernetesSettings, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._name, self._namespace = settings.lease, settings.namespace
        self._lease_duration_s = settings.lease_duration_s
        self._poll_interval_s = min(settings.poll_interval_s, MAX_POLL_S, settings.lease_duration_s / 2)
        self._monotonic = monotonic
        self._lease: ObservedLease | None = None
        self._observed_at = 0.0
        self._until: float | None = None
        self._logged_reason: str | None = None
        self._log = logger(__name__).bind(lease=f"{settings.namespace}/{settings.lease}")

    def __call__(self) -> bool:
        """Return True if a controller leads now. Reads memory only."""
        return self._until is not None and self._monotonic() < self._until

    async def follow(self, cluster: LeaseReader) -> None:
        """Poll the Lease forever. While it cannot be read, no controller counts as the leader."""
        while True:
            began = self._monotonic()
            try:
                self.observe(await cluster.read_lease(self._name, self._namespace), began)
            except ClusterUnavailable as error:
                self._until = None
                self._log_change(f"the Lease cannot be read: {error}")
            await asyncio.sleep(self._poll_interval_s)

    def observe(self, lease: ObservedLease, at: float) -> None:
        """Record the Lease, whose request was sent at this time of the clock.

        A change since the previous observation happened after that was requested. How long after is unknown,
        so it counts from then.
        """
        previous, self._lease = self._lease, lease
        previous_at, self._observed_at = self._observed_at, at
        if lease.holder is None:
            self._until = None
        elif previous is not None and lease.renewed != previous.renewed:
            self._until = previous_at + LEASE_GRACE_FACTOR * (lease.duration_s or self._lease_duration_s)
        if self():
            self._log_change("")
        elif lease.holder is None:
            self._log_change("the Lease has no holder")
        elif previous is not None:
            self._log_change("the Lease is not renewed")

    def _log_change(self, reason: str) -> None:
        """Log each change of what Pods get. An empty reason: a controller leads."""
        if reason == self._logged_reason:
            return
        self._logged_reason = reason
        if reason:
            self._log.warning("no controller leads: new Pods get no readiness gate", reason=reason)
        else:
            self._log.info("a controller leads: new Pods get the readiness gate")

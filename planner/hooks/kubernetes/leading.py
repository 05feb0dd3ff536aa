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

from planner.hooks.kubernetes.cluster import ClusterUnavailable, LeaseSeen
from rfork.logs import logger
from rfork.settings import HookSettings

PATIENCE: Final = 2.0
"""Durations of the Lease for which a renewal counts; by then another has taken over, if there is one."""
MOST_LOOK_S: Final = 5.0
"""Most seconds between two looks."""


class Leases(Protocol):
    """What is asked of a `Cluster`."""

    async def read_lease(self, name: str, namespace: str) -> LeaseSeen:
        """See `Cluster`."""


class Leading:
    """What is known of the controller's Lease, in memory of the webhook's process. For one event loop."""

    def __init__(self, settings: HookSettings, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._name, self._namespace = settings.lease, settings.namespace
        self._lease_s = settings.lease_s
        self._every_s = min(settings.look_s, MOST_LOOK_S, settings.lease_s / 2)
        self._monotonic = monotonic
        self._lease: LeaseSeen | None = None
        self._looked_at = 0.0
        self._until: float | None = None
        self._said: str | None = None
        self._log = logger(__name__).bind(lease=f"{settings.namespace}/{settings.lease}")

    def __call__(self) -> bool:
        """Whether a controller leads now: a look into memory."""
        return self._until is not None and self._monotonic() < self._until

    async def follow(self, cluster: Leases) -> None:
        """Look at the Lease, for ever: a task. Where it cannot be read, nobody leads until it can."""
        while True:
            began = self._monotonic()
            try:
                self.see(await cluster.read_lease(self._name, self._namespace), began)
            except ClusterUnavailable as error:
                self._until = None
                self._say(f"the Lease cannot be read: {error}")
            await asyncio.sleep(self._every_s)

    def see(self, lease: LeaseSeen, at: float) -> None:
        """Take one look at the Lease, which was asked for at this time of the clock.

        What changed since the look before was renewed after that one was asked for; how long after is not
        known, so it counts from then.
        """
        before, self._lease = self._lease, lease
        before_at, self._looked_at = self._looked_at, at
        if lease.holder is None:
            self._until = None
        elif before is not None and lease.renewed != before.renewed:
            self._until = before_at + PATIENCE * (lease.duration_s or self._lease_s)
        if self():
            self._say("")
        elif lease.holder is None:
            self._say("nobody holds the Lease")
        elif before is not None:
            self._say("nobody renews the Lease")

    def _say(self, why_not: str) -> None:
        """One line for each change of what Pods get; empty: a controller leads."""
        if why_not == self._said:
            return
        self._said = why_not
        if why_not:
            self._log.warning("no controller leads: new Pods get no readiness gate", because=why_not)
        else:
            self._log.info("a controller leads: new Pods get the readiness gate")

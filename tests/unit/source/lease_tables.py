"""Leases of one source at the time of a test's clock."""

from __future__ import annotations

from collections.abc import Callable

from rfork.planner_client.lease import LeaseClaims
from rfork.source.leases import LeaseTable
from rfork.source.served_image import Leases


class CheckedLeases(LeaseTable):
    """A lease table that also verifies tokens, as the served image does."""

    def __init__(self, max_readers: int, layout_id: str, clock: Callable[[], float]) -> None:
        super().__init__(Leases("seed-1", max_readers, layout_id=layout_id), clock)

    def check(self, token: str, generation: int, weights_id: str | None) -> LeaseClaims:
        return self._leases.check(token, generation, weights_id, self._clock())

"""Leases of one source at the time of a test's clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rfork.planner_client.lease import LeaseClaims
from rfork.source.served_image import Leases


class TimedLeases:
    """Leases, called at the time of `clock`."""

    def __init__(self, max_readers: int, layout_id: str, clock: Callable[[], float]) -> None:
        self.leases = Leases("seed-1", max_readers, layout_id=layout_id)
        self._clock = clock

    def set_keys(self, keys: Sequence[bytes]) -> None:
        self.leases.set_keys(keys, self._clock())

    def check(self, token: str, generation: int, weights_id: str | None) -> LeaseClaims:
        return self.leases.check(token, generation, weights_id, self._clock())

    def open(self, fork_id: str) -> str:
        return self.leases.open(fork_id, self._clock())

    def has_channel(self, channel_id: str, fork_id: str) -> bool:
        return self.leases.has_channel(channel_id, fork_id)

    def close(self, channel_id: str) -> None:
        self.leases.close(channel_id)

    def sweep(self) -> tuple[str, ...]:
        return self.leases.sweep(self._clock())

    @property
    def readers(self) -> tuple[str, ...]:
        return self.leases.readers(self._clock())

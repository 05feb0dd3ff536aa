"""Thread-safe access to the leases of a served image. Runs on the source."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rfork.source.served_image import Leases


class LeaseTable:
    """Keys and reader slots at the current time; see `rfork.source.served_image.Leases`.

    `clock` is the planner's time, in seconds since the epoch, as in the tokens. `lock` guards the leases.
    """

    def __init__(self, leases: Leases, clock: Callable[[], float]) -> None:
        self._leases = leases
        self._clock = clock
        self.lock = threading.Lock()

    def set_keys(self, keys: Sequence[bytes]) -> None:
        """Replace the keys with which tokens are signed."""
        with self.lock:
            self._leases.set_keys(keys, self._clock())

    @property
    def has_keys(self) -> bool:
        """True if the planner has sent keys."""
        return self._leases.has_keys

    def open(self, fork_id: str) -> str:
        """Open a slot for a reader; return the channel's id. Raises SourceBusy."""
        with self.lock:
            return self._leases.open(fork_id, self._clock())

    def has_channel(self, channel_id: str, fork_id: str) -> bool:
        """Return True if this fork has an open channel with this id."""
        with self.lock:
            return self._leases.has_channel(channel_id, fork_id)

    def close(self, channel_id: str) -> None:
        """Release a slot; an unknown channel is not an error."""
        with self.lock:
            self._leases.close(channel_id)

    def sweep(self) -> tuple[str, ...]:
        """Return the channels whose lease has expired since the last call; each is returned once."""
        with self.lock:
            return self._leases.sweep(self._clock())

    @property
    def readers(self) -> tuple[str, ...]:
        """Forks with a slot."""
        with self.lock:
            return self._leases.readers(self._clock())

"""How many chunks are read from one source at once: no more than its link needs to be busy.

Reads of one source share its link, so each further one makes every chunk later, and with it all relays
behind this target: a chain pays that at every hop. One TCP connection fills a link of a gigabit a second
or two; a faster one takes several. Sources of this host share no link: what is slow there is the kernel that
has memory to find, and it finds more for several reads at once.
"""

from __future__ import annotations

from typing import Final

from rfork.schema.types import SAME_HOST_TRANSPORTS

BYTES_PER_S_PER_CONNECTION: Final = 256 << 20
"""Bytes a second that one connection carries on any machine; for each further such share, one more read."""
EWMA_ALPHA: Final = 0.3
"""Weight of the newest chunk in the mean."""


class ReadConcurrency:
    """The reads under way that each source of one fork is worth. The puller holds its lock around calls."""

    def __init__(self, max_reads: int) -> None:
        """`max_reads` is the window of the settings: the most reads there may be."""
        self._max_reads = max_reads
        self._rate: float | None = None

    def window(self, transport: str) -> int:
        """Most reads under way from a source that is read so; by network, one until the first has shown
        how fast it goes.
        """
        if transport in SAME_HOST_TRANSPORTS:
            return self._max_reads
        return 1 if self._rate is None else min(self._max_reads, 1 + int(self._rate / BYTES_PER_S_PER_CONNECTION))

    def record_chunk(self, nbytes: int, seconds: float, concurrent: int) -> None:
        """A chunk took so long while `concurrent` others were on their way from the same source."""
        rate = nbytes * (1 + concurrent) / max(seconds, 1e-9)
        self._rate = rate if self._rate is None else self._rate + EWMA_ALPHA * (rate - self._rate)

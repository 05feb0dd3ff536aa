"""Number of concurrent reads from one source: only as many as its link needs to be busy.

Reads from one source share its link, so each additional read delays every chunk, and with it all downstream
relays: a chain pays that at every hop. One TCP connection fills a link of one or two gigabits per second; a
faster link needs several. Sources on this host share no link: there the kernel's memory allocation is slow,
and several concurrent reads speed it up.
"""

from __future__ import annotations

from typing import Final

from rfork.schema.types import SAME_HOST_TRANSPORTS

BYTES_PER_S_PER_CONNECTION: Final = 256 << 20
"""Bytes per second that one connection carries on any machine; one more read for each multiple of this rate."""
EWMA_ALPHA: Final = 0.3
"""Weight of the newest chunk in the mean."""


class ReadConcurrency:
    """Number of concurrent reads for each source of one fork."""

    def __init__(self, max_reads: int) -> None:
        """`max_reads` is the maximum from the settings."""
        self._max_reads = max_reads
        self._rate: float | None = None

    def window(self, transport: str) -> int:
        """Return the maximum number of concurrent reads over this transport.

        Over a network it is one until the first read has shown its rate.
        """
        if transport in SAME_HOST_TRANSPORTS:
            return self._max_reads
        return 1 if self._rate is None else min(self._max_reads, 1 + int(self._rate / BYTES_PER_S_PER_CONNECTION))

    def record_chunk(self, nbytes: int, seconds: float, concurrent: int) -> None:
        """Record the duration of a chunk while `concurrent` other reads from the same source were in flight."""
        rate = nbytes * (1 + concurrent) / max(seconds, 1e-9)
        self._rate = rate if self._rate is None else self._rate + EWMA_ALPHA * (rate - self._rate)

"""Decides which chunk is read next and from which source: pure state of one fork, without threads, clocks or
sockets.

A chunk is in one of these states: verified; in flight (exactly one reader fills it); assigned to a source by the
newest plan, or reserved, which plans do not change; unassigned (its source failed, and a new plan is needed).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Final

from rfork.image import ranges
from rfork.image.ranges import Range
from rfork.schema import SAME_HOST_TRANSPORTS

BYTES_PER_S_PER_CONNECTION: Final = 256 << 20
"""Bytes per second that one connection carries on any machine; one more read for each multiple of this rate."""
EWMA_ALPHA: Final = 0.3
"""Weight of the newest chunk in the mean."""


@dataclass(frozen=True, slots=True)
class ChunkRead:
    """One chunk to read from one source."""

    source_id: str
    chunk: int


def _unlimited(_source_id: str) -> int:
    return 1 << 30


class ChunkScheduler:
    """The chunks of one fork; each chunk has at most one reader at a time."""

    def __init__(self, chunk_count: int) -> None:
        self.chunk_count = chunk_count
        self._verified: set[int] = set()
        self._assigned: dict[int, str] = {}
        self._reserved: dict[int, str] = {}
        self._in_flight: dict[int, str] = {}
        self._readable: dict[str, set[int]] = {}
        self._ready: dict[str, list[int]] = {}  # heaps; `next_read` discards outdated entries
        self._attempts: dict[int, int] = {}
        self._reservers: set[str] = set()  # ids for which chunks were reserved: they read without a worker
        self.late: frozenset[str] = frozenset()
        """Sources that have served nothing yet while others have: the others may read their chunks."""

    def assign(self, routes: Mapping[str, Iterable[Range]]) -> None:
        """Follow a new plan: chunk ranges by source. Chunks in flight stay with their reader."""
        self._assigned = {
            chunk: source
            for source, parts in routes.items()
            for chunk in ranges.indices(parts)
            if chunk not in self._verified
        } | self._reserved
        self._ready = {}
        for source in routes:
            self._readable.setdefault(source, set())
        for chunk in self._assigned:
            self._queue(chunk)

    def mark_available(self, source_id: str, chunks: Iterable[Range]) -> None:
        """Record that these chunks can be read from a source."""
        readable = self._readable.setdefault(source_id, set())
        # Clip first: a source that offers 2**60 chunks must not cost the memory to list them.
        for chunk in ranges.indices(ranges.intersect(chunks, ((0, self.chunk_count),))):
            if chunk not in readable:
                readable.add(chunk)
                self._queue(chunk)

    def next_read(self, window: Callable[[str], int] = _unlimited) -> ChunkRead | None:
        """Return the next read, now in flight, or None if no assigned chunk is readable yet.

        Skips sources that already have `window` reads in flight. Chooses the source with the fewest reads in
        flight, so that several sources are used concurrently, and its lowest chunk, so that a chain of relays
        stays in step.
        """
        load = Counter(self._in_flight.values())
        first = {
            source: heap[0]
            for source, heap in self._ready.items()
            if load[source] < window(source) and self._is_current(source, heap)
        }
        source = min(first, key=lambda source: (load[source], first[source]), default=None)
        if source is None and not self._reassign_from_slowest(load, window):
            return None
        if source is None:
            return self.next_read(window)
        chunk = heapq.heappop(self._ready[source])
        self._in_flight[chunk] = source
        self._attempts[chunk] = self._attempts.get(chunk, 0) + 1
        return ChunkRead(source, chunk)

    def _reassign_from_slowest(self, load: Mapping[str, int], window: Callable[[str], int]) -> bool:
        """Assign one chunk of a late source to an idle one; returns whether a chunk was moved."""
        if not self.late:
            return False
        for source, readable in self._readable.items():
            if source in self.late or load.get(source, 0) >= window(source):
                continue
            for chunk, late in self._assigned.items():
                free = late in self.late and chunk not in self._in_flight and chunk not in self._reserved
                if free and chunk in readable:
                    self._assigned[chunk] = source
                    self._queue(chunk)
                    return True
        return False

    def lend(self, source_id: str, max_chunks: int) -> None:
        """Assign to a source, up to `max_chunks` chunks and a quarter of all, chunks that no source has begun.

        First those without a source, then the last ones of the source with most chunks left, which itself reads
        the first ones.
        """
        begun = self._in_flight.keys() | self._verified | self._reserved.keys()
        waiting: dict[str | None, list[int]] = {}
        for chunk in range(self.chunk_count):
            if chunk not in begun:
                waiting.setdefault(self._assigned.get(chunk), []).append(chunk)
        own = len(waiting.pop(source_id, ()))
        total = own + sum(map(len, waiting.values()))
        left = min(max_chunks, max(1, total // 4)) - own
        while left > 0 and any(waiting.values()):
            lender = None if waiting.get(None) else max(waiting, key=lambda name: len(waiting[name]))
            chunk = waiting[lender].pop()
            self._assigned[chunk] = source_id
            self._queue(chunk)
            left -= 1

    def transfer(self, from_id: str, to_id: str) -> None:
        """Assign all chunks of one source to another, those in flight once their reads have failed."""
        for chunk, source in (self._assigned | self._in_flight).items():
            if source == from_id and chunk not in self._reserved:
                self._assigned[chunk] = to_id
                self._queue(chunk)

    def upcoming(self, source_id: str, count: int) -> tuple[list[int], list[int]]:
        """Return the chunks in flight from this source, and the next `count` that `next_read` will return for
        it.
        """
        waiting = (
            chunk
            for chunk in self._ready.get(source_id, ())
            if self._assigned.get(chunk) == source_id and chunk not in self._in_flight
        )
        in_flight_chunks = [chunk for chunk, source in self._in_flight.items() if source == source_id]
        return in_flight_chunks, heapq.nsmallest(count, set(waiting))

    def reserve(self, source_id: str, chunks: Iterable[int]) -> None:
        """Reserve chunks for a source that no plan names; later plans do not change this. Skips chunks in
        flight.
        """
        for chunk in chunks:
            if chunk not in self._verified and chunk not in self._in_flight:
                self._assigned[chunk] = self._reserved[chunk] = source_id

    def next_reserved(self) -> ChunkRead | None:
        """Return the next read of a reserved chunk, now in flight, or None if all are in flight or none is
        reserved.
        """
        chunk = next((chunk for chunk in self._reserved if chunk not in self._in_flight), None)
        if chunk is None:
            return None
        source = self._in_flight[chunk] = self._reserved[chunk]
        self._reservers.add(source)
        return ChunkRead(source, chunk)

    @property
    def reserved(self) -> list[int]:
        """Chunks that `next_reserved` has yet to return, in order."""
        return [chunk for chunk in self._reserved if chunk not in self._in_flight]

    def unreserve(self, chunks: Iterable[int] | None = None) -> None:
        """Release the reservation of these chunks, or of all: a new plan assigns them."""
        for chunk in list(self._reserved if chunks is None else chunks):
            if self._reserved.pop(chunk, None) is not None:
                self._assigned.pop(chunk, None)

    def _queue(self, chunk: int) -> None:
        """Queue the chunk if it is assigned to a source and readable from it."""
        source = self._assigned.get(chunk)
        if source is not None and chunk not in self._in_flight and chunk in self._readable.get(source, ()):
            heapq.heappush(self._ready.setdefault(source, []), chunk)

    def _is_current(self, source: str, heap: list[int]) -> bool:
        """Drop outdated entries from the top of the heap; returns whether any entry is left."""
        while heap and (self._assigned.get(heap[0]) != source or heap[0] in self._in_flight):
            heapq.heappop(heap)
        return bool(heap)

    def verified(self, read: ChunkRead) -> None:
        """Record that the read delivered the right bytes."""
        self._in_flight.pop(read.chunk, None)
        self._assigned.pop(read.chunk, None)
        self._reserved.pop(read.chunk, None)
        self._verified.add(read.chunk)

    def dropped(self, read: ChunkRead) -> None:
        """Record that the read failed: the chunk is read again from the source that it is assigned to."""
        self._in_flight.pop(read.chunk, None)
        self._queue(read.chunk)

    def fail(self, source_id: str) -> None:
        """Unassign all chunks of a source; its readers drop those in flight."""
        self._assigned = {chunk: source for chunk, source in self._assigned.items() if source != source_id}
        self._readable.pop(source_id, None)
        self._ready.pop(source_id, None)

    def invalidate(self, chunks: Iterable[int]) -> None:
        """Mark verified chunks as wrong: they are read again once a plan assigns them."""
        self._verified.difference_update(chunks)

    def begin_local(self, source_id: str, chunk: int) -> bool:
        """Let this instance check a chunk without a source, unless it is verified or in flight; returns whether
        it is now in flight.
        """
        if chunk in self._verified or chunk in self._in_flight:
            return False
        self._in_flight[chunk] = source_id
        return True

    def mark_all_verified(self) -> None:
        """Mark every chunk as verified by other means; nothing is in flight."""
        self._verified.update(range(self.chunk_count))
        self._assigned.clear()
        self._reserved.clear()

    @property
    def shares(self) -> dict[str, tuple[Range, ...]]:
        """Chunks in flight, or assigned by the newest plan, by source."""
        chunks: dict[str, list[int]] = {}
        for chunk, source in (self._assigned | self._in_flight).items():
            chunks.setdefault(source, []).append(chunk)
        return {source: ranges.from_indices(indices) for source, indices in chunks.items()}

    def has_assigned(self, source_id: str) -> bool:
        """Return whether the newest plan, or a reader, still needs chunks of this source."""
        return source_id in self._assigned.values() or source_id in self._in_flight.values()

    def is_starved(self, source_id: str) -> bool:
        """Return whether this source has assigned chunks, but none that is readable or being read."""
        readable = self._readable.get(source_id, set())
        wanted = {chunk for chunk, source in self._assigned.items() if source == source_id}
        return bool(wanted) and not wanted & readable and source_id not in self._in_flight.values()

    @property
    def unassigned(self) -> bool:
        """True if a missing chunk has no source, so that a new plan is needed."""
        # Verified chunks are neither assigned nor in flight. Evaluated for every event: no set of all chunks is built.
        orphaned = sum(chunk not in self._assigned for chunk in self._in_flight)
        return len(self._verified) + len(self._assigned) + orphaned < self.chunk_count

    @property
    def complete(self) -> bool:
        """True if every chunk is verified."""
        return len(self._verified) == self.chunk_count

    def inflight_with(self, read: ChunkRead) -> int:
        """Return the number of other reads in flight from the same source."""
        return Counter(self._in_flight.values())[read.source_id] - 1

    @property
    def in_flight(self) -> int:
        """Number of chunks in flight."""
        return len(self._in_flight)

    def reads_in_flight(self, *, excluded: str | None = None) -> int:
        """Number of chunks in flight without reserved ones and those of one source: each occupies a worker."""
        return sum(source not in self._reservers and source != excluded for source in self._in_flight.values())

    @property
    def verified_chunks(self) -> Set[int]:
        """The verified chunks."""
        return self._verified

    @property
    def rereads(self) -> dict[int, int]:
        """Chunks that were read more than once, with the number of extra reads."""
        return {chunk: count - 1 for chunk, count in self._attempts.items() if count > 1}


class ReadConcurrency:
    """Number of concurrent reads from each source of one fork: only as many as its link needs to be busy.

    Reads from one source share its link, so each additional read delays every chunk, and with it all downstream
    relays: a chain pays that at every hop. One TCP connection fills a link of one or two gigabits per second; a
    faster link needs several. Sources on this host share no link: there the kernel's memory allocation is slow,
    and several concurrent reads speed it up.
    """

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

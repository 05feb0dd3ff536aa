"""Plan for hashing the leaves of a chunk with one kernel: which are read in place, and which are joined first.

A leaf is read in place if it lies in one run of memory at an address that the kernel can load from. The bytes
of all others, one leaf after the other, are the *gathered bytes*: they are copied, a limited number at a time,
to a scratch buffer. A plan is computed from addresses and lengths alone, by array operations, so a chunk of
20,000 tensors costs about as much as its arrays. It is valid as long as the memory stays where it is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Column = npt.NDArray[np.int64]

ALIGNMENT, WIDE_ALIGNMENT = 4, 16
"""Minimum alignment of a leaf's address, and the alignment at which the widest loads are used. Powers of two."""
MAX_SHORT_INPUT = 240
"""Maximum number of bytes for which XXH3 has other formulas; they are hashed on the host."""
LAST_STRIPE_BYTES = 64
MAX_SCRATCH_BYTES = 8 << 20
"""The engine cannot use this memory of its device while a chunk is hashed, nor afterwards what torch caches of it."""


class LeafLaunch(NamedTuple):
    """Leaves of one length that are hashed at once, after gathered bytes were copied to the scratch buffer."""

    first: int
    """Index of the first leaf."""
    leaves: int
    leaf_bytes: int
    last_stripe: int
    """Offset of the last 64 bytes relative to the leaf's address, a multiple of `ALIGNMENT`."""
    gather_begin: int
    gather_end: int


class LeafPlan(NamedTuple):
    """The plan of one chunk. `leaf_plan` creates it."""

    length: int
    """Number of bytes of the chunk."""
    addresses: Column
    """Address of each leaf of more than 240 bytes; of gathered ones, the offset in the scratch buffer."""
    gathered: Column
    """Indices in `addresses` of the gathered leaves."""
    is_wide: bool
    """True if all addresses are multiples of `WIDE_ALIGNMENT`."""
    launches: tuple[LeafLaunch, ...]
    range_begins: Column
    """Begin of each copied range within the gathered bytes, then their total number."""
    range_bases: Column
    """Address of each copied range, minus its begin."""
    scratch_bytes: int
    """Size of the scratch buffer."""
    short_bytes: int
    """Size of a last leaf of at most 240 bytes, or 0. These are the last gathered bytes, and in no launch."""


def leaf_plan(
    addresses: Column, lengths: Column, leaf_bytes: int, max_scratch_bytes: int = MAX_SCRATCH_BYTES
) -> LeafPlan:
    """Return the plan for runs of memory with these addresses and lengths, in order. Runs may be empty.

    `leaf_bytes` is a multiple of 1024. The scratch buffer has at most `max_scratch_bytes`, unless a single leaf
    and its last stripe need more.
    """
    addresses, lengths = _merged(addresses, lengths)
    ends: Column = lengths.cumsum()
    length = int(ends[-1]) if len(ends) else 0
    count, rest = divmod(length, leaf_bytes)

    bases: Column = np.subtract(addresses, ends - lengths)
    begins = np.arange(0, count * leaf_bytes, leaf_bytes, dtype=np.int64)
    runs = ends.searchsorted(begins, "right")
    leaf_addresses = bases[runs] + begins
    gathered = ((begins + leaf_bytes > ends[runs]) | (leaf_addresses & (ALIGNMENT - 1) != 0)).nonzero()[0]
    leaves_at_once = max(max_scratch_bytes // leaf_bytes, 1)
    leaf_addresses[gathered] = np.arange(len(gathered)) % leaves_at_once * leaf_bytes
    launches = _launches(count, gathered, leaf_bytes, leaves_at_once)

    span_begins = begins[gathered]
    span_ends = span_begins + leaf_bytes
    gathered_bytes = len(gathered) * leaf_bytes
    if rest > MAX_SHORT_INPUT:
        # Its last 64 bytes may be at an odd address, so an aligned copy of them precedes it.
        span_begins = np.append(span_begins, (length - LAST_STRIPE_BYTES, length - rest))
        span_ends = np.append(span_ends, (length, length))
        gathered = np.append(gathered, count)
        leaf_addresses = np.append(leaf_addresses, LAST_STRIPE_BYTES)
        gather_end = gathered_bytes + LAST_STRIPE_BYTES + rest
        launches.append(LeafLaunch(count, 1, rest, -LAST_STRIPE_BYTES, gathered_bytes, gather_end))
    elif rest:
        span_begins, span_ends = np.append(span_begins, length - rest), np.append(span_ends, length)
    return LeafPlan(
        length,
        leaf_addresses,
        gathered,
        not np.bitwise_or.reduce(leaf_addresses) & (WIDE_ALIGNMENT - 1),
        tuple(launches),
        *_ranges(span_begins, span_ends, ends, lengths, bases),
        max((launch.gather_end - launch.gather_begin for launch in launches), default=0),
        rest if rest <= MAX_SHORT_INPUT else 0,
    )


def _merged(addresses: Column, lengths: Column) -> tuple[Column, Column]:
    """Return the same memory without empty runs, and with one run for neighbours that are adjacent in memory.

    Unlike a tensor, a kernel reads across allocations, and allocators place tensors next to each other.
    """
    if not lengths.all():
        addresses, lengths = addresses[lengths > 0], lengths[lengths > 0]
    is_adjacent = addresses[1:] == addresses[:-1] + lengths[:-1]
    if not is_adjacent.any():
        return addresses, lengths
    firsts = np.append(0, (~is_adjacent).nonzero()[0] + 1)
    return addresses[firsts], np.add.reduceat(lengths, firsts)


def _launches(count: int, gathered: Column, leaf_bytes: int, leaves_at_once: int) -> list[LeafLaunch]:
    """Return the launches of `count` complete leaves; each has at most `leaves_at_once` gathered ones."""
    if not count:
        return []
    launches: list[LeafLaunch] = []
    first = 0
    for index, stop in enumerate([*gathered[leaves_at_once::leaves_at_once].tolist(), count]):
        gather_begin, gather_end = (
            min(group * leaves_at_once, len(gathered)) * leaf_bytes for group in (index, index + 1)
        )
        last_stripe = leaf_bytes - LAST_STRIPE_BYTES
        launches.append(LeafLaunch(first, stop - first, leaf_bytes, last_stripe, gather_begin, gather_end))
        first = stop
    return launches


def _ranges(
    span_begins: Column, span_ends: Column, ends: Column, lengths: Column, bases: Column
) -> tuple[Column, Column]:
    """Return `range_begins` and `range_bases` of these spans of the chunk, gathered in this order.

    ends, lengths: of the runs of memory, in the chunk. bases: their addresses, minus their begins.
    """
    if not len(span_begins):
        return np.zeros(1, dtype=np.int64), np.empty(0, dtype=np.int64)
    first = ends.searchsorted(span_begins, "right")
    counts = ends.searchsorted(span_ends) - first + 1
    stops = counts.cumsum()
    sizes = span_ends - span_begins
    shifts = sizes.cumsum() - sizes - span_begins  # from an offset in the chunk to one in the gathered bytes
    span = np.arange(len(counts)).repeat(counts)
    run = np.arange(len(span)) + (first - stops + counts)[span]
    begins = np.maximum(ends[run] - lengths[run], span_begins[span]) + shifts[span]
    return np.append(begins, sizes.sum()), bases[run] - shifts[span]

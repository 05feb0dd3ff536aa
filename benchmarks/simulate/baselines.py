"""Times of other schedules and the lower bound of all schedules: T in multiples of S/B.

Exact in the model of `benchmarks.simulate.network` if all links are equal, no node fails, all targets arrive
together and a chunk has no latency (tests compare them). With M seeds each serves its part of the targets; T
is that of the largest part.

N targets, M seeds, k chunks.
"""

from __future__ import annotations

from math import ceil, log2


def star(targets: int, seeds: int, chunks: int) -> float:
    """All targets read from a seed: N/M (R-Fork with a fixed seed)."""
    return float(ceil(targets / seeds))


def doubling(targets: int, seeds: int, chunks: int) -> float:
    """Complete copies, one at a time from each holder: ceil(log2(N/M + 1))."""
    return float(ceil(log2(ceil(targets / seeds) + 1)))


def chain(targets: int, seeds: int, chunks: int) -> float:
    """One pipelined chain per seed: (k + N/M - 1)/k (BlitzScale)."""
    return (chunks + ceil(targets / seeds) - 1) / chunks


def binomial_pipeline(targets: int, seeds: int, chunks: int) -> float:
    """The binomial pipeline of P. Ganesan, M. Seshadri ("On cooperative content distribution", ICDCS 2005).

    For a seed and a power of two minus one of targets the hypercube schedule itself is run, tick by tick; for
    other numbers this is their bound, (k + ceil(log2(N + 1)) - 1)/k, which they reach by putting two targets
    on some corners. On a real network all nodes would have to stay synchronized.
    """
    part = ceil(targets / seeds)
    dimensions = ceil(log2(part + 1))
    if part + 1 == 1 << dimensions:
        return hypercube_ticks(dimensions, chunks) / chunks
    return (chunks + dimensions - 1) / chunks


def hypercube_ticks(dimensions: int, chunks: int) -> int:
    """Return the ticks (of S/(kB)) until all of 2**dimensions nodes have every chunk.

    Node 0 is the seed. In tick t each node swaps with its neighbour along dimension t mod `dimensions`: the
    seed sends chunk t (the last chunk when there is no more), the others their highest chunk. Chunks are
    bits.
    """
    all_chunks = (1 << chunks) - 1
    chunk_sets = [all_chunks] + [0] * ((1 << dimensions) - 1)
    tick = 0
    while any(chunk_set != all_chunks for chunk_set in chunk_sets):
        bit = 1 << tick % dimensions
        sent = [1 << chunk_set.bit_length() - 1 if chunk_set else 0 for chunk_set in chunk_sets]
        sent[0] = 1 << min(tick, chunks - 1)
        chunk_sets = [chunk_set | sent[node ^ bit] for node, chunk_set in enumerate(chunk_sets)]
        tick += 1
    return tick


def floor(targets: int, seeds: int, chunks: int) -> float:
    """Lower bound of all schedules of complete chunks.

    In the time of one chunk every node with a chunk sends at most one, so at most M, 2M, 4M, … nodes send,
    and never more than N targets receive; N·k chunks must arrive. Without chunks, T is 1 for any N.
    """
    left, senders, ticks = targets * chunks, seeds, 0
    while left > 0 and senders < targets:
        left -= senders
        senders *= 2
        ticks += 1
    return (ticks + max(0, ceil(left / targets))) / chunks

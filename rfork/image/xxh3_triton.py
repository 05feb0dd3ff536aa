"""XXH3-128 of many leaves at once in one Triton kernel that reads each byte once. Needs `triton`.

One program, of a single warp, hashes one leaf, a block of 1 KiB a step: 32 threads take twice 16 bytes
each, multiply under their keys, and sum over the 16 stripes by shuffles, so that warps never wait for one
another. Only the scramble is sequential.

**Bytes in flight** rule the speed, as a warp alone waits 0.6 to 0.9 us for memory. Little's law asks for
bandwidth x latency: 1.2 MB on an A100 (11 KB an SM), 2 to 3 MB on an H100 or H200 (15 to 25 KB), 6 MB on a
B200 (45 KB). The loop is pipelined over `STAGES` = 8 blocks, with asynchronous copies into 7 KiB of shared
memory a program; a chunk of 128 MiB has 1024 leaves, 7 an SM: about 50 KB. Some 90 instructions a KiB,
64 registers and 8 KiB of shared memory let 20 to 28 programs share an SM, and leave the bandwidth of
memory the limit: an SM that starts 4 instructions a cycle takes in about 45 bytes in each.

Leaves are found by a table of addresses, so a chunk of many tensors is one launch. Those that span tensors,
or lie at no multiple of 4, are joined first, at most `MAX_LAUNCH_BYTES` at once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
import xxhash

from rfork.image.xxh3_torch import (
    BLOCK_BYTES,
    HIGH_OFFSET,
    LAST_OFFSET,
    LOW_OFFSET,
    MAX_SHORT_INPUT,
    PRIME64_1,
    PRIME64_2,
    SECRET,
    START,
    aligned_leaves,
    canonical,
    to_int64,
)

STAGES = 8
MAX_LAUNCH_BYTES = 64 << 20
ALIGNMENT, WIDE_ALIGNMENT = 4, 16
"""What a leaf's address is a multiple of, at least, and where the widest loads are used."""
TAIL_STRIPE_BYTES = 64

Run = tuple[int, int]
"""An address, and how many leaves lie there one behind the other."""

# The head of the kernel's table, as int64 words: the secret, the keys of the last stripe, those of the two
# merges, and what the accumulators begin with.
HEAD = torch.tensor(
    [
        *struct.unpack("<24q", SECRET),
        *struct.unpack_from("<8q", SECRET, LAST_OFFSET),
        *struct.unpack_from("<8q", SECRET, LOW_OFFSET),
        *struct.unpack_from("<8q", SECRET, HIGH_OFFSET),
        *map(to_int64, START),
    ]
)


def leaf_hashes(pieces: Sequence[torch.Tensor], leaf_bytes: int) -> bytes:
    """As `rfork.image.xxh3_torch.leaf_hashes`, on the current stream; waits for its own work alone."""
    length = sum(piece.numel() for piece in pieces)
    count, rest = divmod(length, leaf_bytes)
    with torch.cuda.device_of(pieces[0]):  # type: ignore[no-untyped-call]
        hashes = pieces[0].new_empty(count + (rest > MAX_SHORT_INPUT), 2, dtype=torch.int64)
        done = 0
        for runs in _groups(pieces, length - rest, leaf_bytes):
            found = sum(leaves for _, leaves in runs)
            _launch(runs, hashes[done : done + found], leaf_bytes, leaf_bytes - TAIL_STRIPE_BYTES)
            done += found
        short = b""
        if rest:
            (last,) = aligned_leaves(pieces, [length - rest, length])
            if rest > MAX_SHORT_INPUT:
                # Its last 64 bytes may be at an odd address: once more behind it, they are not.
                padding_start = -(-rest // WIDE_ALIGNMENT) * WIDE_ALIGNMENT
                padded = last.new_empty(padding_start + TAIL_STRIPE_BYTES)
                padded[:rest] = last
                padded[padding_start:] = last[rest - TAIL_STRIPE_BYTES :]
                _launch([(padded.data_ptr(), 1)], hashes[count:], rest, padding_start)
            else:
                short = xxhash.xxh3_128_digest(bytes(last.tolist()))
        return canonical(_to_host(hashes)) + short


def _groups(pieces: Sequence[torch.Tensor], total_bytes: int, leaf_bytes: int) -> Iterator[list[Run]]:
    """The leaves of the first `total_bytes` bytes, in order, as runs to hash in one launch each time.

    What was joined for them is kept until the next is asked for; what is joined then may lie in the same
    memory, as the stream takes it in later.
    """
    max_bytes = max(MAX_LAUNCH_BYTES // leaf_bytes, 1) * leaf_bytes
    runs: list[Run] = []
    joined: list[torch.Tensor] = []
    parts: list[torch.Tensor] = []  # of a run that is to be joined
    remaining = max_bytes

    def join() -> None:
        if parts:
            joined.append(torch.cat(parts))
            runs.append((joined[-1].data_ptr(), joined[-1].numel() // leaf_bytes))
            parts.clear()

    for part, readable in _parts(pieces, total_bytes, leaf_bytes):
        if readable:
            join()
            runs.append((part.data_ptr(), part.numel() // leaf_bytes))
            continue
        left = part
        while left.numel():
            parts.append(left[:remaining])
            remaining -= parts[-1].numel()
            left = left[parts[-1].numel() :]
            if not remaining:
                join()
                yield runs
                runs, remaining = [], max_bytes
                joined.clear()
    join()
    if runs:
        yield runs


def _parts(pieces: Sequence[torch.Tensor], total_bytes: int, leaf_bytes: int) -> Iterator[tuple[torch.Tensor, bool]]:
    """The first `total_bytes` bytes in order; of each part, whether it is leaves that the kernel can read there."""
    begin = 0
    for piece in pieces:
        kept = piece[: total_bytes - begin]
        size, before = kept.numel(), -begin % leaf_bytes
        begin += size
        leaves = max(size - before, 0) // leaf_bytes * leaf_bytes
        if leaves and (kept.data_ptr() + before) % ALIGNMENT == 0:
            yield kept[:before], False
            yield kept[before : before + leaves], True
            yield kept[before + leaves :], False
        else:
            yield kept, False


def _launch(runs: Sequence[Run], hashes: torch.Tensor, length: int, last: int) -> None:
    """Hash the leaves of `length` bytes of these runs; their last stripe begins at their byte `last`."""
    starts = to_int64(length * PRIME64_1), to_int64(~(length * PRIME64_2))
    leaf_addresses = [torch.arange(address, address + leaves * length, length) for address, leaves in runs]
    table = torch.cat((HEAD, torch.tensor(starts), *leaf_addresses))
    if hashes.device.type == "cuda":
        table = table.pin_memory().to(hashes.device, non_blocking=True)
    _hash_leaves[(len(hashes),)](
        table,
        hashes,
        (length - 1) // BLOCK_BYTES,
        (length - 1) % BLOCK_BYTES // TAIL_STRIPE_BYTES,
        last,
        WIDE=all(address % WIDE_ALIGNMENT == 0 for address, _ in runs),
        STAGES=STAGES,
        num_warps=1,
    )


def _to_host(hashes: torch.Tensor) -> torch.Tensor:
    if hashes.device.type != "cuda":
        return hashes
    host = torch.empty(hashes.shape, dtype=hashes.dtype, pin_memory=True)
    host.copy_(hashes, non_blocking=True)
    # An event, and not the stream, where others may have queued more by now; one that lets the thread sleep.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    event.synchronize()
    return host


@triton.jit(do_not_specialize=["blocks", "stripes", "last"])  # type: ignore[untyped-decorator]
def _hash_leaves(  # type: ignore[no-untyped-def]
    table, hashes, blocks, stripes, last, WIDE: tl.constexpr, STAGES: tl.constexpr
):
    """One leaf: `blocks` blocks of 16 stripes, then `stripes` stripes, then the 64 bytes at byte `last`.

    table: int64 [24 + 8 + 8 + 8 + 8 + 2 + leaves], see `HEAD`. hashes: int64 [leaves, (high, low)].
    Accumulators are two tensors, of the even and of the odd lanes, as each lane's word is added to its
    neighbour.
    """
    leaf = tl.program_id(0)
    table = table.to(tl.pointer_type(tl.uint64))
    address = tl.load(table + 58 + leaf)
    words = address.to(tl.pointer_type(tl.uint32))  # in halves, so that 4 bytes are alignment enough
    if WIDE:
        words = tl.multiple_of(words, 16)
    rows = tl.arange(0, 16)[:, None]
    columns = tl.arange(0, 16)[None, :]
    pairs = 2 * tl.arange(0, 4)
    even_keys = tl.load(table + rows + pairs[None, :])
    odd_keys = tl.load(table + rows + pairs[None, :] + 1)
    even_scramble = tl.load(table + 16 + pairs)
    odd_scramble = tl.load(table + 17 + pairs)
    even = tl.load(table + 48 + pairs)
    odd = tl.load(table + 49 + pairs)

    for block in tl.range(0, blocks, num_stages=STAGES):
        halves = tl.load(words + block * 256 + rows * 16 + columns)
        even, odd = _accumulate(even, odd, halves, even_keys, odd_keys, 16)
        even = (even ^ (even >> 47) ^ even_scramble) * 0x9E3779B1
        odd = (odd ^ (odd >> 47) ^ odd_scramble) * 0x9E3779B1

    # A stripe of zeros under keys of zero adds nothing.
    halves = tl.load(words + blocks * 256 + rows * 16 + columns, rows < stripes, 0)
    even_keys = tl.where(rows < stripes, even_keys, 0)
    odd_keys = tl.where(rows < stripes, odd_keys, 0)
    even, odd = _accumulate(even, odd, halves, even_keys, odd_keys, 16)
    halves = tl.load(words + last // 4 + columns)
    even_keys = tl.load(table + 24 + pairs)[None, :]
    odd_keys = tl.load(table + 25 + pairs)[None, :]
    even, odd = _accumulate(even, odd, halves, even_keys, odd_keys, 1)

    low = tl.load(table + 56) + _merge(even, odd, table + 32 + pairs)
    high = tl.load(table + 57) + _merge(even, odd, table + 40 + pairs)
    tl.store(hashes + 2 * leaf, _avalanche(high).to(tl.int64, bitcast=True))
    tl.store(hashes + 2 * leaf + 1, _avalanche(low).to(tl.int64, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _accumulate(even, odd, halves, even_keys, odd_keys, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add stripes: halves [ROWS, 16] of 32 bits, keys [ROWS, 4] -> accumulators [4] of each kind."""
    lower, upper = tl.split(tl.reshape(halves, (ROWS, 8, 2)))
    left, right = tl.split(tl.reshape(lower.to(tl.uint64) | (upper.to(tl.uint64) << 32), (ROWS, 4, 2)))
    one, other = left ^ even_keys, right ^ odd_keys
    even += tl.sum((one & 0xFFFFFFFF) * (one >> 32) + right, 0)
    odd += tl.sum((other & 0xFFFFFFFF) * (other >> 32) + left, 0)
    return even, odd


@triton.jit
def _merge(even, odd, keys):  # type: ignore[no-untyped-def]
    """The sum of each pair's 128-bit product, its upper half xor its lower."""
    left, right = even ^ tl.load(keys), odd ^ tl.load(keys + 1)
    return tl.sum(tl.umulhi(left, right) ^ (left * right), 0)


@triton.jit
def _avalanche(total):  # type: ignore[no-untyped-def]
    total = (total ^ (total >> 37)) * 0x165667919E3779F9
    return total ^ (total >> 32)

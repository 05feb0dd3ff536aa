"""XXH3-128 (seed 0) of many leaves at once in one Triton kernel that reads each byte once. Needs `triton`.

The algorithm is that for inputs longer than 240 bytes in https://github.com/Cyan4973/xxHash
(``XXH3_hashLong_128b``, doc/xxhash_spec.md). Eight 64-bit accumulators consume stripes of 64 bytes; after
each block of 16 stripes they are scrambled.

One program, of a single warp, hashes one leaf, a block of 1 KiB per step: each of 32 threads loads twice 16
bytes, multiplies them with their keys, and sums over the 16 stripes by shuffles, so warps never wait for each
other. Only the scramble is sequential.

**Bytes in flight** limit the speed, as a single warp waits 0.6 to 0.9 us for memory. By Little's law the
kernel needs bandwidth x latency: 1.2 MB on an A100 (11 KB per SM), 2 to 3 MB on an H100 or H200 (15 to 25
KB), 6 MB on a B200 (45 KB). The loop is pipelined over `STAGES` = 8 blocks, with asynchronous copies into 7
KiB of shared memory per program; a chunk of 128 MiB has 1024 leaves, 7 per SM: about 50 KB. With some 90
instructions per KiB, 64 registers and 8 KiB of shared memory, 20 to 28 programs share an SM, and memory
bandwidth stays the limit: an SM that issues 4 instructions per cycle consumes about 45 bytes in each.

Leaves are addressed by a table, so a chunk of many tensors is one launch. Leaves that span tensors, or whose
address is not a multiple of 4, are joined first by a second kernel: see `rfork.image.leaf_plan`.
"""

from __future__ import annotations

import struct
import threading

import numpy as np
import torch
import triton
import triton.language as tl
import xxhash

from rfork.image.leaf_plan import LeafPlan

SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
START = (PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1)
"""Initial values of the accumulators."""
LAST_OFFSET, LOW_OFFSET, HIGH_OFFSET = len(SECRET) - 64 - 7, 11, len(SECRET) - 64 - 11
"""Offsets in the secret of the keys for the last 64 bytes and for both merges."""
WORD_BYTES = 8
STAGES = 8
GATHER_BYTES = 4096
"""Bytes that one program copies."""
MIN_STAGING_WORDS = 8192
"""Enough for a chunk of 256 MiB in one run of memory."""


def to_int64(value: int) -> int:
    """Return the int64 with the bits of `value` modulo 2^64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


HEAD = np.array(
    [
        *struct.unpack("<24q", SECRET),
        *struct.unpack_from("<8q", SECRET, LAST_OFFSET),
        *struct.unpack_from("<8q", SECRET, LOW_OFFSET),
        *struct.unpack_from("<8q", SECRET, HIGH_OFFSET),
        *map(to_int64, START),
    ],
    dtype=np.int64,
)
"""Head of the kernels' table: the secret, the keys of the last stripe, those of both merges, the accumulators."""


class _Staging(threading.local):
    """Host memory of a thread for tables and hashes, int64, pinned on CUDA: to pin memory takes longer than to hash."""

    def __init__(self) -> None:
        self._words: torch.Tensor | None = None

    def acquire(self, words: int, device: torch.device) -> torch.Tensor:
        """Return at least this number of words. The caller releases them if no copy of them is in progress."""
        acquired, self._words = self._words, None
        if acquired is None or len(acquired) < words:
            size = max(1 << (words - 1).bit_length(), MIN_STAGING_WORDS)
            acquired = torch.empty(size, dtype=torch.int64, pin_memory=device.type == "cuda")
        return acquired

    def release(self, words: torch.Tensor) -> None:
        """Keep them for the next call of this thread."""
        self._words = words


_staging = _Staging()


def leaf_hashes(plan: LeafPlan, device: torch.device) -> bytes:
    """See `rfork.image.digest.HashLeaves`. On the current device and stream; waits only for its own work."""
    leaves = len(plan.addresses)
    columns = HEAD, plan.addresses, plan.range_begins, plan.range_bases
    table_end = sum(map(len, columns))
    table_words = _aligned(table_end)
    result_words = _aligned(2 * leaves + -(-plan.short_bytes // WORD_BYTES))
    sizes = [table_words, result_words, -(-plan.scratch_bytes // WORD_BYTES)]
    table, results, scratch = torch.split(torch.empty(sum(sizes), dtype=torch.int64, device=device), sizes)

    staging = _staging.acquire(table_words + result_words, device)
    words = staging.numpy()
    np.concatenate(columns, out=words[:table_end])
    words[len(HEAD) : len(HEAD) + leaves][plan.gathered] += scratch.data_ptr()
    table.copy_(staging[:table_words], non_blocking=True)
    for launch in plan.launches:
        if launch.gather_begin < launch.gather_end:
            _gather(plan, table, scratch, launch.gather_begin, launch.gather_end)
        _hash_leaves[(launch.leaves,)](
            table,
            results,
            launch.first,
            launch.leaf_bytes,
            launch.last_stripe,
            WIDE=plan.is_wide,
            STAGES=STAGES,
            num_warps=1,
        )
    if plan.short_bytes:
        gathered_bytes = int(plan.range_begins[-1])
        _gather(plan, table, results[2 * leaves :], gathered_bytes - plan.short_bytes, gathered_bytes)
    staging[table_words : table_words + result_words].copy_(results, non_blocking=True)
    if device.type == "cuda":
        # An event instead of the stream, which may have more work queued by now; blocking, so that the thread
        # sleeps.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        event.synchronize()
    hashes_end = table_words + 2 * leaves
    hashes = words[table_words:hashes_end].astype(">i8").tobytes()  # the canonical form is big-endian
    short = words[hashes_end:].view(np.uint8)[: plan.short_bytes].tobytes()
    _staging.release(staging)
    return hashes + (xxhash.xxh3_128_digest(short) if short else b"")


def _aligned(words: int) -> int:
    """Return the number of words after which a kernel's argument has the alignment that it was compiled for."""
    return -(-words // 2) * 2


def _gather(plan: LeafPlan, table: torch.Tensor, target: torch.Tensor, begin: int, end: int) -> None:
    """Copy gathered bytes [begin, end) to the target."""
    _copy_ranges[(-(-(end - begin) // GATHER_BYTES),)](
        table,
        target,
        len(HEAD) + len(plan.addresses),
        len(plan.range_bases),
        begin,
        end,
        BYTES=GATHER_BYTES,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["first", "length", "last"])  # type: ignore[untyped-decorator]
def _hash_leaves(  # type: ignore[no-untyped-def]
    table, hashes, first, length, last, WIDE: tl.constexpr, STAGES: tl.constexpr
):
    """Hash one leaf: blocks of 16 stripes of 64 bytes, then the remaining stripes, then the 64 bytes at byte `last`.

    table: int64 [24 + 8 + 8 + 8 + 8 + leaves], see `HEAD`. hashes: int64 [leaves, (high, low)]. first: leaf of
    program 0. length: number of bytes of the leaf, more than 240. The accumulators are two tensors, of even
    and odd lanes, because each lane's word is added to its neighbour.
    """
    leaf = first + tl.program_id(0)
    blocks = (length - 1) // 1024
    stripes = (length - 1) % 1024 // 64
    table = table.to(tl.pointer_type(tl.uint64))
    address = tl.load(table + 56 + leaf)
    words = address.to(tl.pointer_type(tl.uint32))  # as 32-bit halves, so that an alignment of 4 bytes suffices
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

    # A stripe of zeros with zero keys adds nothing.
    halves = tl.load(words + blocks * 256 + rows * 16 + columns, rows < stripes, 0)
    even_keys = tl.where(rows < stripes, even_keys, 0)
    odd_keys = tl.where(rows < stripes, odd_keys, 0)
    even, odd = _accumulate(even, odd, halves, even_keys, odd_keys, 16)
    halves = tl.load(words + last // 4 + columns)
    even_keys = tl.load(table + 24 + pairs)[None, :]
    odd_keys = tl.load(table + 25 + pairs)[None, :]
    even, odd = _accumulate(even, odd, halves, even_keys, odd_keys, 1)

    length = length.to(tl.uint64)
    low = length * 0x9E3779B185EBCA87 + _merge(even, odd, table + 32 + pairs)
    high = (length * 0xC2B2AE3D27D4EB4F ^ 0xFFFFFFFFFFFFFFFF) + _merge(even, odd, table + 40 + pairs)
    tl.store(hashes + 2 * leaf, _avalanche(high).to(tl.int64, bitcast=True))
    tl.store(hashes + 2 * leaf + 1, _avalanche(low).to(tl.int64, bitcast=True))


@triton.jit  # type: ignore[untyped-decorator]
def _accumulate(even, odd, halves, even_keys, odd_keys, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add stripes: halves [ROWS, 16] of 32 bits, keys [ROWS, 4] -> accumulators [4], even and odd."""
    lower, upper = tl.split(tl.reshape(halves, (ROWS, 8, 2)))
    left, right = tl.split(tl.reshape(lower.to(tl.uint64) | (upper.to(tl.uint64) << 32), (ROWS, 4, 2)))
    one, other = left ^ even_keys, right ^ odd_keys
    even += tl.sum((one & 0xFFFFFFFF) * (one >> 32) + right, 0)
    odd += tl.sum((other & 0xFFFFFFFF) * (other >> 32) + left, 0)
    return even, odd


@triton.jit
def _merge(even, odd, keys):  # type: ignore[no-untyped-def]
    """Return the sum over pairs of the 128-bit product's upper half xor its lower half."""
    left, right = even ^ tl.load(keys), odd ^ tl.load(keys + 1)
    return tl.sum(tl.umulhi(left, right) ^ (left * right), 0)


@triton.jit
def _avalanche(total):  # type: ignore[no-untyped-def]
    total = (total ^ (total >> 37)) * 0x165667919E3779F9
    return total ^ (total >> 32)


@triton.jit(do_not_specialize=["ranges_at", "ranges", "begin", "end"])  # type: ignore[untyped-decorator]
def _copy_ranges(  # type: ignore[no-untyped-def]
    table, target, ranges_at, ranges, begin, end, BYTES: tl.constexpr
):
    """Copy `BYTES` gathered bytes, of `[begin, end)`, whose first goes to `target`.

    table: int64, from `ranges_at`: begins of the ranges in the gathered bytes [ranges + 1], then their
    addresses minus their begins [ranges].
    """
    begins = table + ranges_at
    bases = begins + ranges + 1
    at = (begin + tl.program_id(0) * BYTES).to(tl.int64)
    stop = tl.minimum(at + BYTES, end)
    index = ranges_at * 0
    above = ranges
    while above - index > 1:
        middle = (index + above) // 2
        is_before = tl.load(begins + middle) <= at
        index = tl.where(is_before, middle, index)
        above = tl.where(is_before, above, middle)
    target_base = target.to(tl.int64) - begin
    while at < stop:
        range_stop = tl.minimum(tl.load(begins + index + 1), stop)
        size = range_stop - at
        source_address = tl.load(bases + index) + at
        target_address = target_base + at
        if (source_address | target_address | size) & 3 == 0:
            words = tl.arange(0, BYTES // 4)
            source = source_address.to(tl.pointer_type(tl.uint32)) + words
            kept = words < size // 4
            tl.store(target_address.to(tl.pointer_type(tl.uint32)) + words, tl.load(source, kept), kept)
        else:
            for done in range(0, size, BYTES // 4):  # not all at once: that would need twice the registers
                offsets = done + tl.arange(0, BYTES // 4)
                source = source_address.to(tl.pointer_type(tl.uint8)) + offsets
                kept = offsets < size
                tl.store(target_address.to(tl.pointer_type(tl.uint8)) + offsets, tl.load(source, kept), kept)
        at = range_stop
        index += 1

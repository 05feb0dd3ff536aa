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
address is not a multiple of 4, are joined first, at most `MAX_LAUNCH_BYTES` at a time.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
import xxhash

from rfork.image.host_memory import host_view

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
BLOCK_BYTES = 1024
MAX_SHORT_INPUT = 240
"""Maximum number of bytes for which XXH3 has other formulas; they are hashed on the host."""

STAGES = 8
MAX_LAUNCH_BYTES = 64 << 20
ALIGNMENT, WIDE_ALIGNMENT = 4, 16
"""Minimum alignment of a leaf's address, and the alignment at which the widest loads are used."""
TAIL_STRIPE_BYTES = 64

Run = tuple[int, int]
"""Address and number of consecutive leaves."""


def to_int64(value: int) -> int:
    """Return the int64 with the bits of `value` modulo 2^64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value


# Head of the kernel's table, as int64 words: the secret, the keys of the last stripe, those of the two
# merges, and the initial accumulators.
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
    """See `rfork.image.digest.HashLeaves`. On the current stream; waits only for its own work."""
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
            (last,) = _aligned_leaves(pieces, [length - rest, length])
            if rest > MAX_SHORT_INPUT:
                # The last 64 bytes may be at an odd address, so an aligned copy of them is appended.
                padding_start = -(-rest // WIDE_ALIGNMENT) * WIDE_ALIGNMENT
                padded = last.new_empty(padding_start + TAIL_STRIPE_BYTES)
                padded[:rest] = last
                padded[padding_start:] = last[rest - TAIL_STRIPE_BYTES :]
                _launch([(padded.data_ptr(), 1)], hashes[count:], rest, padding_start)
            else:
                short = xxhash.xxh3_128_digest(bytes(last.tolist()))
        return _canonical(_to_host(hashes)) + short


def _aligned_leaves(pieces: Sequence[torch.Tensor], bounds: Sequence[int]) -> Iterator[torch.Tensor]:
    """Return the bytes between consecutive bounds as tensors aligned to 8 bytes, copied if necessary."""
    begin = 0
    remaining = iter(pieces)
    piece = next(remaining)
    for low, high in pairwise(bounds):
        parts: list[torch.Tensor] = []
        while low < high:
            while begin + piece.numel() <= low:
                begin, piece = begin + piece.numel(), next(remaining)
            part = piece[low - begin : high - begin]
            parts.append(part)
            low += part.numel()
        if len(parts) == 1 and parts[0].data_ptr() % 8 == 0 and parts[0].storage_offset() % 8 == 0:
            yield parts[0]
        else:
            yield torch.cat(parts)


def _groups(pieces: Sequence[torch.Tensor], total_bytes: int, leaf_bytes: int) -> Iterator[list[Run]]:
    """Yield the leaves of the first `total_bytes` bytes, in order, as runs for one launch each.

    Joined tensors are kept until the next group is requested. Tensors joined later may reuse their memory,
    because the stream processes them later.
    """
    max_bytes = max(MAX_LAUNCH_BYTES // leaf_bytes, 1) * leaf_bytes
    runs: list[Run] = []
    joined: list[torch.Tensor] = []
    parts: list[torch.Tensor] = []  # of a run to be joined
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
    """Yield the first `total_bytes` bytes in order, each part with whether the kernel can read it in place."""
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
    """Hash the leaves of `length` bytes of these runs; their last stripe starts at byte `last`."""
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
    # An event instead of the stream, which may have more work queued by now; blocking, so that the thread
    # sleeps.
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    event.synchronize()
    return host


def _canonical(hashes: torch.Tensor) -> bytes:
    """Return hashes [leaves, (high, low)] (int64, CPU) as joined canonical big-endian bytes."""
    words = array("q")
    words.frombytes(host_view(hashes.data_ptr(), hashes.numel() * words.itemsize))
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


@triton.jit(do_not_specialize=["blocks", "stripes", "last"])  # type: ignore[untyped-decorator]
def _hash_leaves(  # type: ignore[no-untyped-def]
    table, hashes, blocks, stripes, last, WIDE: tl.constexpr, STAGES: tl.constexpr
):
    """Hash one leaf: `blocks` blocks of 16 stripes, then `stripes` stripes, then the 64 bytes at byte `last`.

    table: int64 [24 + 8 + 8 + 8 + 8 + 2 + leaves], see `HEAD`. hashes: int64 [leaves, (high, low)]. The
    accumulators are two tensors, of even and odd lanes, because each lane's word is added to its neighbour.
    """
    leaf = tl.program_id(0)
    table = table.to(tl.pointer_type(tl.uint64))
    address = tl.load(table + 58 + leaf)
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

    low = tl.load(table + 56) + _merge(even, odd, table + 32 + pairs)
    high = tl.load(table + 57) + _merge(even, odd, table + 40 + pairs)
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

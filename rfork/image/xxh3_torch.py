"""XXH3-128 (seed 0) of many leaves at once, in plain int64 tensor operations on the tensors' device.

The algorithm is that for inputs longer than 240 bytes in https://github.com/Cyan4973/xxHash
(``XXH3_hashLong_128b``, doc/xxhash_spec.md). Eight 64-bit accumulators consume stripes of 64 bytes; after
each block of 16 stripes they are scrambled. The sum of a block does not depend on the accumulators, so all
blocks of all leaves are summed in parallel, and only the scramble runs block by block, for all leaves
together. int64 wraps like uint64; a logical right shift is an arithmetic one with a mask.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
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
AVALANCHE = 0x165667919E3779F9
START = (PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1)
"""Initial values of the accumulators."""
LAST_OFFSET, LOW_OFFSET, HIGH_OFFSET = len(SECRET) - 64 - 7, 11, len(SECRET) - 64 - 11
"""Offsets in the secret of the keys for the last 64 bytes and for both merges."""

STRIPE_WORDS, BLOCK_STRIPES, BLOCK_BYTES = 8, 16, 1024
LOW32 = 0xFFFFFFFF
MAX_SHORT_INPUT = 240
SLAB_BYTES = 64 << 20
"""Bytes processed at once, which limits temporary memory to about twice this."""


def leaf_hashes(pieces: Sequence[torch.Tensor], leaf_bytes: int) -> bytes:
    """Return the joined canonical XXH3-128 of each leaf of the pieces (uint8, 1-D, one device), in order.

    `leaf_bytes` is a multiple of 1024. A last leaf of at most 240 bytes, for which XXH3 has other formulas,
    is hashed on the host.
    """
    length = sum(piece.numel() for piece in pieces)
    aligned_length = length // leaf_bytes * leaf_bytes
    hashes = b""
    if aligned_length:
        sums: list[_Accumulators] = []
        step = max(SLAB_BYTES // leaf_bytes, 1) * leaf_bytes
        for slab in aligned_leaves(
            pieces, [min(begin, aligned_length) for begin in range(0, aligned_length + step, step)]
        ):
            sums.append(_sums(slab.view(-1, leaf_bytes)))
        hashes += _finish(_Accumulators.join(sums), leaf_bytes)
    if aligned_length < length:
        (rest,) = aligned_leaves(pieces, [aligned_length, length])
        if rest.numel() <= MAX_SHORT_INPUT:
            hashes += xxhash.xxh3_128_digest(bytes(rest.tolist()))
        else:
            hashes += _finish(_sums(rest.view(1, -1)), rest.numel())
    return hashes


def aligned_leaves(pieces: Sequence[torch.Tensor], bounds: Sequence[int]) -> Iterator[torch.Tensor]:
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


class _Accumulators:
    """Sums that the blocks of equally long leaves add to their accumulators."""

    def __init__(self, blocks: torch.Tensor, tail: torch.Tensor) -> None:
        self.blocks = blocks  # [full blocks, leaves, 8]
        self.tail = tail  # [leaves, 8]: the stripes after the last full block, and the last 64 bytes

    @classmethod
    def join(cls, parts: Sequence[_Accumulators]) -> _Accumulators:
        if len(parts) == 1:
            return parts[0]
        return cls(torch.cat([part.blocks for part in parts], 1), torch.cat([part.tail for part in parts]))


def _sums(leaves: torch.Tensor) -> _Accumulators:
    """Return the sums of leaves [leaves, bytes]. Several leaves require that bytes is a multiple of 8."""
    count, length = leaves.shape
    words = leaves.reshape(-1)[: count * (length // 8 * 8)].view(torch.int64).view(count, -1)
    # In a last leaf, these 64 bytes may not be aligned to 8 bytes.
    last = leaves[:, length - 64 :].clone(memory_format=torch.contiguous_format).view(torch.int64)
    blocks = (length - 1) // BLOCK_BYTES
    stripes = (length - 1) % BLOCK_BYTES // 64
    cut = blocks * BLOCK_STRIPES * STRIPE_WORDS
    keys = _keys(0, BLOCK_STRIPES, leaves.device)
    full = _accumulate(words[:, :cut].view(count, blocks, BLOCK_STRIPES, STRIPE_WORDS), keys)
    tail = _accumulate(last.view(count, 1, STRIPE_WORDS), _keys(LAST_OFFSET, 1, leaves.device))
    if stripes:
        rest = words[:, cut : cut + stripes * STRIPE_WORDS].view(count, stripes, STRIPE_WORDS)
        tail += _accumulate(rest, keys[:stripes])
    return _Accumulators(full.transpose(0, 1).contiguous(), tail)


def _accumulate(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return what stripes add to the accumulators: words [..., stripes, 8], keys [stripes, 8] -> [..., 8]."""
    low = words ^ keys
    high = (low >> 32).bitwise_and_(LOW32)
    products = low.bitwise_and_(LOW32).mul_(high)
    total = products.sum(-2)
    plain = words.sum(-2)
    total[..., 0::2] += plain[..., 1::2]
    total[..., 1::2] += plain[..., 0::2]
    return total


def _finish(sums: _Accumulators, length: int) -> bytes:
    """Return the hashes of leaves of `length` bytes from their sums."""
    device = sums.tail.device
    accumulators = torch.tensor([to_int64(value) for value in START], device=device).repeat(len(sums.tail), 1)
    keys = _keys(len(SECRET) - 64, 1, device)[0]
    for block in sums.blocks:
        accumulators += block
        accumulators ^= _shift_right(accumulators, 47)
        accumulators ^= keys
        accumulators *= PRIME32_1
    accumulators += sums.tail
    low = _merge(accumulators, LOW_OFFSET, length * PRIME64_1)
    high = _merge(accumulators, HIGH_OFFSET, ~(length * PRIME64_2))
    return canonical(torch.stack((high, low), 1).cpu())


def canonical(hashes: torch.Tensor) -> bytes:
    """Return hashes [leaves, (high, low)] (int64, CPU) as joined canonical big-endian bytes."""
    words = array("q")
    words.frombytes(host_view(hashes.data_ptr(), hashes.numel() * words.itemsize))
    if sys.byteorder == "little":
        words.byteswap()
    return words.tobytes()


def _merge(accumulators: torch.Tensor, offset: int, start: int) -> torch.Tensor:
    """XXH3_mergeAccs: accumulators [leaves, 8] -> [leaves]."""
    keyed = accumulators ^ _keys(offset, 1, accumulators.device)[0]
    total = _multiply_and_fold(keyed[:, 0::2], keyed[:, 1::2]).sum(1) + to_int64(start)
    total ^= _shift_right(total, 37)
    total *= to_int64(AVALANCHE)
    return total ^ _shift_right(total, 32)


def _multiply_and_fold(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the upper half of the 128-bit product xor its lower half, by 32-bit limbs."""
    left_low, left_high = left & LOW32, _shift_right(left, 32)
    right_low, right_high = right & LOW32, _shift_right(right, 32)
    bottom, inner = left_low * right_low, left_high * right_low
    cross = _shift_right(bottom, 32) + (inner & LOW32) + left_low * right_high
    upper = _shift_right(inner, 32) + _shift_right(cross, 32) + left_high * right_high
    return upper ^ (left * right)


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _keys(offset: int, stripes: int, device: torch.device) -> torch.Tensor:
    """Return the secret's words for `stripes` stripes from byte `offset`: [stripes, 8]; each starts 8 bytes later."""
    rows = [struct.unpack_from("<8q", SECRET, offset + 8 * stripe) for stripe in range(stripes)]
    return torch.tensor(rows, dtype=torch.int64, device=device)


def to_int64(value: int) -> int:
    """Return the int64 with the bits of `value` modulo 2^64."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value

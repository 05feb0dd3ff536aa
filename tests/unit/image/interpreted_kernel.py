"""Compares the digest kernels under Triton's interpreter with xxhash. Run with TRITON_INTERPRET=1.

Runs as a separate process, because Triton decides at import whether kernels are interpreted. Prints each case
that differs.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import xxhash

from rfork.image.digest import LEAF_BYTES, self_test
from rfork.image.leaf_plan import MAX_SCRATCH_BYTES, leaf_plan
from rfork.image.xxh3_triton import leaf_hashes

CPU = torch.device("cpu")
SMALL = 2048
LENGTHS = [0, 1, 240, 241, 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 7001]
CUTS = [[1, 4999, 2, 6000], [2048, 2052, 8900, 2], [3] * 2000, [0, 5000, 0, 0, 4000, 0]]
RANDOM_CASES = 12


def noise(length: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def cases() -> Iterator[tuple[str, Sequence[torch.Tensor], int]]:
    """Yield a description, the pieces and the leaf size of each case."""
    for length in LENGTHS:
        for shift in (0, 1, 4, 8):
            yield f"{length} bytes at {shift}", [noise(length + shift)[shift:]], SMALL
    for sizes in CUTS:
        pieces = [piece.clone() for piece in torch.split(noise(sum(sizes)), sizes)]
        yield f"pieces of {sizes[:4]}", pieces, SMALL
    for value in (0, 255):
        yield f"leaves of {value}", [torch.full((LEAF_BYTES + 1000,), value, dtype=torch.uint8)], LEAF_BYTES
    for seed in range(RANDOM_CASES):
        yield f"random pieces {seed}", random_pieces(random.Random(seed)), random.Random(seed).choice((1024, SMALL))


def random_pieces(source: random.Random) -> list[torch.Tensor]:
    """Return a few pieces at addresses and with lengths of any alignment, and a last leaf of any length."""
    unit = source.choice((1, 4, 16))
    pieces: list[torch.Tensor] = []
    for _ in range(source.randint(1, 8)):
        length = unit * (source.choice((0, 1, 50, 300, 3000)) * source.randint(0, 2) // unit)
        shift = unit * source.randint(0, 3)
        pieces.append(noise(length + shift)[shift:])
    last_leaf = source.choice((0, source.randint(1, 240), source.randint(241, 1023)))
    missing = (last_leaf - sum(piece.numel() for piece in pieces)) % SMALL
    return [*pieces, noise(missing + 1)[1:]]


def differs(pieces: Sequence[torch.Tensor], leaf: int, scratch_bytes: int) -> bool:
    """Return whether the kernels' hashes differ from xxhash's."""
    content = bytes(torch.cat(list(pieces)).tolist())
    expected = [xxhash.xxh3_128_digest(content[low : low + leaf]) for low in range(0, len(content), leaf)]
    addresses = np.array([piece.data_ptr() for piece in pieces])
    lengths = np.array([piece.numel() for piece in pieces])
    return b"".join(expected) != leaf_hashes(leaf_plan(addresses, lengths, leaf, scratch_bytes), CPU)


def main() -> None:
    """Check all cases, joining few and many bytes at once."""
    self_test(leaf_hashes, CPU)
    for scratch_bytes in (MAX_SCRATCH_BYTES, 2 * SMALL):
        for name, pieces, leaf in cases():
            if (scratch_bytes > 2 * SMALL or len(pieces) > 1) and differs(pieces, leaf, scratch_bytes):
                print(name, "with a scratch buffer of", scratch_bytes)


if __name__ == "__main__":
    main()

"""Compares the digest kernel under Triton's interpreter with xxhash. Run with TRITON_INTERPRET=1.

Runs as a separate process, because Triton decides at import whether kernels are interpreted. Prints each case
that differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import xxhash

from rfork.image import xxh3_triton
from rfork.image.digest import LEAF_BYTES, self_test

SMALL = 2048
LENGTHS = [0, 1, 240, 241, 1023, 1024, 1025, 1087, 1088, 1089, 2047, 2048, 2049, 7001]
CUTS = [[1, 4999, 2, 6000], [2048, 2052, 8900, 2], [3] * 2000]


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


def differs(pieces: Sequence[torch.Tensor], leaf: int) -> bool:
    """Return whether the kernel's hashes differ from xxhash's."""
    content = bytes(torch.cat(list(pieces)).tolist())
    expected = [xxhash.xxh3_128_digest(content[low : low + leaf]) for low in range(0, len(content), leaf)]
    return b"".join(expected) != xxh3_triton.leaf_hashes(pieces, leaf)


def main() -> None:
    """Check all cases, joining few and many bytes at once."""
    self_test(xxh3_triton.leaf_hashes, torch.device("cpu"))
    for joined_bytes in (xxh3_triton.MAX_LAUNCH_BYTES, 2 * SMALL):
        xxh3_triton.MAX_LAUNCH_BYTES = joined_bytes
        for name, pieces, leaf in cases():
            if (joined_bytes > 2 * SMALL or len(pieces) > 1) and differs(pieces, leaf):
                print(name, "with", joined_bytes, "joined")


if __name__ == "__main__":
    main()

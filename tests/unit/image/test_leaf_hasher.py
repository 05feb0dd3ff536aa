"""Which code hashes leaves: nothing that gives wrong hashes, and no device without any."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from rfork.image import xxh3_device
from rfork.image.leaf_hasher import leaf_hasher, try_out

CPU = torch.device("cpu")


def test_torch_operations_pass_the_trial() -> None:
    """What takes the kernel's place gives the hashes that the kernel is held to."""
    try_out(xxh3_device.leaf_hashes, CPU)


def test_wrong_hashes_fail_the_trial() -> None:
    """One wrong bit in one of the hashes is enough."""

    def almost(pieces: Sequence[torch.Tensor], leaf_bytes: int) -> bytes:
        hashes = bytearray(xxh3_device.leaf_hashes(pieces, leaf_bytes))
        hashes[-1] ^= 1
        return bytes(hashes)

    with pytest.raises(RuntimeError, match="wrong hashes"):
        try_out(almost, CPU)


def test_a_device_has_one_hasher() -> None:
    """Whoever asks gets the same one; on the CPU it is made of torch operations."""
    hasher = leaf_hasher(CPU)
    assert (True, False) == (hasher is leaf_hasher(torch.device("cpu")), hasher.prepared())

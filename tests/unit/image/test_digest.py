"""The chunk digest is equal on every device, detects every tested error, and never uses a kernel with wrong hashes."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from rfork.image import digest
from rfork.image.digest import (
    DIGEST_BYTES,
    LEAF_BYTES,
    RunningDigest,
    digest_bytes,
    digest_plan,
    digest_views,
    gpu_kernel,
    hash_host_leaves,
    plan_of,
    self_test,
)
from rfork.image.leaf_plan import LeafPlan
from rfork.image.staging import CPU
from tests.unit.image.planned_leaves import planned_leaves

BOUNDARIES = [0, 1, 3, 8, 16, 17, 128, 129, 239, 240, 241, 255, 256, 257, 1023, 1024, 1025,
              1087, 1088, 1089, 2047, 2048, 2049, LEAF_BYTES - 1, LEAF_BYTES, LEAF_BYTES + 1,
              LEAF_BYTES + 241, 3 * LEAF_BYTES]  # fmt: skip


def noise(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def host(tensor: torch.Tensor) -> memoryview:
    return memoryview(bytes(tensor.tolist()))


def planned_hashes(plan: LeafPlan, device: torch.device) -> bytes:
    """Hash the leaves of host memory with xxhash."""
    assert CPU == device
    return b"".join(map(xxhash.xxh3_128_digest, planned_leaves(plan)))


def digest_tensors(pieces: Sequence[torch.Tensor]) -> bytes:
    """Return the digest that `planned_hashes` as kernel yields."""
    return digest_plan(plan_of(pieces, LEAF_BYTES), CPU, planned_hashes)


def reference_digest(data: bytes) -> bytes:
    """Return the digest computed directly from its definition."""
    leaves = [xxhash.xxh3_128_digest(data[at : at + LEAF_BYTES]) for at in range(0, len(data), LEAF_BYTES)]
    message = len(data).to_bytes(8, "little") + b"".join(leaves)
    return hashlib.blake2b(message, digest_size=16, person=b"rfork-chunk-v1").digest()


@pytest.mark.parametrize("length", BOUNDARIES)
def test_digests_match_the_definition(length: int) -> None:
    """They match at every boundary of the algorithm."""
    data = noise(length)
    expected = reference_digest(bytes(host(data)))
    assert expected == digest_bytes([host(data)])
    assert expected == digest_tensors([data])
    assert DIGEST_BYTES == len(expected)


@pytest.mark.parametrize("length", BOUNDARIES)
@pytest.mark.parametrize("step", [LEAF_BYTES, 2 * LEAF_BYTES])
def test_a_running_digest_equals_that_of_the_complete_bytes(length: int, step: int) -> None:
    """No piece may follow one that does not end at a leaf boundary."""
    data, state = bytes(host(noise(length))), RunningDigest()
    for low in range(0, length, step):
        state.update(memoryview(data)[low : low + step])
    assert reference_digest(data) == state.digest()
    if length % LEAF_BYTES:
        with pytest.raises(ValueError, match="only the last piece"):
            state.update(memoryview(b"x"))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 90_000), min_size=1, max_size=12), st.integers(0, 9), st.integers(0, 7))
def test_the_digest_does_not_depend_on_pieces(sizes: list[int], seed: int, shift: int) -> None:
    """For any split and address of the bytes, the digest is that of the complete bytes."""
    full = noise(sum(sizes) + shift, seed)[shift:]
    pieces = list(torch.split(full, sizes))
    expected = reference_digest(bytes(host(full)))
    assert expected == digest_bytes([host(piece) for piece in pieces])
    assert expected == digest_tensors(pieces)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300_000), st.integers(0, 99))
def test_the_hash_of_a_leaf_is_xxh3(length: int, seed: int) -> None:
    """The hash of a leaf is XXH3-128 for every length."""
    data = noise(length, seed)
    expected = [xxhash.xxh3_128_digest(host(data)[at : at + LEAF_BYTES]) for at in range(0, length, LEAF_BYTES)]
    assert b"".join(expected) == hash_host_leaves([host(data)], LEAF_BYTES)


def test_each_view_is_hashed_before_the_next_is_requested() -> None:
    """So a buffer may be reused for the next view."""
    data, buffer = bytes(host(noise(5 * LEAF_BYTES + 999))), bytearray(LEAF_BYTES + 7)

    def views() -> Iterator[memoryview]:
        for low in range(0, len(data), len(buffer)):
            part = data[low : low + len(buffer)]
            buffer[: len(part)] = part
            yield memoryview(buffer)[: len(part)]

    assert reference_digest(data) == digest_views(len(data), views())


def test_extreme_words_wrap_as_unsigned_ones() -> None:
    """All-ones and all-zero bytes, which have the longest carries, have the hashes of xxhash."""
    for value in (0, 255):
        data = torch.full((2 * LEAF_BYTES + 1000,), value, dtype=torch.uint8)
        assert digest_bytes([host(data)]) == digest_tensors([data])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 2 * LEAF_BYTES + 100), st.data())
def test_any_flipped_bit_changes_the_digest(length: int, data: st.DataObject) -> None:
    """One flipped bit anywhere is detected."""
    original = bytearray(host(noise(length)))
    changed = bytearray(original)
    changed[data.draw(st.integers(0, length - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert digest_bytes([memoryview(original)]) != digest_bytes([memoryview(changed)])


@pytest.mark.parametrize(
    ("one", "two", "size"),
    [
        pytest.param(0, 8, 8, id="neighbouring words"),
        pytest.param(0, 64, 8, id="words of one lane in two stripes"),
        pytest.param(0, 1024, 8, id="words at one position in two blocks"),
        pytest.param(0, LEAF_BYTES, 8, id="words at one position in two leaves"),
        pytest.param(0, 64, 64, id="stripes"),
        pytest.param(0, 1024, 1024, id="blocks"),
        pytest.param(0, LEAF_BYTES, LEAF_BYTES, id="leaves"),
    ],
)
def test_swapped_parts_change_the_digest(one: int, two: int, size: int) -> None:
    """Two swapped parts are detected at every level of the algorithm."""
    original = bytearray(host(noise(3 * LEAF_BYTES)))
    swapped = bytearray(original)
    swapped[one : one + size] = original[two : two + size]
    swapped[two : two + size] = original[one : one + size]
    assert digest_bytes([memoryview(original)]) != digest_bytes([memoryview(swapped)])


@pytest.mark.parametrize("length", [1, 241, LEAF_BYTES, LEAF_BYTES + 1])
def test_length_is_part_of_the_digest(length: int) -> None:
    """Zeros added or removed at the end are detected."""
    digests = {digest_bytes([memoryview(bytes(length + more))]) for more in (-1, 0, 1)}
    assert 3 == len(digests)


def test_digest_is_stable_across_releases() -> None:
    """The digest is part of the wire format: these values must never change."""
    assert "d09b4c7ca51c210b9b774ffcef3241c0" == digest_bytes([]).hex()
    assert "b923196e44753e9744b00450b2df040c" == digest_bytes([memoryview(bytes(range(256)) * 2048)]).hex()


def test_correct_hashes_pass_the_self_test() -> None:
    """A kernel that computes the hashes of xxhash is used."""
    self_test(planned_hashes, CPU)


def test_wrong_hashes_fail_the_self_test() -> None:
    """One wrong bit in one hash is enough."""

    def wrong_hashes(plan: LeafPlan, device: torch.device) -> bytes:
        hashes = bytearray(planned_hashes(plan, device))
        hashes[-1] ^= 1
        return bytes(hashes)

    with pytest.raises(RuntimeError, match="wrong hashes"):
        self_test(wrong_hashes, CPU)


class FailingKernelModule(ModuleType):
    """A kernel module whose import raises an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__("rfork.image.xxh3_triton")
        self._error = error

    def __getattr__(self, name: str) -> None:
        if name == "leaf_hashes":
            raise self._error
        raise AttributeError(name)


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [
        (ImportError("no triton"), False),
        (RuntimeError("0 active drivers"), True),
        (OSError("read-only"), True),
    ],
)
def test_a_kernel_that_cannot_be_imported_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, is_logged: bool
) -> None:
    """The host hashes whatever the import raises; a missing Triton is not logged as a warning."""
    monkeypatch.setitem(sys.modules, "rfork.image.xxh3_triton", FailingKernelModule(error))
    digest._kernel_of.cache_clear()
    kernel = gpu_kernel(torch.device("cuda", 0))
    assert kernel is gpu_kernel(torch.device("cuda", 0))
    assert not kernel.wait_until_ready()
    assert kernel.hash_leaves is None
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert is_logged == any("hash kernel failed" in message for message in warnings)

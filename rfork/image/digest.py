"""Digest of a chunk, equal on every device and computed at memory speed.

The bytes of a chunk are split into *leaves* of 128 KiB (the last may be shorter). Each leaf is hashed with
XXH3-128 (seed 0, canonical big-endian form). The digest is BLAKE2b (16 bytes, personalised with
``rfork-chunk-v1``) over the chunk's length (8 bytes, little-endian) and the leaves' hashes in order.

**Why XXH3.** A CPU core hashes 20 to 25 GB/s with it, so verification costs as much as reading the bytes once
more. CRC32C is as fast but has only 32 bits; BLAKE2b is far slower. The inner loop of XXH3 is a sum of 32 x
32 bit products, so a GPU computes the same result with one kernel that reads each byte once
(`rfork.image.xxh3_triton`).

**Why leaves.** Leaves are independent: a GPU hashes thousands in parallel, and within a leaf only one short
step per KiB is sequential. Leaves of 128 KiB cost a core about a tenth compared to one long stream; smaller
leaves cost more, larger ones leave a GPU idle.

**Guarantees.** One changed 8-byte word, and so any flipped bit, always changes a leaf's accumulators: each
word is added unchanged to the accumulator next to its own, and the scramble after each KiB is a bijection.
Each word is multiplied under a position-dependent key, the scramble is not commutative, and BLAKE2b binds the
order and number of leaves: swapped words, leaves or chunks, truncation and padding change the digest. For
errors that are independent of the hash, two different leaves share a hash with a probability of about 2^-128,
and so do two different chunks.

**Limits.** XXH3 is not cryptographic: an attacker who chooses the bytes can craft two leaves with one hash.
Lease tokens and TLS establish that a source can be trusted; this digest proves that the received bytes are
those in the source's manifest.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import numpy as np
import torch
import xxhash

from rfork.cuda.device import cuda_driver
from rfork.image.leaf_plan import LeafPlan, leaf_plan
from rfork.logs import logger

log = logger(__name__)

HashLeaves = Callable[[LeafPlan, torch.device], bytes]
"""Returns the joined canonical XXH3-128 of each leaf of a plan, whose memory is on this device, in order."""

SELF_TEST_LEAF_BYTES = 2048

_init_lock = threading.Lock()

DIGEST_BYTES = 16
LEAF_BYTES = 128 << 10
HASH_DOMAIN = b"rfork-chunk-v1"


class GpuKernel:
    """The hash kernel of one CUDA device. Thread-safe.

    It is compiled in the background, which takes a second or two unless this user's cache has it, and used only
    after it has computed correct hashes on this device. If it cannot be compiled or run, or its results are
    wrong, this is logged once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.hash_leaves: HashLeaves | None = None
        """The kernel, once it is ready: call it on the device's digest stream."""
        # Not a daemon thread: the process waits for the compilation at exit, or it would crash.
        self._preparing = threading.Thread(target=self._prepare, name="rfork-compile")
        self._preparing.start()

    def wait_until_ready(self) -> bool:
        """Wait until the kernel is ready or has failed. Returns True if it is used."""
        self._preparing.join()
        return self.hash_leaves is not None

    def _prepare(self) -> None:
        try:
            from rfork.image.xxh3_triton import leaf_hashes

            driver, index = cuda_driver(), self._device.index
            with driver.on_device(index), driver.streams(index).digest.as_torch_stream():
                self_test(leaf_hashes, self._device)
        except ImportError as error:
            log.debug("Triton not available, hashing on the host", reason=str(error))
            return
        except Exception as error:  # no compiler, an unsupported GPU or a bug: any exception is possible
            log.warning(
                "hash kernel failed, falling back to slower hashing on the host",
                device=str(self._device),
                reason=f"{type(error).__name__}: {error}",
            )
            return
        self.hash_leaves = leaf_hashes


@cache
def _kernel_of(index: int) -> GpuKernel:
    return GpuKernel(torch.device("cuda", index))


def gpu_kernel(device: torch.device) -> GpuKernel:
    """Return the hash kernel of a CUDA device of this process; its compilation may still be under way."""
    with _init_lock:  # two concurrent calls must not compile it twice
        return _kernel_of(device.index)


def self_test(hash_leaves: HashLeaves, device: torch.device) -> None:
    """Compare the hashes with xxhash's. Raises RuntimeError.

    Covers aligned and odd addresses, leaves that span pieces, and last leaves of at most and more than 240
    bytes, and so all that is compiled separately.
    """
    data = torch.arange(3 * SELF_TEST_LEAF_BYTES + 777).mul_(0x9E3779B1).bitwise_right_shift_(13).to(torch.uint8)
    device_data = data.to(device)
    gap_begin, gap_end = SELF_TEST_LEAF_BYTES + 1000, SELF_TEST_LEAF_BYTES + 1064
    for begin, end in ((0, len(data)), (4, len(data)), (5, len(data) - 700)):
        content = bytes(data[begin:gap_begin].tolist() + data[gap_end:end].tolist())
        expected = b"".join(
            xxhash.xxh3_128_digest(content[low : low + SELF_TEST_LEAF_BYTES])
            for low in range(0, len(content), SELF_TEST_LEAF_BYTES)
        )
        pieces = device_data[begin:gap_begin], device_data[gap_end:end]
        if expected != hash_leaves(plan_of(pieces, SELF_TEST_LEAF_BYTES), device):
            raise RuntimeError("the kernel computes wrong hashes")


def hash_host_leaves(views: Iterable[memoryview], leaf_bytes: int) -> bytes:
    """Return the joined canonical XXH3-128 of each leaf of some host views (format 'B'), in order.

    Each view is used before the next is requested.
    """
    leaves: list[bytes] = []
    leaf, leaf_remaining = xxhash.xxh3_128(), leaf_bytes  # of the current leaf: its state and its remaining bytes
    for view in views:
        size = len(view)
        if size < leaf_remaining:
            leaf.update(view)
            leaf_remaining -= size
            continue
        at = 0
        if leaf_remaining < leaf_bytes:
            leaf.update(view[:leaf_remaining])
            leaves.append(leaf.digest())
            leaf.reset()
            at = leaf_remaining
        rest = size - (size - at) % leaf_bytes
        leaves += [xxhash.xxh3_128_digest(view[low : low + leaf_bytes]) for low in range(at, rest, leaf_bytes)]
        leaf.update(view[rest:])
        leaf_remaining = leaf_bytes - (size - rest)
    if leaf_remaining < leaf_bytes:
        leaves.append(leaf.digest())
    return b"".join(leaves)


def digest_bytes(pieces: Sequence[memoryview]) -> bytes:
    """Return the digest of a chunk whose bytes are these host views (format 'B'), in order. Copies nothing."""
    return digest_views(sum(map(len, pieces)), pieces)


def digest_views(length: int, views: Iterable[memoryview]) -> bytes:
    """Like `digest_bytes`, for `length` bytes in views that are each used before the next is requested."""
    return _combine(length, hash_host_leaves(views, LEAF_BYTES))


class RunningDigest:
    """Digest of a chunk that arrives in pieces, for callers that cannot keep the complete chunk in memory.

    Each piece but the last is a multiple of `LEAF_BYTES`.
    """

    def __init__(self) -> None:
        self._leaves: list[bytes] = []
        self._length = 0

    def update(self, piece: memoryview) -> None:
        """Append host bytes (format 'B'). Raises ValueError after a piece that did not end at a leaf boundary."""
        if self._length % LEAF_BYTES:
            raise ValueError(f"only the last piece may have a size that is not a multiple of {LEAF_BYTES} bytes")
        self._leaves += [
            xxhash.xxh3_128_digest(piece[low : low + LEAF_BYTES]) for low in range(0, len(piece), LEAF_BYTES)
        ]
        self._length += len(piece)

    def digest(self) -> bytes:
        """Return the `digest_bytes` of all pieces."""
        return _combine(self._length, b"".join(self._leaves))


def digest_plan(plan: LeafPlan, device: torch.device, hash_leaves: HashLeaves) -> bytes:
    """Return the digest of a chunk by this plan, with leaves of `LEAF_BYTES`.

    Computed on the device, on this thread's current stream, and waited for: the host receives 16 bytes per leaf.
    """
    return _combine(plan.length, hash_leaves(plan, device))


def plan_of(pieces: Sequence[torch.Tensor], leaf_bytes: int) -> LeafPlan:
    """Return the plan for these tensors (uint8, 1-D, contiguous, one device), in order."""
    addresses = np.array([piece.data_ptr() for piece in pieces], dtype=np.int64)
    return leaf_plan(addresses, np.array([piece.numel() for piece in pieces], dtype=np.int64), leaf_bytes)


def _combine(length: int, leaves: bytes) -> bytes:
    state = hashlib.blake2b(length.to_bytes(8, "little"), digest_size=DIGEST_BYTES, person=HASH_DOMAIN)
    state.update(leaves)
    return state.digest()

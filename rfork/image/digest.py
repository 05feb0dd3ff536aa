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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

import numpy as np
import torch
import xxhash

from rfork.image.host_memory import host_view
from rfork.image.leaf_plan import LeafPlan, leaf_plan
from rfork.logs import logger

log = logger(__name__)

HashLeaves = Callable[[LeafPlan, torch.device], bytes]
"""Returns the joined canonical XXH3-128 of each leaf of a plan, whose memory is on this device, in order."""

SELF_TEST_LEAF_BYTES = 2048
SLAB_BYTES = 8 << 20
"""Bytes that are copied to the host at a time if no kernel hashes on the device."""

_init_lock = threading.Lock()

DIGEST_BYTES = 16
LEAF_BYTES = 128 << 10
HASH_DOMAIN = b"rfork-chunk-v1"


class HashBackend:
    """The kernel that hashes leaves on one device, if it has one. Thread-safe.

    On CUDA devices the kernel is compiled in the background, which takes a second or two unless this user's
    cache has it; until then, and on other devices, the bytes are copied to the host. The kernel is used only
    after it has computed correct hashes on this device. If it cannot be compiled or run, or its results are
    wrong, this is logged once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.hash_leaves: HashLeaves | None = None
        """The kernel; None until it is ready, and without one."""
        self._preparing: threading.Thread | None = None
        if device.type == "cuda":
            # Not a daemon thread: the process waits for the compilation at exit, or it would crash.
            self._preparing = threading.Thread(target=self._prepare, name="rfork-compile")
            self._preparing.start()

    def wait_until_ready(self) -> bool:
        """Wait until the kernel is ready or has failed. Returns True if it is used."""
        if self._preparing is not None:
            self._preparing.join()
        return self.hash_leaves is not None

    def _prepare(self) -> None:
        try:
            from rfork.image.xxh3_triton import leaf_hashes

            with torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]
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


def leaf_hasher(device: torch.device) -> HashBackend:
    """Return the hash backend of a device of this process."""
    with _init_lock:  # two concurrent calls must not create two backends
        return _cached_backend(device)


@cache
def _cached_backend(device: torch.device) -> HashBackend:
    return HashBackend(device)


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


def hash_on_host(pieces: Sequence[torch.Tensor], leaf_bytes: int) -> bytes:
    """Return the joined canonical XXH3-128 of each leaf of some pieces (uint8, 1-D), in order.

    Copies bytes of other devices to the host, on the current stream, and waits for them.
    """

    def views() -> Iterator[memoryview]:
        for piece in pieces:
            for begin in range(0, piece.numel(), SLAB_BYTES):
                slab = piece[begin : begin + SLAB_BYTES].cpu()
                yield host_view(slab.data_ptr(), slab.numel())

    return hash_host_leaves(views(), leaf_bytes)


def hash_host_leaves(views: Iterable[memoryview], leaf_bytes: int) -> bytes:
    """Like `hash_on_host`, for host views (format 'B') in order. Each view is used before the next is requested."""
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
    return _combine(sum(map(len, pieces)), hash_host_leaves(pieces, LEAF_BYTES))


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


def digest_tensors(pieces: Sequence[torch.Tensor]) -> bytes:
    """Return the digest of a chunk whose bytes are these tensors (uint8, 1-D, one device), in order.

    Computed on that device, on its current stream, and waited for: the host receives 16 bytes per leaf, and a
    last leaf of at most 240 bytes unhashed. Without a kernel for the device, computed on the host.
    """
    if not pieces:
        return digest_bytes([])
    device = pieces[0].device
    hash_leaves = leaf_hasher(device).hash_leaves
    if hash_leaves is None:
        return _combine(sum(piece.numel() for piece in pieces), hash_on_host(pieces, LEAF_BYTES))
    return digest_plan(plan_of(pieces, LEAF_BYTES), device, hash_leaves)


def digest_plan(plan: LeafPlan, device: torch.device, hash_leaves: HashLeaves) -> bytes:
    """Return the digest of a chunk by this plan, with leaves of `LEAF_BYTES`. See `HashLeaves`."""
    return _combine(plan.length, hash_leaves(plan, device))


def plan_of(pieces: Sequence[torch.Tensor], leaf_bytes: int) -> LeafPlan:
    """Return the plan for these tensors (uint8, 1-D, contiguous, one device), in order."""
    addresses = np.array([piece.data_ptr() for piece in pieces], dtype=np.int64)
    return leaf_plan(addresses, np.array([piece.numel() for piece in pieces], dtype=np.int64), leaf_bytes)


def _combine(length: int, leaves: bytes) -> bytes:
    state = hashlib.blake2b(length.to_bytes(8, "little"), digest_size=DIGEST_BYTES, person=HASH_DOMAIN)
    state.update(leaves)
    return state.digest()

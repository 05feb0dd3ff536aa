"""Selects the implementation that hashes leaves on a device: the Triton kernel if it works, else the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

import torch
import xxhash

from rfork.image.host_memory import host_view
from rfork.logs import logger

log = logger(__name__)

HashLeaves = Callable[[Sequence[torch.Tensor], int], bytes]
"""Returns the joined canonical XXH3-128 of each leaf of some pieces (uint8, 1-D, one device), in order.

The second argument is the number of bytes in a leaf, a multiple of 1024; the last one may be shorter.
"""

SELF_TEST_LEAF_BYTES = 2048
SLAB_BYTES = 8 << 20
"""Bytes that are copied to the host at a time if no kernel hashes on the device."""

_init_lock = threading.Lock()


class HashBackend:
    """Hashes leaves on one device. Thread-safe.

    On CUDA devices the kernel is compiled in the background, which takes a second or two unless this user's
    cache has it; until then, and on other devices, the bytes are copied to the host. The kernel is used only
    after it has computed correct hashes on this device. If it cannot be compiled or run, or its results are
    wrong, this is logged once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hash: HashLeaves = hash_on_host
        self._preparing: threading.Thread | None = None
        if device.type == "cuda":
            # Not a daemon thread: the process waits for the compilation at exit, or it would crash.
            self._preparing = threading.Thread(target=self._prepare, name="rfork-compile")
            self._preparing.start()

    def __call__(self, pieces: Sequence[torch.Tensor], leaf_bytes: int) -> bytes:
        """See `HashLeaves`."""
        return self._hash(pieces, leaf_bytes)

    def wait_until_ready(self) -> bool:
        """Wait until the kernel is ready or has failed. Returns True if it is used."""
        if self._preparing is not None:
            self._preparing.join()
        return self._hash is not hash_on_host

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
        self._hash = leaf_hashes


def leaf_hasher(device: torch.device) -> HashBackend:
    """Return the hash backend of a device of this process."""
    with _init_lock:  # two concurrent calls must not create two backends
        return _cached_backend(device)


@cache
def _cached_backend(device: torch.device) -> HashBackend:
    return HashBackend(device)


def self_test(hash_leaves: HashLeaves, device: torch.device) -> None:
    """Compare the hashes with xxhash's, for aligned and odd addresses and a short last leaf. Raises RuntimeError."""
    data = torch.arange(3 * SELF_TEST_LEAF_BYTES + 777).mul_(0x9E3779B1).bitwise_right_shift_(13).to(torch.uint8)
    device_data = data.to(device)
    for begin in (0, 4, 5):
        content = bytes(data[begin:].tolist())
        expected = b"".join(
            xxhash.xxh3_128_digest(content[low : low + SELF_TEST_LEAF_BYTES])
            for low in range(0, len(content), SELF_TEST_LEAF_BYTES)
        )
        if expected != hash_leaves([device_data[begin:]], SELF_TEST_LEAF_BYTES):
            raise RuntimeError("the kernel computes wrong hashes")


def hash_on_host(pieces: Sequence[torch.Tensor], leaf_bytes: int) -> bytes:
    """See `HashLeaves`. Copies bytes of other devices to the host, on the current stream, and waits for them."""

    def views() -> Iterator[memoryview]:
        for piece in pieces:
            for begin in range(0, piece.numel(), SLAB_BYTES):
                slab = piece[begin : begin + SLAB_BYTES].cpu()
                yield host_view(slab.data_ptr(), slab.numel())

    return hash_host_leaves(views(), leaf_bytes)


def hash_host_leaves(views: Iterable[memoryview], leaf_bytes: int) -> bytes:
    """Like `HashLeaves`, for host views (format 'B') in order. Each view is used before the next is requested."""
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

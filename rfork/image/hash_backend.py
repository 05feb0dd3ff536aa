"""Selects the implementation that hashes leaves on a device: the Triton kernel if it works, else torch operations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache

import torch
import xxhash

from rfork.image import xxh3_torch
from rfork.logs import logger

log = logger(__name__)

HashLeaves = Callable[[Sequence[torch.Tensor], int], bytes]
"""Returns the joined hashes of the leaves of some pieces; see `rfork.image.xxh3_torch.leaf_hashes`."""

SELF_TEST_LEAF_BYTES = 2048

_init_lock = threading.Lock()


class HashBackend:
    """Hashes leaves on one device. Thread-safe.

    On CUDA devices the kernel is compiled in the background, which takes a second or two unless this user's
    cache has it; until then, torch operations are used. The kernel is used only after it has computed correct
    hashes on this device. If it cannot be compiled or run, or its results are wrong, this is logged once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hash: HashLeaves = xxh3_torch.leaf_hashes
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
        return self._hash is not xxh3_torch.leaf_hashes

    def _prepare(self) -> None:
        try:
            from rfork.image.xxh3_triton import leaf_hashes

            with torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]
                self_test(leaf_hashes, self._device)
        except ImportError as error:
            log.debug("Triton not available, hashing with torch operations", reason=str(error))
            return
        except Exception as error:  # no compiler, an unsupported GPU or a bug: any exception is possible
            log.warning(
                "hash kernel failed, falling back to slower torch operations",
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
            raise RuntimeError("it computes wrong hashes")

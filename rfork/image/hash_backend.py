"""Which code hashes the leaves on a device: the Triton kernel where it runs, else plain torch operations."""

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
"""The hashes of leaves of so many bytes, joined; see `rfork.image.xxh3_torch.leaf_hashes`."""

SELF_TEST_LEAF_BYTES = 2048

_init_lock = threading.Lock()


class HashBackend:
    """Hashes on one device. Thread-safe.

    Compiling the kernel takes a second or two where no process of this user did it before: that is done
    beside the work, by torch operations until then. The kernel has to give the right hashes on this very
    device before it is used; where it does not, or cannot be compiled or started, that is said once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._hash: HashLeaves = xxh3_torch.leaf_hashes
        self._preparing: threading.Thread | None = None
        if device.type == "cuda":
            # No daemon: a process that ends in the middle of a compilation waits for it, and does not crash.
            self._preparing = threading.Thread(target=self._prepare, name="rfork-compile")
            self._preparing.start()

    def __call__(self, pieces: Sequence[torch.Tensor], leaf_bytes: int) -> bytes:
        """See `HashLeaves`."""
        return self._hash(pieces, leaf_bytes)

    def is_ready(self) -> bool:
        """Wait until the kernel is there or known not to be; whether it is used."""
        if self._preparing is not None:
            self._preparing.join()
        return self._hash is not xxh3_torch.leaf_hashes

    def _prepare(self) -> None:
        try:
            from rfork.image.xxh3_triton import leaf_hashes

            with torch.cuda.stream(torch.cuda.Stream(self._device)):  # type: ignore[no-untyped-call]
                self_test(leaf_hashes, self._device)
        except ImportError as error:
            log.debug("no Triton: digests take torch operations", because=str(error))
            return
        except Exception as error:  # no compiler, a GPU that it does not know, or a bug: it says what it likes
            log.warning(
                "the digest's kernel does not run here; torch operations, which are slower, take its place",
                device=str(self._device),
                because=f"{type(error).__name__}: {error}",
            )
            return
        self._hash = leaf_hashes


def leaf_hasher(device: torch.device) -> HashBackend:
    """The hasher of a device of this process."""
    with _init_lock:  # two threads may come at once
        return _hasher(device)


@cache
def _hasher(device: torch.device) -> HashBackend:
    return HashBackend(device)


def self_test(hash_leaves: HashLeaves, device: torch.device) -> None:
    """Compare with xxhash: leaves at aligned and odd addresses, the last one short. Raises RuntimeError."""
    data = torch.arange(3 * SELF_TEST_LEAF_BYTES + 777).mul_(0x9E3779B1).bitwise_right_shift_(13).to(torch.uint8)
    there = data.to(device)
    for begin in (0, 4, 5):
        content = bytes(data[begin:].tolist())
        expected = b"".join(
            xxhash.xxh3_128_digest(content[low : low + SELF_TEST_LEAF_BYTES])
            for low in range(0, len(content), SELF_TEST_LEAF_BYTES)
        )
        if expected != hash_leaves([there[begin:]], SELF_TEST_LEAF_BYTES):
            raise RuntimeError("it gives wrong hashes")

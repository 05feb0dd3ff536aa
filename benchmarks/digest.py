"""Measure the chunk digest on one core against the speed of memory.

Contenders stream through a buffer many times larger than any cache, interleaved, on one thread. "memory read"
(memchr for an absent byte) and "memcpy" are the limits: no digest of uncached bytes can be faster than
reading them. "all threads" is a manifest of the dense image as a seed computes it. GB/s are 1e9 input bytes
per second.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable

import torch
import xxhash

from benchmarks import harness
from benchmarks.harness import GB, Contender, timed
from rfork.errors import RforkError
from rfork.image.capture import image_from_tensors
from rfork.image.host_memory import host_view
from rfork.image.memory import Image

MIB = 1 << 20
SMALL_TENSORS, SMALL_BYTES = 20_000, 8 << 10
SLOW_BYTES = 256 * MIB
"""Input size of slow contenders: still eight times the largest cache of common machines."""


def main() -> None:
    """Run the benchmark, print the table and write the requested files."""
    options = harness.options("digest", __doc__)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    size = (1 if options.quick else 2) << 30
    # Byte 255 is left out, so that memchr has to read to the end.
    source = torch.empty(size, dtype=torch.uint8).random_(0, 255)
    target = torch.zeros(size, dtype=torch.uint8)
    buffer = host_view(source.data_ptr(), size)
    dense = image_from_tensors({"dense": source})
    pieces = source[: SMALL_TENSORS * SMALL_BYTES].view(SMALL_TENSORS, SMALL_BYTES)
    small = image_from_tensors({f"small.{index}": piece.clone() for index, piece in enumerate(pieces)})
    libc = ctypes.CDLL(None)
    libc.memchr.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t)
    libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    cases: dict[str, tuple[int, Callable[[], object]]] = {
        "rfork digest, dense": (size, lambda: digest_all(dense)),
        "rfork digest, 20,000 x 8 KiB": (SMALL_TENSORS * SMALL_BYTES, lambda: digest_all(small)),
        f"rfork manifest, {threads} threads": (size, lambda: dense.manifest(threads=threads)),
        "xxh3-128, one shot": (size, lambda: xxhash.xxh3_128_digest(buffer)),
        "blake2b": (SLOW_BYTES, lambda: hashlib.blake2b(buffer[:SLOW_BYTES]).digest()),
        "limit: memory read": (size, lambda: libc.memchr(source.data_ptr(), 255, size)),
        "limit: memcpy": (size, lambda: libc.memcpy(target.data_ptr(), source.data_ptr(), size)),
    }
    crc_checksum = crc32c(bytes(buffer[:SLOW_BYTES]))
    if crc_checksum is not None:
        cases["crc32c (google-crc32c)"] = (SLOW_BYTES, crc_checksum)
    contenders = {name: _timed(call) for name, (_, call) in cases.items()}
    seconds = harness.interleave(contenders, options.rounds)
    speed = {name: cases[name][0] / GB / median for name, median in harness.medians(seconds).items()}
    spread = {name: [cases[name][0] / GB / value for value in values] for name, values in seconds.items()}
    harness.publish(
        options,
        settings={"dense_bytes": size, "small_tensors": SMALL_TENSORS, "small_bytes": SMALL_BYTES},
        rows=[
            {"contender": name, "GB/s": speed[name], "min": min(spread[name]), "max": max(spread[name]),
             "input MB": cases[name][0] / 1e6}
            for name in cases
        ],
        figures={
            "digest_cpu_gb_per_s": speed["rfork digest, dense"],
            "digest_small_gb_per_s": speed["rfork digest, 20,000 x 8 KiB"],
            "digest_vs_memory_read": speed["rfork digest, dense"] / speed["limit: memory read"],
        },
        plot=("contender", "GB/s"),
    )  # fmt: skip


def digest_all(image: Image) -> None:
    """Compute the digest of every chunk sequentially on this thread."""
    for chunk in range(len(image.layout.chunks)):
        image.digest(chunk)


def crc32c(data: bytes) -> Callable[[], object] | None:
    """Return the CRC32C of `data`, computed by google-crc32c if it is installed."""
    try:
        import google_crc32c
    except ImportError:
        return None
    return lambda: google_crc32c.value(data)


def _timed(call: Callable[[], object]) -> Contender:
    def run() -> None:
        call()

    return timed(run)


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}") from None

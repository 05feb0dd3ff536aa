"""Fingerprint of a checkpoint from a sample of its bytes. Runs on the target."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

from rfork.image import ranges
from rfork.storage.blob import Blob, read_range
from rfork.storage.formats.safetensors_file import Shard
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.io.parallel_map import parallel_map

ORIGIN_DOMAIN = b"rfork-origin-v3\n"
MAX_FULLY_HASHED_BYTES = 64 << 10
"""Tensors up to this size are hashed completely: small edits change norms and biases."""
SAMPLE_BYTES = 4096
READ_BYTES = 1 << 20
THREADS = 16
MAX_REMOTE_READS = 64
"""Limit for a remote checkpoint: each read is a request, and many instances send them."""

_Sample = tuple[Blob, int, int]


def checkpoint_fingerprint(source: SafetensorsSource, computed: Iterable[tuple[int, memoryview]]) -> str:
    """Return a hash, as 32 hex digits, over

    - the index file;
    - of each shard: name, size, header, and of each tensor all bytes up to 64 KiB, or the first, middle
      and last 4 KiB if it is larger;
    - of a remote shard also its version (an ETag), if any, and instead of the tensor bytes above only
      64 samples of 4 KiB, evenly spread over all shards;
    - `computed`: image offsets and bytes of what the module computed during construction.

    Two instances that read the same objects, or copies of the same files, get the same hash. Files with the
    same hash may still differ inside a large tensor: before continuing with chunks from another reader, an
    instance compares their digests. Raises StorageError.
    """
    state = hashlib.sha256(ORIGIN_DOMAIN)

    def cover(data: bytes | memoryview) -> None:
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)

    cover(source.index)
    ordered = sorted(source.shards, key=lambda shard: shard.name)
    for shard in ordered:
        # A local file's version (inode, mtime) differs between machines that have the same copy.
        version = (shard.blob.version or "") if source.remote else ""
        cover(f"{shard.name}\n{shard.blob.size}\n{version}".encode())
        cover(shard.head_digest)
    samples = [sample for shard in ordered for sample in _samples(shard)]
    if source.remote:
        samples = _sample_evenly(samples, MAX_REMOTE_READS)
    # In parallel: on a network disk, each of these small reads costs a round trip.
    for digest in parallel_map(source.uri, _digest, samples, THREADS):
        cover(digest)
    for begin, memory in computed:
        cover(begin.to_bytes(8, "little"))
        cover(memory)
    return state.hexdigest()[:32]


def _samples(shard: Shard) -> Iterator[_Sample]:
    """Iterate over the ranges to read from a shard; adjacent ranges are merged."""
    parts: list[ranges.Range] = []
    for location in shard.locations.values():
        begin, end = location.offset, location.offset + location.nbytes
        if location.nbytes <= MAX_FULLY_HASHED_BYTES:
            parts.append((begin, end))
        else:
            middle = (begin + end - SAMPLE_BYTES) // 2
            parts += [
                (begin, begin + SAMPLE_BYTES),
                (middle, middle + SAMPLE_BYTES),
                (end - SAMPLE_BYTES, end),
            ]
    for begin, end in ranges.normalise(parts):
        for at in range(begin, end, READ_BYTES):
            yield shard.blob, at, min(READ_BYTES, end - at)


def _sample_evenly(samples: Sequence[_Sample], max_samples: int) -> list[_Sample]:
    """Return at most `max_samples` shortened samples: the first, the last and evenly spaced ones between."""
    if len(samples) > max_samples:
        samples = [samples[turn * (len(samples) - 1) // (max_samples - 1)] for turn in range(max_samples)]
    return [(blob, at, min(length, SAMPLE_BYTES)) for blob, at, length in samples]


def _digest(sample: _Sample) -> bytes:
    return hashlib.sha256(read_range(*sample)).digest()

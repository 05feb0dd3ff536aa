"""What tells one checkpoint's bytes from another's, without reading them all. Runs on the target."""

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
"""A tensor up to this size is covered whole: norms and biases are what small edits change."""
SAMPLE_BYTES = 4096
READ_BYTES = 1 << 20
THREADS = 16
MAX_REMOTE_READS = 64
"""Of a checkpoint that is not on this machine: each read is a request, and many instances send them."""

_Sample = tuple[Blob, int, int]


def checkpoint_fingerprint(source: SafetensorsSource, computed: Iterable[tuple[int, memoryview]]) -> str:
    """A hash, as 32 hex digits, over

    - the index file;
    - of each shard its name, its size, its header, and of each tensor in it all bytes up to 64 KiB, of a
      larger one the first, the middle and the last 4 KiB;
    - of a shard that is not on this machine also its version (an ETag), where it has one; of all its
      tensors' bytes said above only 64 samples of 4 KiB, evenly spread over all shards;
    - `computed`: image offsets and bytes of what the module computed for itself.

    Two instances that read the same objects agree in it, and so do two that have copies of the same files.
    Files that agree in it may still differ inside a large tensor: whoever goes on with chunks of another
    reader compares digests of those first. Raises StorageError.
    """
    state = hashlib.sha256(ORIGIN_DOMAIN)

    def cover(data: bytes | memoryview) -> None:
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)

    cover(source.index)
    ordered = sorted(source.shards, key=lambda shard: shard.name)
    for shard in ordered:
        # A file's own version is made of what another machine's copy has not: its number, and when it came.
        version = (shard.blob.version or "") if source.remote else ""
        cover(f"{shard.name}\n{shard.blob.size}\n{version}".encode())
        cover(shard.head_digest)
    samples = [sample for shard in ordered for sample in _samples(shard)]
    if source.remote:
        samples = _sample_evenly(samples, MAX_REMOTE_READS)
    # Side by side: on a network's disk each of these small reads costs a round trip.
    for digest in parallel_map(source.uri, _digest, samples, THREADS):
        cover(digest)
    for begin, memory in computed:
        cover(begin.to_bytes(8, "little"))
        cover(memory)
    return state.hexdigest()[:32]


def _samples(shard: Shard) -> Iterator[_Sample]:
    """What is read of a shard: file ranges, those that touch as one."""
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
    """At most so many of them, cut short: the first, the last, and those at even distances between."""
    if len(samples) > max_samples:
        samples = [samples[turn * (len(samples) - 1) // (max_samples - 1)] for turn in range(max_samples)]
    return [(blob, at, min(length, SAMPLE_BYTES)) for blob, at, length in samples]


def _digest(sample: _Sample) -> bytes:
    return hashlib.sha256(read_range(*sample)).digest()

"""Runs `benchmarks.storage`: for each image and medium all contenders in turn, round after round."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.context import ForkServerContext

from benchmarks import harness
from benchmarks.harness import Contender as Timed
from benchmarks.memory_reserve import MemoryReserve
from benchmarks.storage import limits, other_loaders, process, rfork_loader
from benchmarks.storage.cases import (
    ALL_DESTINATIONS,
    DESTINATIONS,
    SIDE_ROUNDS,
    Bucket,
    Destination,
    LoadMeasurement,
    Medium,
    Part,
    StorageCase,
    StorageContender,
    StorageResult,
)
from benchmarks.storage.images import DENSE, FileFormat, StoredImage, bytes_of, shapes_of
from benchmarks.storage.page_cache import make_cold, make_warm
from benchmarks.storage.process import LoadFailed, LoadJob

FAILED = float("nan")
GUESSED_SPEED: Mapping[Medium, float] = {"cold": 0.8e9, "warm": 1.2e9, "s3": 0.25e9}
"""Estimated bytes per second of a loader, including everything before and after it; only for the time
estimate.
"""
GUESSED_RUN_S = 0.4
WRITTEN_SPEED, UPLOADED_SPEED = 0.7e9, 0.25e9


def contenders(every: bool) -> list[StorageContender]:
    """Return the contenders that always run, or `every` one."""
    all_contenders = [
        *rfork_loader.contenders(),
        *other_loaders.contenders(),
        *limits.contenders(),
    ]
    return [contender for contender in all_contenders if contender.always or every]


def entries(part: Part, every: bool) -> list[tuple[StorageCase, StorageContender]]:
    """Return the contenders of a part, in the order of the table."""
    image, medium = part
    wanted = ALL_DESTINATIONS if every else _destinations(part)
    return [
        (
            StorageCase(image, medium, destination, contender.name, contender.role, contender.verified),
            contender,
        )
        for destination in wanted
        for contender in contenders(every)
        if medium in contender.media and destination in contender.destinations
    ]


def formats_by_image(parts: Iterable[Part], every: bool) -> dict[str, frozenset[FileFormat]]:
    """Return the formats that are read, by image."""
    read: dict[str, frozenset[FileFormat]] = {}
    for part in parts:
        found = {contender.reads for _, contender in entries(part, every)}
        read[part[0]] = read.get(part[0], frozenset()) | found | {"safetensors"}
    return read


def rounds_of(case: StorageCase, contender: StorageContender, rounds: int) -> int:
    """Return how many of `rounds` a case runs."""
    is_side_case = case.medium == "s3" or case.destination == "mapped"
    max_rounds = SIDE_ROUNDS if is_side_case else contender.max_rounds
    return rounds if max_rounds is None else min(rounds, max_rounds)


def written_bytes(parts: Sequence[Part], quick: bool, every: bool) -> tuple[int, int]:
    """Return the bytes that are written to disk in the images' formats, and again to the S3 server."""
    sizes = {image: bytes_of(shapes_of(image, quick)) for image, _ in parts}
    local = sum(sizes[image] * len(read) for image, read in formats_by_image(parts, every).items())
    in_s3 = [part for part in parts if part[1] == "s3"]
    return local, sum(sizes[image] * len(read) for image, read in formats_by_image(in_s3, every).items())


def estimate_s(parts: Sequence[Part], options: harness.Options, every: bool) -> float:
    """Estimate the duration in seconds on a machine with two cores and a disk of 2 GB/s."""
    local, uploaded = written_bytes(parts, options.quick, every)
    seconds = local / WRITTEN_SPEED + uploaded / UPLOADED_SPEED
    for part in parts:
        each = GUESSED_RUN_S + bytes_of(shapes_of(part[0], options.quick)) / GUESSED_SPEED[part[1]]
        seconds += each * sum(rounds_of(case, contender, options.rounds) for case, contender in entries(part, every))
    return seconds


class StorageBench:
    """The images and the results of every case."""

    def __init__(self, images: Mapping[str, StoredImage], options: harness.Options, every: bool) -> None:
        self._images = images
        self._options = options
        self._every = every
        self._context: ForkServerContext = process.server()
        self._reserve = MemoryReserve()
        self._runs: dict[StorageCase, list[LoadMeasurement]] = {}
        self._bytes: dict[StorageCase, int] = {}
        self._notes: dict[StorageCase, str] = {}

    def run(self, parts: Iterable[Part], buckets: Mapping[str, Bucket]) -> None:
        """Run these parts. Raises LoadFailed if rfork fails; the failure of another loader is noted, and it
        is not run again.
        """
        for part in parts:
            # A file that no row of this part reads would only use the memory of the page cache.
            for each in self._images.values():
                make_cold(path for paths in each.files.values() for path in paths)
            self._reserve.acquire(self._images[part[0]].bytes)
            harness.interleave(dict(self._contenders(part, buckets)), self._options.rounds)

    def results(self, parts: Sequence[Part]) -> list[StorageResult]:
        """Return the results of every case, part by part."""
        found = [
            StorageResult(case, self._bytes.get(case, 0), tuple(runs), self._notes.get(case, ""))
            for case, runs in self._runs.items()
        ]
        return sorted(found, key=lambda result: parts.index((result.case.image, result.case.medium)))

    def _contenders(self, part: Part, buckets: Mapping[str, Bucket]) -> Iterator[tuple[str, Timed]]:
        image, medium = part
        stored = self._images[image]
        if medium == "cold":
            for name, read in limits.disks().items():
                case = StorageCase(image, medium, "none", name, "limit")
                self._runs[case] = []
                yield case.label, self._disk(case, stored, read)
        for case, contender in entries(part, self._every):
            self._runs[case] = []
            self._bytes[case] = stored.bytes
            yield case.label, self._loader(case, contender, stored, buckets.get(image))

    def _disk(self, case: StorageCase, stored: StoredImage, read: limits.Disk) -> Timed:
        def run() -> float:
            make_cold(stored.safetensors)
            seconds, self._bytes[case] = read(stored.safetensors)
            self._runs[case].append(LoadMeasurement(seconds, 0.0, 0))
            return seconds

        return run

    def _loader(
        self, case: StorageCase, contender: StorageContender, stored: StoredImage, bucket: Bucket | None
    ) -> Timed:
        job = LoadJob(contender, stored, bucket if case.medium == "s3" else None, case.destination, self._options.quick)
        before = self._prepare_cache(case.medium, contender, stored)
        max_rounds = rounds_of(case, contender, self._options.rounds)

        def run() -> float:
            if case in self._notes or len(self._runs[case]) == max_rounds:
                return FAILED
            try:
                done = process.run(self._context, job, before, self._reserve)
            except LoadFailed as error:
                if contender.role != "peer":
                    raise LoadFailed(f"{case.label}: {error}") from None
                self._notes[case] = str(error)
                self._runs[case].clear()
                return FAILED
            self._runs[case].append(done)
            return done.seconds

        return run

    def _prepare_cache(self, medium: Medium, contender: StorageContender, stored: StoredImage) -> Callable[[], None]:
        if medium == "s3":
            return lambda: None
        files_by_format = stored.files

        def before() -> None:
            for file_format, paths in files_by_format.items():
                (make_warm if medium == "warm" and file_format == contender.reads else make_cold)(paths)

        return before


def _destinations(part: Part) -> tuple[Destination, ...]:
    """Return the destinations of a part without --all."""
    image, medium = part
    if medium == "s3":
        return ("fresh",)
    return DESTINATIONS if image == DENSE else ("existing",)


def minutes(seconds: float) -> str:
    """Format seconds for people."""
    return f"{math.ceil(seconds / 60)} min" if seconds > 90 else f"{math.ceil(seconds / 10) * 10} s"

"""All that `benchmarks.storage` runs: for each image and medium everybody in turn, round after round."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from multiprocessing.context import ForkServerContext

from benchmarks import harness, storage_limits, storage_ours, storage_peers, storage_run
from benchmarks.harness import Contender as Timed
from benchmarks.storage_cache import make_cold, make_warm
from benchmarks.storage_case import (
    ALL_DESTINATIONS,
    DESTINATIONS,
    MEDIA,
    Bucket,
    Case,
    Contender,
    Medium,
    Result,
    Run,
)
from benchmarks.storage_image import Stored
from benchmarks.storage_run import Job, LoadFailed

FAILED = float("nan")


def contenders(quick: bool) -> list[Contender]:
    """Everybody; with `quick` the fewest that make a picture."""
    everybody = [*storage_ours.contenders(), *storage_peers.contenders(), *storage_limits.contenders()]
    return [contender for contender in everybody if contender.quick or not quick]


class Bench:
    """The images, where they lie, and what every case came to."""

    def __init__(
        self, images: Mapping[str, Stored], buckets: Mapping[str, Bucket], options: harness.Options
    ) -> None:
        self._images = images
        self._buckets = buckets
        self._options = options
        self._context: ForkServerContext = storage_run.server()
        self._runs: dict[Case, list[Run]] = {}
        self._bytes: dict[Case, int] = {}
        self._notes: dict[Case, str] = {}

    def run(self) -> list[Result]:
        """Run all. Raises LoadFailed where rfork fails; who else fails is noted, and not run again."""
        for name, stored in self._images.items():
            for medium in MEDIA:
                # What no row of this medium reads would only take the memory of the page cache.
                for each in self._images.values():
                    make_cold(path for paths in each.files.values() for path in paths)
                harness.interleave(dict(self._cases(name, stored, medium)), self._options.rounds)
        return [
            Result(case, self._bytes.get(case, 0), tuple(runs), self._notes.get(case, ""))
            for case, runs in self._runs.items()
        ]

    def _cases(self, name: str, stored: Stored, medium: Medium) -> Iterator[tuple[str, Timed]]:
        if medium == "cold":
            case = Case(name, medium, "none", storage_limits.disk_name(), "limit")
            self._runs[case] = []
            yield case.label, self._disk(case, stored)
        for destination in DESTINATIONS if self._options.quick else ALL_DESTINATIONS:
            for contender in contenders(self._options.quick):
                if medium in contender.media and destination in contender.destinations:
                    case = Case(name, medium, destination, contender.name, contender.role, contender.verified)
                    self._runs[case] = []
                    self._bytes[case] = stored.bytes
                    yield case.label, self._loader(case, contender, stored)

    def _disk(self, case: Case, stored: Stored) -> Timed:
        def run() -> float:
            make_cold(stored.safetensors)
            seconds, read = storage_limits.disk(stored.safetensors)
            self._runs[case].append(Run(seconds, 0.0, 0))
            self._bytes[case] = read
            return seconds

        return run

    def _loader(self, case: Case, contender: Contender, stored: Stored) -> Timed:
        bucket = self._buckets.get(case.image) if case.medium == "s3" else None
        job = Job(contender, stored, bucket, case.destination, self._options.quick)
        before = self._before(case.medium, contender, stored)

        def run() -> float:
            if case in self._notes:
                return FAILED
            try:
                done = storage_run.run(self._context, job, before)
            except LoadFailed as error:
                if contender.role != "peer":
                    raise LoadFailed(f"{case.label}: {error}") from None
                self._notes[case] = str(error)
                self._runs[case].clear()
                return FAILED
            self._runs[case].append(done)
            return done.seconds

        return run

    def _before(self, medium: Medium, contender: Contender, stored: Stored) -> Callable[[], None]:
        if medium == "s3":
            return lambda: None
        kinds = stored.files

        def before() -> None:
            for kind, paths in kinds.items():
                (make_warm if medium == "warm" and kind == contender.reads else make_cold)(paths)

        return before

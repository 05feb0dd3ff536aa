"""The words of `benchmarks.storage`: what is loaded, from where, into what, by whom, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from benchmarks.storage_image import Kind, Stored, Tensors

Medium = Literal["cold", "warm", "s3"]
Destination = Literal["fresh", "existing", "mapped", "none"]
"""New tensors in memory of the process's own; tensors that are there already, a model's; views of the files'
pages in the page cache, which nobody may truncate from then on; or nowhere: a limit."""
Role = Literal["ours", "ours otherwise", "peer", "limit", "shown"]
"""`ours otherwise`: rfork by other settings, or with more work to do; not compared with who does less.
`limit`: what the medium allows. `shown`: for the reader alone."""

ASIDE_ROUNDS = 3
"""Of rows that are far from the best, or of no figure, and of all that read S3."""
Part = tuple[str, Medium]
"""An image, and where it is read from: everybody who does that runs in turn."""

MEDIA: tuple[Medium, ...] = ("cold", "warm", "s3")
DESTINATIONS: tuple[Destination, ...] = ("fresh", "existing")
ALL_DESTINATIONS: tuple[Destination, ...] = ("fresh", "existing", "mapped")
LOCAL: tuple[Medium, ...] = ("cold", "warm")


@dataclass(frozen=True)
class Bucket:
    """Where an image lies in S3, and how it is reached there."""

    name: str
    prefix: str
    environment: Mapping[str, str] = field(repr=False)
    """What the tools of AWS, those that are like them, and rfork read."""
    presigned: Mapping[str, str] = field(repr=False)
    """A signed URL for each safetensors file, by its name: for those who speak plain HTTP."""

    def uri(self, kind: str, file: str = "") -> str:
        """Of a file, or of the folder, of one format."""
        return f"s3://{self.name}/{self.key(kind, file)}"

    def key(self, kind: str, file: str) -> str:
        """Of a file of one format."""
        return f"{self.prefix}/{kind}/{file}"


@dataclass(frozen=True)
class Target:
    """What a loader is given: the files, or the bucket with the same ones, and where the tensors go."""

    stored: Stored
    bucket: Bucket | None
    destination: Destination
    into: Tensors | None = None
    """The tensors that exist."""

    def uris(self, kind: Kind) -> list[str]:
        """Of the files of one format: paths, or in S3 URIs."""
        paths = self.stored.files[kind]
        return [self.bucket.uri(kind, path.name) if self.bucket else str(path) for path in paths]


Load = Callable[[], Tensors]
"""Runs under the clock: all tensors."""
Prepare = Callable[[Target], Load]
"""Imports what is needed, before the clock."""


@dataclass(frozen=True)
class Contender:
    """Somebody who loads; `prepare` runs in a process of its own for each run, with `environment` set."""

    name: str
    prepare: Prepare
    role: Role = "peer"
    media: tuple[Medium, ...] = LOCAL
    destinations: tuple[Destination, ...] = DESTINATIONS
    environment: Mapping[str, str] = field(default_factory=dict)
    reads: Kind = "safetensors"
    raw: bool = False
    """Fills one buffer a file and no tensors: a limit."""
    verified: bool = False
    """Checks the bytes against digests as it loads."""
    quick: bool = False
    """Runs with --quick too."""
    most_rounds: int | None = None
    """Where it runs no more than so many."""


@dataclass(frozen=True)
class Case:
    """What one row of the table is of."""

    image: str
    medium: Medium
    destination: Destination
    contender: str
    role: Role = "peer"
    verified: bool = False

    @property
    def question(self) -> tuple[str, Medium, Destination]:
        """Rows with the same one can be compared."""
        return self.image, self.medium, self.destination

    @property
    def label(self) -> str:
        """In the plot, and while it runs."""
        into = "" if self.destination == "none" else f" {self.destination}"
        return f"{self.image} {self.medium}{into}: {self.contender}"


@dataclass(frozen=True)
class Run:
    """One run: wall and processor seconds, and the most memory beside what was there and what was loaded."""

    seconds: float
    cpu_seconds: float
    over_bytes: int


@dataclass(frozen=True)
class Result:
    """All runs of a case; `note` says why there are none."""

    case: Case
    bytes: int
    runs: tuple[Run, ...]
    note: str = ""

    @property
    def seconds(self) -> float:
        """The median."""
        return median(run.seconds for run in self.runs)

    @property
    def speed(self) -> float:
        """Bytes a second, by the median."""
        return self.bytes / self.seconds

    @property
    def cpu_seconds(self) -> float:
        """The median."""
        return median(run.cpu_seconds for run in self.runs)

    @property
    def over_bytes(self) -> int:
        """The worst."""
        return max(run.over_bytes for run in self.runs)

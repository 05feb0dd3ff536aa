"""The words of `benchmarks.storage`: what is loaded, from where, into what, by whom, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from benchmarks.storage_images import FileFormat, StoredImage, Tensors

Medium = Literal["cold", "warm", "s3"]
Destination = Literal["fresh", "existing", "mapped", "none"]
"""New tensors in memory of the process's own; tensors that are there already, a model's; views of the files'
pages in the page cache, which nobody may truncate from then on; or nowhere: a limit."""
Role = Literal["ours", "ours otherwise", "peer", "limit", "shown"]
"""`ours otherwise`: rfork by other settings, or with more work to do; not compared with who does less.
`limit`: what the medium allows. `shown`: for the reader alone."""

SIDE_ROUNDS = 3
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

    def uri(self, file_format: str, file: str = "") -> str:
        """Of a file, or of the folder, of one format."""
        return f"s3://{self.name}/{self.key(file_format, file)}"

    def key(self, file_format: str, file: str) -> str:
        """Of a file of one format."""
        return f"{self.prefix}/{file_format}/{file}"


@dataclass(frozen=True)
class LoadTarget:
    """What a loader is given: the files, or the bucket with the same ones, and where the tensors go."""

    stored: StoredImage
    bucket: Bucket | None
    destination: Destination
    destination_tensors: Tensors | None = None
    """The tensors that exist."""

    def uris(self, file_format: FileFormat) -> list[str]:
        """Of the files of one format: paths, or in S3 URIs."""
        paths = self.stored.files[file_format]
        return [self.bucket.uri(file_format, path.name) if self.bucket else str(path) for path in paths]


Load = Callable[[], Tensors]
"""Runs under the clock: all tensors."""
Prepare = Callable[[LoadTarget], Load]
"""Imports what is needed, before the clock."""


@dataclass(frozen=True)
class StorageContender:
    """Somebody who loads; `prepare` runs in a process of its own for each run, with `environment` set."""

    name: str
    prepare: Prepare
    role: Role = "peer"
    media: tuple[Medium, ...] = LOCAL
    destinations: tuple[Destination, ...] = DESTINATIONS
    environment: Mapping[str, str] = field(default_factory=dict)
    reads: FileFormat = "safetensors"
    raw: bool = False
    """Fills one buffer a file and no tensors: a limit."""
    verified: bool = False
    """Checks the bytes against digests as it loads."""
    quick: bool = False
    """Runs with --quick too."""
    max_rounds: int | None = None
    """Where it runs no more than so many."""


@dataclass(frozen=True)
class StorageCase:
    """What one row of the table is of."""

    image: str
    medium: Medium
    destination: Destination
    contender: str
    role: Role = "peer"
    verified: bool = False

    @property
    def comparison_key(self) -> tuple[str, Medium, Destination]:
        """Rows with the same one can be compared."""
        return self.image, self.medium, self.destination

    @property
    def label(self) -> str:
        """In the plot, and while it runs."""
        destination_label = "" if self.destination == "none" else f" {self.destination}"
        return f"{self.image} {self.medium}{destination_label}: {self.contender}"


@dataclass(frozen=True)
class LoadMeasurement:
    """One run: wall and processor seconds, and the most memory beside what was there and what was loaded."""

    seconds: float
    cpu_seconds: float
    extra_bytes: int


@dataclass(frozen=True)
class StorageResult:
    """All runs of a case; `note` says why there are none."""

    case: StorageCase
    bytes: int
    runs: tuple[LoadMeasurement, ...]
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
    def extra_bytes(self) -> int:
        """The worst."""
        return max(run.extra_bytes for run in self.runs)

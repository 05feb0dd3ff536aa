"""Types of `benchmarks.storage`: images, media, destinations, loaders and results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from benchmarks.storage.images import FileFormat, StoredImage, Tensors

Medium = Literal["cold", "warm", "s3"]
Destination = Literal["fresh", "existing", "mapped", "none"]
"""New tensors in the process's own memory; existing tensors of a model; views of the files' pages in the page
cache, which must not be truncated from then on; or nothing: a limit.
"""
Role = Literal["ours", "ours otherwise", "peer", "limit", "shown"]
"""`ours otherwise`: rfork with other settings or more work, not compared with loaders that do less. `limit`:
the limit of the medium. `shown`: for information only.
"""

SIDE_ROUNDS = 3
"""Rounds of rows that are far from the best or in no figure, and of all that read S3."""
Part = tuple[str, Medium]
"""An image and the medium it is read from: all contenders of a part run in turn."""

MEDIA: tuple[Medium, ...] = ("cold", "warm", "s3")
DESTINATIONS: tuple[Destination, ...] = ("fresh", "existing")
ALL_DESTINATIONS: tuple[Destination, ...] = ("fresh", "existing", "mapped")
LOCAL: tuple[Medium, ...] = ("cold", "warm")


@dataclass(frozen=True)
class Bucket:
    """An image in S3, and its access settings."""

    name: str
    prefix: str
    environment: Mapping[str, str] = field(repr=False)
    """Variables that AWS's tools, similar tools and rfork read."""
    presigned: Mapping[str, str] = field(repr=False)
    """A signed URL for each safetensors file, by name, for loaders that use plain HTTP."""

    def uri(self, file_format: str, file: str = "") -> str:
        """Return the URI of a file, or of the folder, of one format."""
        return f"s3://{self.name}/{self.key(file_format, file)}"

    def key(self, file_format: str, file: str) -> str:
        """Return the key of a file of one format."""
        return f"{self.prefix}/{file_format}/{file}"


@dataclass(frozen=True)
class LoadTarget:
    """Input of a loader: the files, or the bucket with the same ones, and the destination of the tensors."""

    stored: StoredImage
    bucket: Bucket | None
    destination: Destination
    destination_tensors: Tensors | None = None
    """The existing tensors."""

    def uris(self, file_format: FileFormat) -> list[str]:
        """Return the paths, or S3 URIs, of the files of one format."""
        paths = self.stored.files[file_format]
        return [self.bucket.uri(file_format, path.name) if self.bucket else str(path) for path in paths]


Load = Callable[[], Tensors]
"""Loads all tensors; runs under the clock."""
Prepare = Callable[[LoadTarget], Load]
"""Imports what is needed, before the clock starts."""


@dataclass(frozen=True)
class StorageContender:
    """A loader; `prepare` runs in a separate process for each run, with `environment` set."""

    name: str
    prepare: Prepare
    role: Role = "peer"
    media: tuple[Medium, ...] = LOCAL
    destinations: tuple[Destination, ...] = DESTINATIONS
    environment: Mapping[str, str] = field(default_factory=dict)
    reads: FileFormat = "safetensors"
    raw: bool = False
    """Fills one buffer per file and no tensors: a limit."""
    verified: bool = False
    """Checks the bytes against digests as it loads."""
    always: bool = False
    """Also runs without --all."""
    max_rounds: int | None = None
    """Maximum number of rounds, if limited."""


@dataclass(frozen=True)
class StorageCase:
    """Key of a table row."""

    image: str
    medium: Medium
    destination: Destination
    contender: str
    role: Role = "peer"
    verified: bool = False

    @property
    def comparison_key(self) -> tuple[str, Medium, Destination]:
        """Rows with equal keys can be compared."""
        return self.image, self.medium, self.destination

    @property
    def label(self) -> str:
        """Label in the plot and in progress output."""
        destination_label = "" if self.destination == "none" else f" {self.destination}"
        return f"{self.image} {self.medium}{destination_label}: {self.contender}"


@dataclass(frozen=True)
class LoadMeasurement:
    """Measurements of one run: wall and CPU seconds, and peak memory beyond the initial memory and the
    tensors.
    """

    seconds: float
    cpu_seconds: float
    extra_bytes: int


@dataclass(frozen=True)
class StorageResult:
    """All runs of a case; `note` is the reason if there are none."""

    case: StorageCase
    bytes: int
    runs: tuple[LoadMeasurement, ...]
    note: str = ""

    @property
    def seconds(self) -> float:
        """Median wall time."""
        return median(run.seconds for run in self.runs)

    @property
    def speed(self) -> float:
        """Median bytes per second."""
        return self.bytes / self.seconds

    @property
    def cpu_seconds(self) -> float:
        """Median CPU time."""
        return median(run.cpu_seconds for run in self.runs)

    @property
    def extra_bytes(self) -> int:
        """Maximum extra memory."""
        return max(run.extra_bytes for run in self.runs)

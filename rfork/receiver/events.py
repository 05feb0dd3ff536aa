"""Events and actions of the transfer machine. Runs on the target.

`rfork.receiver.runner` turns what happens on threads into events, one at a time, and executes the actions that
`rfork.receiver.machine` returns for them, in order. All of them are plain values, so a recorded sequence can be
replayed, and a simulation needs no thread.

A *connection* is a number that identifies one opened source. A source that is opened again gets a new one, so
events of the previous connection cannot be confused with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rfork.errors import RforkError, TransportUnavailable
from rfork.image.layout import Manifest
from rfork.image.ranges import Range
from rfork.receiver.own_load import OwnLoad
from rfork.schema import ChunkAssignment, Lease, Plan, Route, SourceFault, StorageAssignment

# -- events ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SourceActivity:
    """Times of one source's last activities, as the machine's clock reads them."""

    message_at: float
    """Last message of the source, even a keep-alive."""
    progress_at: float
    """Last new chunk that it offered."""
    connecting_until: float = 0.0
    """Deadline of the connection attempt in progress, or 0."""
    has_no_bytes: bool = False
    """True if no byte of the image has arrived from it yet, as far as its transport knows."""
    storage_at: float | None = None
    """Last activity of the storage that it reads or waits for; None if there is none."""
    is_relay: bool = False
    """True if `storage_at` is of another instance that it waits for."""
    block_at: float | None = None
    """Last block of local storage; None before the first, and for peers."""
    idle_s: float = 0.0
    """Seconds for which readers of local storage have waited for its next block."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. `activity` is by connection, `spool_at` the time of the spool's last block."""

    activity: Mapping[int, SourceActivity] = field(default_factory=dict)
    spool_at: float = 0.0
    spool_bytes: int = 0
    """Bytes read from the spool so far."""


@dataclass(frozen=True, slots=True)
class PlanReceived:
    """The planner's response to the last `RequestPlan`."""

    plan: Plan


@dataclass(frozen=True, slots=True)
class PlanFailed:
    """The planner did not respond, or knows no source."""

    error: RforkError


@dataclass(frozen=True, slots=True)
class ReplanSuggested:
    """The planner suggests to request a new plan."""

    reason: str


@dataclass(frozen=True, slots=True)
class LeasesRenewed:
    """New lease tokens, by source id."""

    leases: Mapping[str, Lease]


@dataclass(frozen=True, slots=True)
class SourceConnected:
    """A channel to a peer is open over this transport."""

    connection: int
    transport: str


@dataclass(frozen=True, slots=True)
class TransportRefused:
    """A transport cannot be used with a source; the source tries its next one, and no party is blamed."""

    connection: int
    error: TransportUnavailable


@dataclass(frozen=True, slots=True)
class ManifestReceived:
    """The manifest of a source's image."""

    connection: int
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class ProvisionalDigests:
    """Digests of chunks of a peer that does not know its manifest yet; sent before these chunks are offered."""

    connection: int
    provisional_id: str
    digests: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class ChunksOffered:
    """Chunks that can be read from a source from now on."""

    connection: int
    chunks: tuple[Range, ...]


@dataclass(frozen=True, slots=True)
class StorageOpened:
    """Local storage is open: its manifest, or otherwise the origin of its files."""

    connection: int
    manifest: Manifest | None
    origin: str | None
    prefetch_chunks: int
    """Chunks that it reads ahead."""
    unique_id: str
    """Random text, for a provisional image of its own."""


@dataclass(frozen=True, slots=True)
class FilesCompared:
    """Result of `CompareFiles`: whether the files contain all of these digests."""

    connection: int
    digests: Mapping[int, bytes]
    agrees: bool


@dataclass(frozen=True, slots=True)
class SourceFailed:
    """A source cannot serve any more."""

    connection: int
    error: RforkError


@dataclass(frozen=True, slots=True)
class ChunkReceived:
    """All bytes of a chunk are in the image; they are digested next. `seconds` is the duration of the read."""

    connection: int
    chunk: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ChunkDigested:
    """The read of a chunk has ended; `digest` is None if the settings do not require one."""

    connection: int
    chunk: int
    digest: bytes | None


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """The read of a chunk has ended with an error, and can no longer write to the image."""

    connection: int
    chunk: int
    error: RforkError


@dataclass(frozen=True, slots=True)
class KeptChunkDigested:
    """Result of `DigestKeptChunk`; `digest` is None if it could not be computed."""

    chunk: int
    digest: bytes | None


@dataclass(frozen=True, slots=True)
class SpoolChunkRead:
    """Result of `ReadSpool`; `digest` is None if the spool did not have all bytes of the chunk."""

    chunk: int
    digest: bytes | None
    seconds: float


@dataclass(frozen=True, slots=True)
class SpoolFailed:
    """The spool cannot be read any more."""


@dataclass(frozen=True, slots=True)
class LoaderFinished:
    """The loader filled the complete image; `manifest` was computed from it."""

    assignment: StorageAssignment
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class LoaderFailed:
    """The loader could not fill the image."""

    assignment: StorageAssignment
    error: RforkError


@dataclass(frozen=True, slots=True)
class OwnLoadMeasured:
    """Result of `MeasureOwnLoad`; None: this instance cannot load the weights itself."""

    own_load: OwnLoad | None


SourceEvent = (
    SourceConnected
    | TransportRefused
    | ManifestReceived
    | ProvisionalDigests
    | ChunksOffered
    | StorageOpened
    | FilesCompared
    | SourceFailed
)
"""Events of one open source, by its connection."""
Event = (
    Tick
    | PlanReceived
    | PlanFailed
    | ReplanSuggested
    | LeasesRenewed
    | SourceEvent
    | ChunkReceived
    | ChunkDigested
    | ReadFailed
    | KeptChunkDigested
    | SpoolChunkRead
    | SpoolFailed
    | LoaderFinished
    | LoaderFailed
    | OwnLoadMeasured
)

# -- actions --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """Request a plan, and report these faults and assignments with the request."""

    faults: tuple[SourceFault, ...]
    assignments: tuple[ChunkAssignment, ...]


@dataclass(frozen=True, slots=True)
class OpenPeer:
    """Connect to a peer."""

    connection: int
    route: Route


@dataclass(frozen=True, slots=True)
class OpenStorage:
    """Open this instance's own storage."""

    connection: int
    assignment: StorageAssignment


@dataclass(frozen=True, slots=True)
class RenewLease:
    """Present a newer lease to a source from now on."""

    connection: int
    lease: Lease


@dataclass(frozen=True, slots=True)
class MeasureOwnLoad:
    """Open this instance's own storage, and read a sample of it."""


@dataclass(frozen=True, slots=True)
class CompareFiles:
    """Compare local files with these digests."""

    connection: int
    digests: Mapping[int, bytes]


@dataclass(frozen=True, slots=True)
class CloseSource:
    """Close a source; its reads in flight end. `error` is why, if it failed."""

    connection: int
    error: RforkError | None = None


@dataclass(frozen=True, slots=True)
class ExcludeStorage:
    """Do not offer the storage of this name to the planner again: it failed."""

    name: str


@dataclass(frozen=True, slots=True)
class ReadChunk:
    """Read and digest one chunk."""

    connection: int
    chunk: int
    read_by: float
    """Deadline of the read; local storage ignores it."""


@dataclass(frozen=True, slots=True)
class PrefetchChunks:
    """Read chunks of local storage ahead. Precedes the reads of the chunks in flight that are new."""

    connection: int
    in_flight: tuple[int, ...]
    """The chunks being read, or about to be."""
    upcoming: tuple[int, ...]
    """The chunks that are read next."""


@dataclass(frozen=True, slots=True)
class DigestKeptChunk:
    """Digest a chunk that may still contain the right bytes, of previous weights."""

    chunk: int


@dataclass(frozen=True, slots=True)
class ReadSpool:
    """Fill a chunk from the spool; `digest` is the expected one."""

    chunk: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class StopSpool:
    """Stop reading the spool: once this returns, it can no longer write to the image."""


@dataclass(frozen=True, slots=True)
class RunLoader:
    """Fill the complete image with a loader; nothing else writes to the image meanwhile."""

    assignment: StorageAssignment


@dataclass(frozen=True, slots=True)
class SetManifest:
    """Serve verified chunks under this manifest."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class SetProvisionalId:
    """Serve verified chunks as those of this provisional image; None: of none."""

    provisional_id: str | None


@dataclass(frozen=True, slots=True)
class MarkVerified:
    """Serve this chunk; `digest` is None if it is not known."""

    chunk: int
    digest: bytes | None


@dataclass(frozen=True, slots=True)
class InvalidateChunks:
    """Stop serving these chunks, and notify readers that they are wrong; none: all readers start over."""

    chunks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FenceImage:
    """Stop serving all chunks and the manifest: other weights follow."""


@dataclass(frozen=True, slots=True)
class AdoptVersion:
    """The weights that are received from now on have this version; ignored by an instance with its own."""

    version: str


@dataclass(frozen=True, slots=True)
class ReportStorageActivity:
    """Notify readers when storage, local or (`relayed`) of a source, was last active; None: it is not read."""

    active_at: float | None
    relayed: bool = False


@dataclass(frozen=True, slots=True)
class Finish:
    """The transfer has ended; `error` is None if all chunks are verified and belong together."""

    error: RforkError | None = None


Action = (
    RequestPlan
    | OpenPeer
    | OpenStorage
    | RenewLease
    | MeasureOwnLoad
    | CompareFiles
    | CloseSource
    | ExcludeStorage
    | PrefetchChunks
    | ReadChunk
    | DigestKeptChunk
    | ReadSpool
    | StopSpool
    | RunLoader
    | SetManifest
    | SetProvisionalId
    | MarkVerified
    | InvalidateChunks
    | FenceImage
    | AdoptVersion
    | ReportStorageActivity
    | Finish
)

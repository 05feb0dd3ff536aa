"""In-process fleet: sources with injected faults, a scripted planner and one target."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rfork.errors import RforkError, StorageError
from rfork.image.capture import image_from_tensors
from rfork.image.chunks import MIB, ChunkState
from rfork.image.layout import Manifest
from rfork.image.memory import Image
from rfork.image.ranges import Range
from rfork.planner_client.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.receiver.own_load import OwnLoad, StorageScope
from rfork.receiver.report import ForkTimer, TransferStats
from rfork.receiver.runner import Observer, ServingState, Transfer
from rfork.receiver.sources import ForkContext, SourceFactory
from rfork.schema import ChunkAssignment, Lease, Placement, Plan, Route, SourceFault, StorageAssignment, StorageType
from rfork.settings import InstanceSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.storage.base import ImageStorage, storage_name
from rfork.storage.spool import Spool
from rfork.testing.peers import InMemoryPeers
from rfork.testing.transport import FaultInjection, InMemoryNetwork, InMemoryTransport
from rfork.tracing import Tracer

CHUNKS = 6
ALL = (0, CHUNKS)
IMAGE_BYTES = CHUNKS * MIB
FORK_ID = "fork-1"
SECRET = b"s" * 32
NEVER_S = 60.0
"""A duration longer than any test."""


def settings(**changed: float | int) -> InstanceSettings:
    """Return settings of a target in which nothing stalls unless the test overrides them."""
    return InstanceSettings.model_validate(
        {
            "node_name": "node",
            "max_inflight_chunks": 2,
            "source_idle_timeout_s": NEVER_S,
            "min_source_bytes_per_s": 1 << 40,
            "no_source_timeout_s": NEVER_S,
            "storage_idle_timeout_s": NEVER_S,
            **changed,
        }
    )


def image(seed: int | None = None, chunks: int = CHUNKS) -> Image:
    """Return an image of this many 1 MiB chunks in two tensors: random bytes from the seed, or zeros."""
    half = chunks * MIB // 2
    if seed is None:
        parts = [torch.zeros(half, dtype=torch.uint8) for _ in range(2)]
    else:
        generator = torch.Generator().manual_seed(seed)
        parts = [torch.randint(0, 256, (half,), dtype=torch.uint8, generator=generator) for _ in range(2)]
    return image_from_tensors({"a": parts[0], "b": parts[1]})


def content_hash(of: Image) -> str:
    """Return a hash of all bytes of the image."""
    state = hashlib.sha256()
    for region in of.regions:
        state.update(region.numpy().tobytes())
    return state.hexdigest()


class Fleet:
    """All participants on one simulated network. The caller closes it."""

    def __init__(self) -> None:
        self.network = InMemoryNetwork()
        self.peers = InMemoryPeers()
        self._seeds: list[Seed] = []

    def source(
        self,
        name: str,
        source_image: Image,
        faults: FaultInjection | None = None,
        *,
        chunk_state: ChunkState | None = None,
        manifest: Manifest | None = None,
        knows_manifest: bool = True,
        max_readers: int = 4,
        tracer: Tracer | None = None,
    ) -> Seed:
        """Start a source. Without `knows_manifest` it must receive its manifest first."""
        seed = Seed(
            source_image,
            InstanceIdentity("model", instance_id=name),
            settings(max_readers=max_readers),
            Connections([InMemoryTransport(self.network, faults)], serve_peer=self.peers.service, tracer=tracer),
            chunk_state=chunk_state,
            manifest=manifest or (source_image.manifest() if knows_manifest else None),
        ).start()
        seed.set_lease_keys([derive_key(SECRET, name)])
        self._seeds.append(seed)
        return seed

    def close(self) -> None:
        """Close all sources."""
        for seed in self._seeds:
            seed.close()


def lease(
    seed: Seed,
    *,
    fork_id: str = FORK_ID,
    ttl_s: float = NEVER_S,
    generation: int | None = None,
    secret: bytes = SECRET,
) -> Lease:
    """Return a lease of a fork on one source."""
    name = seed.identity.instance_id
    claims = LeaseClaims(
        fork_id=fork_id,
        source_id=name,
        layout_id=seed.image.layout.layout_id,
        weights_id=None,
        generation=seed.generation if generation is None else generation,
        expires_at=time.time() + ttl_s,
    )
    return Lease(token=sign(claims, decode_key(derive_key(secret, name))), expires_in_s=ttl_s)


def route(seed: Seed, *chunks: Range) -> Route:
    """Return a route that reads these chunks from one source."""
    return Route(
        source_id=seed.identity.instance_id,
        address=seed.report().address,
        placement=Placement(host="node"),
        transports=("memory",),
        generation=seed.generation,
        chunks=chunks,
        lease=lease(seed),
    )


def plan(
    *routes: Route,
    reason: str = "",
    retry_after_s: float | None = None,
    storage: Sequence[StorageAssignment] = (),
) -> Plan:
    return Plan(fork_id=FORK_ID, routes=routes, storage=tuple(storage), reason=reason, retry_after_s=retry_after_s)


def reads(storage: ImageStorage, *chunks: Range) -> StorageAssignment:
    """Return an assignment to read these chunks from this storage."""
    return StorageAssignment(kind=storage.storage_type, uri=storage.uri, chunks=chunks)


class Files:
    """Storage with an image in memory, whose reads can be delayed or made to fail."""

    def __init__(
        self,
        source_image: Image,
        *,
        storage_type: StorageType = "checkpoint",
        origin: str = "a" * 32,
        manifest: Manifest | None = None,
        error: Exception | None = None,
        fails_at: int | None = None,
    ) -> None:
        """`fails_at` is the image offset at which reads raise `error`."""
        self.storage_type = storage_type
        self.uri = "file:///files"
        self.origin: str | None = origin
        self.manifest = manifest
        self.chunks_read: list[int] = []
        self.before_read: Callable[[int], bool | None] = lambda chunk: None
        self.closed = False
        self._source_image = source_image
        self._error = error or StorageError("disk error")
        self._fails_at = fails_at

    @property
    def name(self) -> str:
        return storage_name(self.storage_type, self.uri)

    def read(self, begin: int, end: int, into: Sequence[memoryview]) -> None:
        chunk = begin // MIB
        self.before_read(chunk)
        if self._fails_at is not None and begin <= self._fails_at < end:
            raise self._error
        with self._source_image.readable(begin, end) as views:
            data = b"".join(views)
        for view in into:
            view[:], data = data[: view.nbytes], data[view.nbytes :]
        self.chunks_read.append(chunk)

    def close(self) -> None:
        self.closed = True


PlanFactory = Callable[[], Plan]


@dataclass
class Script:
    """Scripted planner: returns these responses in turn and repeats the last one."""

    plan_factories: Sequence[PlanFactory]
    faults_by_request: list[tuple[SourceFault, ...]] = field(default_factory=list)
    current: list[tuple[ChunkAssignment, ...]] = field(default_factory=list)

    def __call__(self, faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...] = ()) -> Plan:
        plan_factory = self.plan_factories[min(len(self.faults_by_request), len(self.plan_factories) - 1)]
        self.faults_by_request.append(faults)
        self.current.append(current)
        return plan_factory()

    @property
    def faults(self) -> list[tuple[str, str, str]]:
        """Return all faults reported: (source, fault, error)."""
        return [
            (fault.instance_id, fault.fault, fault.error)
            for request_faults in self.faults_by_request
            for fault in request_faults
        ]


class RecordingServingState:
    """Serving state that records every call; see `rfork.receiver.runner.ServingState`."""

    def __init__(self, chunk_state: ChunkState) -> None:
        self.manifests: list[Manifest] = []
        self.dropped: list[tuple[int, ...]] = []
        self.storage_activity: list[bool] = []
        self.versions: list[str] = []
        self._chunk_state = chunk_state

    def set_manifest(self, manifest: Manifest) -> None:
        self.manifests.append(manifest)

    def invalidate(self, chunks: Sequence[int]) -> None:
        self.dropped.append(tuple(chunks))
        self._chunk_state.invalidate(chunks)

    def fence(self) -> None:
        self._chunk_state.clear()

    def adopt_version(self, version: str) -> None:
        self.versions.append(version)

    def report_storage_activity(self, read_at: Callable[[], float] | None, *, relayed: bool = False) -> None:
        if (read_at is not None) != (self.storage_activity or [False])[-1]:
            self.storage_activity.append(read_at is not None)


def no_loader(read: StorageAssignment) -> Manifest:
    raise StorageError("no loader in this test")


@dataclass
class FleetStorage:
    """Files and a loader of the target; see `rfork.receiver.sources.OwnStorage`."""

    files: Mapping[str, ImageStorage]
    run_loader: Callable[[StorageAssignment], Manifest]
    own_load: OwnLoad | None = None

    @property
    def scope(self) -> StorageScope | None:
        return None if self.own_load is None else "local"

    def measure(self) -> OwnLoad | None:
        return self.own_load

    def storage_for(self, read: StorageAssignment) -> ImageStorage:
        return self.files[storage_name(read.kind, read.uri)]

    def remove(self, name: str) -> None:
        """Accept a failed storage; the script decides what is read next."""


class Target:
    """Image, chunk state and transfer of one fork."""

    def __init__(
        self,
        fleet: Fleet,
        replan: Callable[[tuple[SourceFault, ...], tuple[ChunkAssignment, ...]], Plan],
        chosen: InstanceSettings | None = None,
        *,
        deadline_s: float = NEVER_S,
        target_image: Image | None = None,
        chunk_state: ChunkState | None = None,
        serving_state: ServingState | None = None,
        files: Sequence[Files] = (),
        run_loader: Callable[[StorageAssignment], Manifest] = no_loader,
        own_load: OwnLoad | None = None,
        spool: Spool | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.image = target_image or image()
        self.chunk_state = ChunkState(self.image.layout.chunks) if chunk_state is None else chunk_state
        self.serving_state = RecordingServingState(self.chunk_state)
        chosen = chosen or settings()
        timer = ForkTimer(deadline_s)
        transports = {"memory": InMemoryTransport(fleet.network)}
        context = ForkContext("target", self.image, transports, fleet.peers.dial, chosen, timer)
        self.transfer = Transfer(
            SourceFactory(context, FleetStorage({each.name: each for each in files}, run_loader, own_load)),
            self.chunk_state,
            replan,
            serving_state or self.serving_state,
            spool,
            observer,
        )

    def run(self) -> TransferStats:
        return self.transfer.run()

    @property
    def reasons(self) -> list[str]:
        return [error.kind for error in self.transfer.reasons]


def live_transfer_threads() -> list[str]:
    """Return the transfer threads that are still running."""
    names = (thread.name for thread in threading.enumerate())
    prefixes = ("rfork-read", "rfork-source", "rfork-progress")
    return [name for name in names if name.startswith(prefixes)]


def verified_by_source(target: Target) -> dict[str, int]:
    """Return the number of verified chunks by source."""
    return {share.source_id: share.verified_chunks for share in target.transfer.stats.shares}


def raise_plan_error(error: RforkError) -> Plan:
    raise error

"""A fleet in one process: sources that can be made to fail, a planner that follows a script, one target."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rfork.control.lease import LeaseClaims, decode_key, derive_key, sign
from rfork.errors import StorageError
from rfork.fields import StorageKind
from rfork.fork.deadline import Deadline
from rfork.fork.digests import Giving
from rfork.fork.feed import Feed
from rfork.fork.giver import Listener
from rfork.fork.puller import Puller
from rfork.fork.report import Pulled
from rfork.fork.storage_feed import StorageFeed
from rfork.fork.whole import LoadWhole
from rfork.image.board import ChunkBoard
from rfork.image.capture import image_of
from rfork.image.chunks import MIB
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.image.ranges import Range
from rfork.peer.memory import MemoryPeers
from rfork.seed.seed import Identity, Seed
from rfork.settings import Settings, StorageSettings
from rfork.storage.base import Storage, name_of
from rfork.tracing import Tracer
from rfork.transport.memory import Faults, MemoryNetwork, MemoryTransport
from rfork.wire import Lease, Placement, Plan, Route, Share, SourceFault, StorageRead

CHUNKS = 6
FORK_ID = "fork-1"
SECRET = b"s" * 32
NEVER_S = 60.0
"""Longer than any test runs."""


def settings(**changed: float | int) -> Settings:
    """A target's settings under which nothing stalls, unless a test wants it to."""
    return Settings.model_validate(
        {
            "host": "node",
            "window": 2,
            "stall_s": NEVER_S,
            "min_rate": 1 << 40,
            "patience_s": NEVER_S,
            "storage_stall_s": NEVER_S,
            **changed,
        }
    )


def image(seed: int | None = None, chunks: int = CHUNKS) -> Image:
    """An image of this many chunks of 1 MiB in two tensors; random bytes of this seed, or zeros."""
    half = chunks * MIB // 2
    if seed is None:
        parts = [torch.zeros(half, dtype=torch.uint8) for _ in range(2)]
    else:
        generator = torch.Generator().manual_seed(seed)
        parts = [torch.randint(0, 256, (half,), dtype=torch.uint8, generator=generator) for _ in range(2)]
    return image_of({"a": parts[0], "b": parts[1]})


def content(of: Image) -> str:
    """A hash of all bytes."""
    state = hashlib.sha256()
    for region in of.regions:
        state.update(region.numpy().tobytes())
    return state.hexdigest()


class Fleet:
    """Everything that lives on one imagined network. Close it."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.peers = MemoryPeers()
        self._seeds: list[Seed] = []

    def source(
        self,
        name: str,
        held: Image,
        faults: Faults | None = None,
        *,
        board: ChunkBoard | None = None,
        manifest: Manifest | None = None,
        knows: bool = True,
        max_readers: int = 4,
        tracer: Tracer | None = None,
    ) -> Seed:
        """A started source; without `knows` it has to learn its manifest first."""
        seed = Seed(
            held,
            Identity("model", instance_id=name),
            settings(max_readers=max_readers),
            [MemoryTransport(self.network, faults)],
            board=board,
            manifest=manifest or (held.manifest() if knows else None),
            serve_peer=self.peers.service,
            tracer=tracer,
        ).start()
        seed.learn_keys([derive_key(SECRET, name)])
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
    lives_s: float = NEVER_S,
    generation: int | None = None,
    secret: bytes = SECRET,
) -> Lease:
    """A fork's lease for one source."""
    name = seed.identity.instance_id
    claims = LeaseClaims(
        fork_id=fork_id,
        source_id=name,
        layout_id=seed.image.layout.layout_id,
        weights_id=None,
        generation=seed.generation if generation is None else generation,
        expires_at=time.time() + lives_s,
    )
    return Lease(token=sign(claims, decode_key(derive_key(secret, name))), expires_in_s=lives_s)


def route(seed: Seed, *chunks: Range) -> Route:
    """The way to read these chunks from one source."""
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
    *routes: Route, reason: str = "", retry_after_s: float | None = None, storage: Sequence[StorageRead] = ()
) -> Plan:
    return Plan(
        fork_id=FORK_ID, routes=routes, storage=tuple(storage), reason=reason, retry_after_s=retry_after_s
    )


def reads(held: Storage, *chunks: Range) -> StorageRead:
    """The order to read these chunks from this storage."""
    return StorageRead(kind=held.kind, uri=held.uri, chunks=chunks)


class Files:
    """A storage that holds an image in memory; reads can be made to wait, and to fail."""

    def __init__(
        self,
        held: Image,
        *,
        kind: StorageKind = "checkpoint",
        origin: str = "a" * 32,
        manifest: Manifest | None = None,
        error: Exception | None = None,
        fails_at: int | None = None,
    ) -> None:
        """`fails_at` is the image offset at which reads raise `error`."""
        self.kind = kind
        self.uri = "file:///files"
        self.origin: str | None = origin
        self.manifest = manifest
        self.chunks_read: list[int] = []
        self.before_read: Callable[[int], bool | None] = lambda chunk: None
        self.closed = False
        self._held = held
        self._error = error or StorageError("the disk is broken")
        self._fails_at = fails_at

    @property
    def name(self) -> str:
        return name_of(self.kind, self.uri)

    def read(self, begin: int, end: int, into: Sequence[memoryview]) -> None:
        chunk = begin // MIB
        self.before_read(chunk)
        if self._fails_at is not None and begin <= self._fails_at < end:
            raise self._error
        with self._held.readable(begin, end) as views:
            data = b"".join(views)
        for view in into:
            view[:], data = data[: view.nbytes], data[view.nbytes :]
        self.chunks_read.append(chunk)

    def close(self) -> None:
        self.closed = True


Answer = Callable[[], Plan]


@dataclass
class Script:
    """A planner that gives these answers in turn, and the last one again and again."""

    answers: Sequence[Answer]
    asked: list[tuple[SourceFault, ...]] = field(default_factory=list)
    current: list[tuple[Share, ...]] = field(default_factory=list)

    def __call__(self, faults: tuple[SourceFault, ...], current: tuple[Share, ...] = ()) -> Plan:
        answer = self.answers[min(len(self.asked), len(self.answers) - 1)]
        self.asked.append(faults)
        self.current.append(current)
        return answer()

    @property
    def faults(self) -> list[tuple[str, str, str]]:
        """All that was reported: (source, fault, error)."""
        return [(fault.instance_id, fault.fault, fault.error) for asked in self.asked for fault in asked]


class Relay:
    """A giving side that only notes what it is told; see `rfork.fork.digests.Giving`."""

    def __init__(self, board: ChunkBoard) -> None:
        self.learnt: list[Manifest] = []
        self.dropped: list[tuple[int, ...]] = []
        self.reading: list[bool] = []
        self._board = board

    def learn(self, manifest: Manifest) -> None:
        self.learnt.append(manifest)

    def drop(self, chunks: Sequence[int]) -> None:
        self.dropped.append(tuple(chunks))
        self._board.drop(chunks)

    def fence(self) -> None:
        self._board.clear()

    def say_reading(self, read_at: Callable[[], float] | None, *, relayed: bool = False) -> None:
        if (read_at is not None) != (self.reading or [False])[-1]:
            self.reading.append(read_at is not None)


@dataclass
class Ways:
    """Reaches the sources of a plan on one fleet's network; see `rfork.fork.sources.Open`."""

    fleet: Fleet
    image: Image
    settings: Settings
    deadline: Deadline
    files: Mapping[str, Storage]
    given_up: list[str] = field(default_factory=list)

    def give_up(self, name: str) -> None:
        self.given_up.append(name)

    def peer(self, route: Route, listener: Listener) -> Feed:
        transports = {"memory": MemoryTransport(self.fleet.network)}
        return Feed(
            route, self.image, transports, self.fleet.peers.dial, self.settings, listener, self.deadline
        )

    def storage(self, read: StorageRead, listener: Listener) -> StorageFeed:
        return StorageFeed(
            read,
            lambda read: self.files[name_of(read.kind, read.uri)],
            self.image,
            listener,
            self.settings.storage_stall_s,
            StorageSettings(),
            instance_id="target",
            host="node",
        )


def no_loader(read: StorageRead) -> Manifest:
    raise StorageError("there is no loader here")


class Target:
    """One fork's image, board and puller."""

    def __init__(
        self,
        fleet: Fleet,
        replan: Callable[[tuple[SourceFault, ...], tuple[Share, ...]], Plan],
        chosen: Settings | None = None,
        *,
        deadline_s: float = NEVER_S,
        held: Image | None = None,
        board: ChunkBoard | None = None,
        giving: Giving | None = None,
        files: Sequence[Files] = (),
        load_whole: LoadWhole = no_loader,
    ) -> None:
        self.image = held or image()
        self.board = ChunkBoard(self.image.layout.chunks) if board is None else board
        self.relay = Relay(self.board)
        chosen = chosen or settings()
        deadline = Deadline(time.monotonic() + deadline_s)
        self.puller = Puller(
            self.image,
            self.board,
            chosen,
            identity=("target", "node"),
            opening=Ways(fleet, self.image, chosen, deadline, {each.name: each for each in files}),
            replan=replan,
            load_whole=load_whole,
            giving=giving or self.relay,
            deadline=deadline,
        )

    def run(self) -> Pulled:
        return self.puller.run()

    @property
    def reasons(self) -> list[str]:
        return [error.kind for error in self.puller.reasons]


def working_threads() -> list[str]:
    """The threads of pulls that still run."""
    names = (thread.name for thread in threading.enumerate())
    ours = ("rfork-pull", "rfork-feed", "rfork-progress", "rfork-telling")
    return [name for name in names if name.startswith(ours)]

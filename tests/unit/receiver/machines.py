"""A transfer machine without threads: the test passes events and the time, and reads the actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rfork.errors import RforkError
from rfork.image.layout import Manifest
from rfork.image.ranges import Range
from rfork.receiver.events import (
    Action,
    ChunkDigested,
    ChunkReceived,
    ChunksOffered,
    Event,
    Finish,
    ManifestReceived,
    MarkVerified,
    OpenPeer,
    OpenStorage,
    PlanReceived,
    ReadChunk,
    ReadFailed,
    SourceActivity,
    SourceConnected,
    SourceFailed,
    StorageOpened,
    Tick,
)
from rfork.receiver.machine import TransferMachine
from rfork.receiver.own_load import StorageScope
from rfork.schema import Lease, Placement, Route, StorageAssignment
from rfork.settings import InstanceSettings
from rfork.storage.base import storage_name
from tests.unit.receiver.fleet import CHUNKS, NEVER_S, image, plan, settings

LAYOUT = image().layout
ALL = (0, CHUNKS)
WRONG = b"w" * 16
ORIGIN = "a" * 32
FILES = StorageAssignment(kind="checkpoint", uri="file:///files", chunks=(ALL,))
LOADER = StorageAssignment(kind="loader", uri="", chunks=(ALL,))
BEGIN = 100.0
"""Time at which every machine starts."""

ActionType = TypeVar("ActionType")


def manifest_of(version: int, *, shared: int = 0) -> Manifest:
    """Return the manifest of one version of the weights, whose first `shared` chunks are those of version 1."""
    digests = tuple(bytes([1 if chunk < shared else version, chunk]) * 8 for chunk in range(CHUNKS))
    return Manifest(LAYOUT, digests)


MANIFEST = manifest_of(1)
RIGHT = MANIFEST.digests


def lease(token: str = "token") -> Lease:
    return Lease(token=token, expires_in_s=NEVER_S)


def peer(source_id: str, *chunks: Range, token: str = "token") -> Route:
    """Return a route to a peer, which no test connects to."""
    return Route(
        source_id=source_id,
        address=f"{source_id}:1",
        placement=Placement(host=f"host-of-{source_id}"),
        transports=("memory",),
        generation=0,
        chunks=chunks,
        lease=lease(token),
    )


def name_of(storage: StorageAssignment) -> str:
    return storage_name(storage.kind, storage.uri)


def of_type(actions: Sequence[Action], action_type: type[ActionType]) -> list[ActionType]:
    """Return the actions of one type."""
    return [action for action in actions if isinstance(action, action_type)]


def chunks_read(actions: Sequence[Action]) -> list[int]:
    """Return the chunks that are read from sources."""
    return [read.chunk for read in of_type(actions, ReadChunk)]


def chunks_verified(actions: Sequence[Action]) -> list[int]:
    """Return the chunks that are served from now on."""
    return [marked.chunk for marked in of_type(actions, MarkVerified)]


class MachineHarness:
    """A machine that was started, its clock, and all actions that it has returned."""

    def __init__(
        self,
        chosen: InstanceSettings | None = None,
        *,
        deadline_s: float = 1e6,
        spool_records: Mapping[int, bytes] | None = None,
        own_storage: StorageScope | None = None,
    ) -> None:
        self.machine = TransferMachine(
            LAYOUT,
            chosen or settings(),
            instance_id="target",
            deadline_at=BEGIN + deadline_s,
            spool_records=spool_records,
            own_storage=own_storage,
        )
        self.now = BEGIN
        self.connections: dict[str, int] = {}
        """The newest connection of each source."""
        self.actions: list[Action] = []
        self._record(self.machine.start(self.now))

    def handle(self, event: Event) -> list[Action]:
        """Pass an event, and return the actions that follow."""
        return self._record(self.machine.handle(event, self.now))

    def _record(self, actions: list[Action]) -> list[Action]:
        self.actions += actions
        self.connections |= {opened.route.source_id: opened.connection for opened in of_type(actions, OpenPeer)}
        self.connections |= {name_of(opened.assignment): opened.connection for opened in of_type(actions, OpenStorage)}
        return actions

    def all_of(self, action_type: type[ActionType]) -> list[ActionType]:
        """Return all actions of one type so far."""
        return of_type(self.actions, action_type)

    @property
    def result(self) -> str | None:
        """End of the transfer: an error's name and text, or ``complete``; None: it has not."""
        finished = self.all_of(Finish)
        if not finished:
            return None
        error = finished[0].error
        return "complete" if error is None else f"{error.kind}: {error}"

    @property
    def reasons(self) -> list[str]:
        """Names of the errors of failed sources so far."""
        return [error.kind for error in self.machine.reasons]

    # -- events -----------------------------------------------------------------------------------------

    def plan(self, *routes: Route, storage: Sequence[StorageAssignment] = (), **changed: object) -> list[Action]:
        """Pass a plan with these routes; `changed` are other fields of it."""
        return self.handle(PlanReceived(plan(*routes, storage=storage).model_copy(update=changed)))

    def offer(self, source_id: str, *chunks: Range, manifest: Manifest | None = MANIFEST) -> list[Action]:
        """Let a peer connect, send its manifest and offer chunks."""
        connection = self.connections[source_id]
        actions = self.handle(SourceConnected(connection, "shared_memory"))
        if manifest is not None:
            actions += self.handle(ManifestReceived(connection, manifest))
        return actions + self.handle(ChunksOffered(connection, chunks))

    def open_storage(self, *, manifest: Manifest | None = None, origin: str | None = ORIGIN) -> list[Action]:
        """Let `FILES` be opened."""
        return self.handle(StorageOpened(self.connections[name_of(FILES)], manifest, origin, 2, "f" * 16))

    def read(self, source_id: str, *chunks: int, digest: bytes | None = None) -> list[Action]:
        """Let reads of these chunks end, with the right digest by default."""
        connection, actions = self.connections[source_id], list[Action]()
        for chunk in chunks:
            actions += self.handle(ChunkReceived(connection, chunk, 0.01))
            actions += self.handle(ChunkDigested(connection, chunk, digest or RIGHT[chunk]))
        return actions

    def fail_read(self, source_id: str, chunk: int, error: RforkError) -> list[Action]:
        """Let a read of a chunk end with an error."""
        return self.handle(ReadFailed(self.connections[source_id], chunk, error))

    def fail(self, source_id: str, error: RforkError) -> list[Action]:
        """Let a source end with an error."""
        return self.handle(SourceFailed(self.connections[source_id], error))

    def tick(
        self,
        seconds: float,
        activity: Mapping[str, SourceActivity] | None = None,
        *,
        spool_at: float = 0.0,
        spool_bytes: int = 0,
    ) -> list[Action]:
        """Advance the clock, and pass a tick with the last activity of each source."""
        self.now += seconds
        by_connection = {self.connections[name]: each for name, each in (activity or {}).items()}
        return self.handle(Tick(by_connection, spool_at, spool_bytes))

    def wait(self, seconds: float, activity: Mapping[str, SourceActivity] | None = None) -> list[Action]:
        """Let time pass, with the ticks that the machine requires."""
        until, actions = self.now + seconds, list[Action]()
        while self.now < until:
            due = min(self.machine.wake_at(self.now), until)
            actions += self.tick(due - self.now, activity)
            if self.machine.finished:
                self.now = until
        return actions

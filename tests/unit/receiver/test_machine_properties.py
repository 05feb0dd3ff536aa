"""Promises of the transfer machine in any order of events."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
from hypothesis import given
from hypothesis import strategies as st

from rfork.errors import PlannerUnreachable, SourceUnavailable, SourceWeightsChanged, StorageError
from rfork.image.layout import Manifest
from rfork.receiver.events import (
    Action,
    ChunkDigested,
    ChunkReceived,
    ChunksOffered,
    CloseSource,
    CompareFiles,
    DigestKeptChunk,
    Event,
    FenceImage,
    FilesCompared,
    Finish,
    InvalidateChunks,
    KeptChunkDigested,
    LoaderFailed,
    LoaderFinished,
    ManifestReceived,
    MarkVerified,
    OpenPeer,
    OpenStorage,
    PlanFailed,
    PlanReceived,
    ProvisionalDigests,
    ReadChunk,
    ReadFailed,
    ReadSpool,
    ReplanSuggested,
    RequestPlan,
    RunLoader,
    SetManifest,
    SourceActivity,
    SourceConnected,
    SourceFailed,
    SpoolChunkRead,
    SpoolFailed,
    StopSpool,
    StorageOpened,
    Tick,
)
from rfork.schema import Plan
from tests.unit.receiver.fleet import CHUNKS, plan, settings
from tests.unit.receiver.machines import ALL, FILES, LOADER, ORIGIN, RIGHT, WRONG, MachineHarness, manifest_of, peer

MANIFESTS = (manifest_of(1), manifest_of(2, shared=3))

PLANS = (
    ((peer("a", (0, 3)), peer("b", (3, 6))), ()),
    ((peer("a", ALL),), ()),
    ((peer("b", (0, 2), (3, 5)),), ()),
    ((), (FILES,)),
    ((peer("a", (0, 3)),), (FILES.model_copy(update={"chunks": ((3, 6),)}),)),
    ((), (LOADER,)),
)
RETRIES = (None, None, 0.1, 0.1, 1.0, 1.0)
Numbers = tuple[int, int]
"""Two random numbers that determine a step: each is less than six."""
NUMBER = st.integers(0, 5)


class Executor:
    """Executes the actions of a machine as far as its promises depend on it, and checks these promises."""

    def __init__(self, *, spooled: bool, deadline_s: float = 60.0) -> None:
        self.reads: dict[int, int] = {}
        """Connection of each chunk that is read from a source."""
        self.kept: set[int] = set()
        self.spool_chunk: int | None = None
        self.opened: list[OpenPeer | OpenStorage] = []
        self.closed: set[int] = set()
        self.comparisons: list[CompareFiles] = []
        self.planning = self.loading = False
        self.manifest: Manifest | None = None
        self.served: dict[int, bytes | None] = {}
        self.memory = [WRONG] * CHUNKS
        """Digest of each chunk of the image."""
        self.content: dict[int, tuple[bytes, ...]] = {}
        """Digests of the chunks that each source serves, by connection."""
        self.harness = MachineHarness(
            settings(source_idle_timeout_s=1.0, storage_idle_timeout_s=2.0, no_source_timeout_s=2.0),
            deadline_s=deadline_s,
            spool_records=dict(enumerate(RIGHT[:2])) if spooled else None,
        )
        self._execute_all(self.harness.actions)

    def handle(self, event: Event) -> None:
        """Pass an event that occurs a moment after the last one."""
        self.harness.now += 0.05
        ended = self.harness.machine.finished
        actions = self.harness.handle(event)
        if ended:
            assert [] == actions
        self._execute_all(actions)

    def _execute_all(self, actions: list[Action]) -> None:
        for action in actions:
            self._execute(action)
        for chunk, digest in self.served.items():
            assert digest == self.memory[chunk]
            assert self.manifest is None or digest == self.manifest.digests[chunk]
        if any(isinstance(action, Finish) for action in actions):
            assert isinstance(actions[-1], Finish)

    def _execute(self, action: Action) -> None:
        match action:
            case ReadChunk(connection, chunk):
                self._check_free(chunk)
                assert connection not in self.closed
                self.reads[chunk] = connection
            case DigestKeptChunk(chunk):
                self._check_free(chunk)
                self.kept.add(chunk)
            case ReadSpool(chunk):
                self._check_free(chunk)
                assert None is self.spool_chunk
                self.spool_chunk = chunk
            case StopSpool():
                self.spool_chunk = None
            case OpenPeer(connection) | OpenStorage(connection):
                assert len(self.opened) == connection
                self.opened.append(action)
            case CloseSource(connection):
                assert connection not in self.closed
                self.closed.add(connection)
            case CompareFiles():
                self.comparisons.append(action)
            case RequestPlan():
                assert not self.planning
                self.planning = True
            case RunLoader():
                assert {} == self.reads
                assert set() == self.kept
                assert None is self.spool_chunk
                self.loading, self.manifest = True, None
            case SetManifest(manifest):
                self.manifest = manifest
            case MarkVerified(chunk, digest):
                self.served[chunk] = digest
            case InvalidateChunks(chunks):
                for chunk in chunks:
                    del self.served[chunk]
            case FenceImage():
                assert {} == self.reads
                self.served.clear()
                self.manifest = None
            case Finish(None):
                assert None is not self.manifest
                assert self.manifest.digests == tuple(self.memory)
                assert set(range(CHUNKS)) == self.served.keys()
            case _:
                pass

    def _check_free(self, chunk: int) -> None:
        assert not self.loading
        assert chunk not in self.reads
        assert chunk not in self.kept
        assert chunk != self.spool_chunk
        assert chunk not in self.served

    # -- steps: each passes one event, if it can occur now ----------------------------------------------

    def receive_plan(self, numbers: Numbers) -> None:
        routes, storage = PLANS[numbers[0]]
        weights_id = {2: MANIFESTS[0].weights_id, 3: MANIFESTS[1].weights_id}.get(numbers[1])
        is_empty = numbers[1] == 5
        received = plan(*(() if is_empty else routes), storage=() if is_empty else storage)
        self.follow(received.model_copy(update={"weights_id": weights_id, "retry_after_s": RETRIES[numbers[0]]}))

    def follow(self, received: Plan) -> None:
        """Pass a plan."""
        if self.planning:
            self.planning = False
            self.handle(PlanReceived(received))

    def fail_plan(self, numbers: Numbers) -> None:
        if self.planning and numbers[0] == 0:
            self.planning = False
            self.handle(PlanFailed(PlannerUnreachable("no response")))

    def _connection(self, opened_type: type[OpenPeer | OpenStorage], number: int) -> int | None:
        """Return one of the newest connections of a type; it may be closed."""
        recent = [opened.connection for opened in self.opened if isinstance(opened, opened_type)][-3:]
        return recent[-1 - number % len(recent)] if recent else None

    def offer(self, numbers: Numbers) -> None:
        if (connection := self._connection(OpenPeer, numbers[0])) is not None:
            self.offer_from(connection, MANIFESTS[numbers[1] // 3])

    def offer_from(self, connection: int, manifest: Manifest) -> None:
        """Let a peer offer all its chunks."""
        self.content[connection] = manifest.digests
        self.handle(SourceConnected(connection, "shared_memory"))
        self.handle(ManifestReceived(connection, manifest))
        self.handle(ChunksOffered(connection, (ALL,)))

    def offer_provisional(self, numbers: Numbers) -> None:
        if (connection := self._connection(OpenPeer, numbers[0])) is not None:
            digests = MANIFESTS[numbers[1] // 3].digests
            provisional_id = (ORIGIN, "b" * 32)[numbers[1] % 2]
            self.content[connection] = digests
            self.handle(SourceConnected(connection, "shared_memory"))
            self.handle(ProvisionalDigests(connection, provisional_id, dict(enumerate(digests))))
            self.handle(ChunksOffered(connection, (ALL,)))

    def open_storage(self, numbers: Numbers) -> None:
        if (connection := self._connection(OpenStorage, 0)) is not None:
            manifest = MANIFESTS[numbers[1] // 3]
            self.content[connection] = manifest.digests
            known = manifest if numbers[1] == 0 else None
            self.handle(StorageOpened(connection, known, ORIGIN, 2, "f" * 16))

    def compare_files(self, _: Numbers) -> None:
        if self.comparisons:
            compared = self.comparisons.pop(0)
            content = self.content[compared.connection]
            agrees = all(content[chunk] == digest for chunk, digest in compared.digests.items())
            self.handle(FilesCompared(compared.connection, compared.digests, agrees=agrees))

    def fail_source(self, numbers: Numbers) -> None:
        connection = self._connection(OpenStorage if numbers[1] == 5 else OpenPeer, numbers[0])
        if connection is not None:
            error = SourceWeightsChanged("changed") if numbers[1] % 2 else SourceUnavailable("closed")
            self.handle(SourceFailed(connection, error))

    def end_read(self, numbers: Numbers) -> None:
        if self.reads:
            chunk = sorted(self.reads)[numbers[0] % len(self.reads)]
            connection = self.reads.pop(chunk)
            self.memory[chunk] = self.content[connection][chunk] if numbers[1] > 1 else WRONG
            if numbers[1] == 0:
                self.handle(ReadFailed(connection, chunk, SourceUnavailable("closed")))
                return
            self.handle(ChunkReceived(connection, chunk, 0.01))
            self.handle(ChunkDigested(connection, chunk, self.memory[chunk]))

    def end_all_reads(self, _: Numbers) -> None:
        for _chunk in range(2 * CHUNKS):
            self.end_read((0, 2))

    def end_kept(self, numbers: Numbers) -> None:
        if self.kept:
            chunk = sorted(self.kept)[0]
            self.kept.remove(chunk)
            self.handle(KeptChunkDigested(chunk, self.memory[chunk] if numbers[0] else None))

    def end_spool(self, numbers: Numbers) -> None:
        if self.spool_chunk is not None:
            chunk, self.spool_chunk = self.spool_chunk, None
            self.memory[chunk] = RIGHT[chunk] if numbers[0] > 1 else WRONG
            event = SpoolFailed() if numbers[0] == 0 else SpoolChunkRead(chunk, self.memory[chunk], 0.1)
            self.handle(event)

    def end_loader(self, numbers: Numbers) -> None:
        if self.loading:
            self.loading = False
            manifest = MANIFESTS[numbers[1] // 3]
            if numbers[0] == 0:
                self.memory = [WRONG] * CHUNKS
                self.handle(LoaderFailed(LOADER, StorageError("disk error")))
            else:
                self.memory = list(manifest.digests)
                self.handle(LoaderFinished(LOADER, manifest))

    def suggest_plan(self, _: Numbers) -> None:
        self.handle(ReplanSuggested("a better source"))

    def tick(self, numbers: Numbers) -> None:
        """Pass some time, in which some sources are silent, and others late."""
        self.harness.now += (0.1, 0.25, 0.25, 0.5, 2.0, 8.0)[numbers[0]]
        now = self.harness.now
        at = now if numbers[1] else now - 2.0
        activity = SourceActivity(message_at=at, progress_at=at, has_no_bytes=numbers[1] == 1)
        self.handle(Tick(dict.fromkeys(range(len(self.opened)), activity), now, CHUNKS))


STEPS: tuple[Callable[[Executor, Numbers], None], ...] = (
    Executor.receive_plan,
    Executor.receive_plan,
    Executor.fail_plan,
    Executor.offer,
    Executor.offer,
    Executor.offer_provisional,
    Executor.open_storage,
    Executor.compare_files,
    Executor.fail_source,
    Executor.end_read,
    Executor.end_read,
    Executor.end_all_reads,
    Executor.end_kept,
    Executor.end_spool,
    Executor.end_loader,
    Executor.suggest_plan,
    Executor.tick,
)
HISTORIES = st.lists(st.tuples(st.sampled_from(STEPS), st.tuples(NUMBER, NUMBER)), min_size=30, max_size=90)
History = list[tuple[Callable[[Executor, Numbers], None], Numbers]]


@hypothesis.settings(max_examples=100)
@given(st.booleans(), HISTORIES)
def test_promises_hold_in_any_order_of_events(spooled: bool, history: History) -> None:
    """Every chunk that is served has the bytes of the manifest, a chunk has at most one reader, nothing is read
    while a loader runs or from a closed source, and nothing happens after the end.
    """
    executor = Executor(spooled=spooled)
    executor.receive_plan((1, 0))
    for step, numbers in history:
        step(executor, numbers)


@given(st.booleans(), HISTORIES)
def test_one_good_source_completes_the_image(spooled: bool, history: History) -> None:
    """After any order of events with which the transfer has not ended."""
    executor = Executor(spooled=spooled, deadline_s=1e6)
    for step, numbers in history:
        step(executor, numbers)
    if executor.harness.machine.finished:
        return
    ends_by = executor.harness.now + 20.0
    while not executor.harness.machine.finished and executor.harness.now < ends_by:
        executor.suggest_plan((0, 0))
        executor.follow(plan(peer("good", ALL)).model_copy(update={"weights_id": MANIFESTS[0].weights_id}))
        if (connection := executor.harness.connections.get("good")) is not None:
            executor.offer_from(connection, MANIFESTS[0])
        executor.compare_files((0, 0))
        executor.end_loader((0, 0))
        executor.end_all_reads((0, 0))
        executor.end_kept((2, 0))
        executor.end_spool((2, 0))
        executor.tick((1, 5))
    assert "complete" == executor.harness.result

"""NCCL groups that form, fail and are aborted, with fakes for torch's process group and for torch.cuda."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Final, cast

import pytest
import torch
from torch._C._distributed_c10d import PrefixStore

from rfork.errors import RforkError, SourceTimeout, SourceUnavailable
from rfork.settings import InstanceSettings
from rfork.transport.collective import nccl, nccl_transport
from rfork.transport.collective.key_store import KeyStore, Rendezvous
from rfork.transport.collective.nccl import COMMUNICATOR_CONFIG, READY, NcclBackend, NcclGroup
from tests.unit.fake_clock import FakeClock

CPU: Final = torch.device("cpu")
TIMEOUT_S: Final = 30.0
"""Only a test that fails waits so long."""
BLOCK: Final = torch.zeros(1, dtype=torch.uint8)
in_context = threading.local()


class FakeWork:
    """Work handle; each poll takes a second of the clock. `error`: raised by `wait`, as after a failure on the GPU."""

    def __init__(self, calls: list[str], clock: FakeClock, *, completes: bool, error: str) -> None:
        self._calls, self._clock, self._completes, self._error = calls, clock, completes, error

    def is_completed(self) -> bool:
        self._clock.now += 1.0
        return self._completes

    def wait(self) -> bool:
        if self._error:
            raise RuntimeError(self._error)
        return True

    def synchronize(self) -> None:
        self._calls.append("synchronize")


class FakeProcessGroup:
    """Process group that records its calls. Each of them must run in the backend's context.

    `connects`: until it is set, transfers block after a call of `on_block`, like NCCL while a rank is missing.
    `aborts`: until it is set, `abort` blocks.
    """

    def __init__(self, clock: FakeClock, *, completes: bool = True, error: str = "") -> None:
        self.clock = clock
        self.calls: list[str] = []
        self.outside: list[str] = []
        self.connects, self.aborts = threading.Event(), threading.Event()
        self.connects.set()
        self.aborts.set()
        self.on_block: Callable[[], None] = lambda: None
        self.fails_to_begin = ""
        self.batches = 0
        self.store: PrefixStore | None = None
        self._work = FakeWork(self.calls, clock, completes=completes, error=error)

    def broadcast(self, tensors: list[torch.Tensor], options: object) -> FakeWork:
        return self._begin("broadcast")

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> FakeWork:
        return self._begin(f"send {rank}")

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> FakeWork:
        return self._begin(f"recv {rank}")

    def _start_coalescing(self) -> None:
        self.batches += 1

    def _end_coalescing(self) -> FakeWork:
        self.batches -= 1
        return self._work

    def abort(self) -> None:
        self._record("abort")
        assert self.aborts.wait(TIMEOUT_S)

    def _begin(self, call: str) -> FakeWork:
        self._record(call)
        if not self.connects.is_set():
            self.on_block()
        assert self.connects.wait(TIMEOUT_S)
        if self.fails_to_begin:
            raise RuntimeError(self.fails_to_begin)
        return self._work

    def _record(self, call: str) -> None:
        self.calls.append(call)
        if not getattr(in_context, "entered", False):
            self.outside.append(call)


@contextmanager
def transfer_context() -> Iterator[None]:
    """Replaces `NcclBackend.transfer_context`: marks the thread."""
    in_context.entered = True
    try:
        yield
    finally:
        in_context.entered = False


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """The clock of transfers."""
    clock = FakeClock()
    monkeypatch.setattr(nccl, "time", SimpleNamespace(monotonic=clock))
    return clock


def group_of(fake: FakeProcessGroup) -> NcclGroup:
    """Return a group over the fake."""
    return NcclGroup(
        fake,  # type: ignore[arg-type]
        KeyStore(Rendezvous(), 0.0),
        CPU,
        transfer_context,
    )


def record_cuda(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    """Replace streams and events of torch.cuda by stubs that record what the host does."""

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            assert blocking

        def record(self, stream: str) -> None:
            calls.append(f"record on {stream}")

        def synchronize(self) -> None:
            calls.append("wait for the event")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current stream")


# -- transfers ---------------------------------------------------------------------------------------------


def test_a_block_that_failed_is_not_received(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A work handle is completed after an error too; the error is raised, not taken for success."""
    fake = FakeProcessGroup(clock, error="NCCL error: remote process exited")
    record_cuda(monkeypatch, fake.calls)
    with pytest.raises(SourceUnavailable, match="remote process exited"):
        group_of(fake).receive(BLOCK, clock.now + 10.0)


def test_a_block_that_completes_is_received(clock: FakeClock) -> None:
    """A transfer without an error does not abort the group."""
    fake = FakeProcessGroup(clock)
    group_of(fake).receive(BLOCK, clock.now + 10.0)
    assert ["recv 0"] == fake.calls


@pytest.mark.parametrize(
    ("completes", "error", "expected"), [(True, "a rank died", SourceUnavailable), (False, "", SourceTimeout)]
)
def test_giving_up_waits_for_the_stream_of_nccl(
    completes: bool, error: str, expected: type[RforkError], clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels end by the abort, then the current stream waits for NCCL's, then the host for the current one."""
    fake = FakeProcessGroup(clock, completes=completes, error=error)
    record_cuda(monkeypatch, fake.calls)
    with pytest.raises(expected):
        group_of(fake).broadcast(BLOCK, clock.now + 2.0)
    assert ["broadcast", "abort", "synchronize", "record on current stream", "wait for the event"] == fake.calls


def test_a_transfer_that_does_not_begin_aborts_the_group(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no work handle then; copies into the block may still run on the current stream."""
    fake = FakeProcessGroup(clock)
    fake.fails_to_begin = "NCCL error: invalid usage"
    record_cuda(monkeypatch, fake.calls)
    group = group_of(fake)
    with pytest.raises(SourceUnavailable, match="invalid usage"):
        group.broadcast(BLOCK, clock.now + 2.0)
    assert ["broadcast", "abort", "record on current stream", "wait for the event"] == fake.calls
    with pytest.raises(SourceUnavailable, match="closed"):
        group.broadcast(BLOCK, clock.now + 2.0)


def test_a_send_that_does_not_begin_ends_its_batch(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL counts open batches for each thread, and would not start this thread's next transfer."""
    fake = FakeProcessGroup(clock)
    fake.fails_to_begin = "NCCL error: invalid usage"
    record_cuda(monkeypatch, fake.calls)
    with pytest.raises(SourceUnavailable):
        group_of(fake).send(BLOCK, 1, clock.now + 2.0)
    assert 0 == fake.batches


def test_abort_ends_a_transfer_on_its_own_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that transfers aborts the communicator: no NCCL call runs while another frees it."""
    fake = FakeProcessGroup(FakeClock(), completes=False)
    record_cuda(monkeypatch, fake.calls)
    group = group_of(fake)
    errors: list[RforkError] = []

    def transfer() -> None:
        try:
            group.broadcast(BLOCK, time.monotonic() + TIMEOUT_S)
        except RforkError as error:
            errors.append(error)

    thread = threading.Thread(target=transfer)
    thread.start()
    group.abort()
    thread.join(TIMEOUT_S)
    assert [SourceUnavailable] == [type(error) for error in errors]


def test_abort_does_not_wait_for_the_communicator() -> None:
    """`abort` returns although ncclCommAbort hangs."""
    fake = FakeProcessGroup(FakeClock())
    fake.aborts.clear()
    thread = threading.Thread(target=group_of(fake).abort)
    thread.start()
    thread.join(TIMEOUT_S / 10)
    is_blocked = thread.is_alive()
    fake.aborts.set()
    assert not is_blocked


def test_close_waits_a_limited_time_for_the_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """`close` returns although ncclCommAbort hangs; the abort goes on."""
    monkeypatch.setattr(nccl, "ABORT_TIMEOUT_S", 0.01)
    fake = FakeProcessGroup(FakeClock())
    fake.aborts.clear()
    group_of(fake).close()
    assert ["abort"] == fake.calls
    fake.aborts.set()


# -- forming -----------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeProcessGroup]:
    """The process group that every group in the test creates, with access to the group's store. The deadline of forming
    passes when a transfer blocks.
    """
    clock = FakeClock(time.monotonic())
    fake = FakeProcessGroup(clock)

    def pass_deadline() -> None:
        clock.now += 10 * TIMEOUT_S

    fake.on_block = pass_deadline
    monkeypatch.setattr(nccl, "time", SimpleNamespace(monotonic=clock))

    def create(store: KeyStore, rank: int, size: int) -> FakeProcessGroup:
        fake.store = PrefixStore("torch", store)
        return fake

    monkeypatch.setattr(nccl, "_create_process_group", create)
    monkeypatch.setattr(nccl, "GRACE_S", 0.0)
    monkeypatch.setattr(nccl, "_abandoned", [])
    monkeypatch.setattr(NcclBackend, "transfer_context", lambda self, device: transfer_context())
    record_cuda(monkeypatch, [])
    yield fake
    fake.connects.set()
    for thread in nccl._abandoned:
        thread.join(TIMEOUT_S)


def ready_keys(*ranks: int) -> Rendezvous:
    """Return a store in which these ranks are ready."""
    keys = Rendezvous()
    for rank in ranks:
        keys.put(f"ready/{rank}", READY)
    return keys


def form(fake: FakeProcessGroup, keys: Rendezvous, size: int, timeout_s: float = TIMEOUT_S, rank: int = 0) -> NcclGroup:
    """Form a group with this timeout."""
    return NcclBackend().form(keys, rank, size, "127.0.0.1", CPU, fake.clock() + timeout_s)


def test_the_source_connects_every_pair_while_it_forms(fake: FakeProcessGroup) -> None:
    """The first message of a pair blocks in NCCL until the reader has connected, so it belongs to forming."""
    form(fake, ready_keys(1, 2), 3)
    assert ["broadcast", "send 1", "send 2"] == fake.calls


def test_a_reader_connects_to_the_source_while_it_forms(fake: FakeProcessGroup) -> None:
    """A reader exchanges blocks with the source only."""
    form(fake, ready_keys(0, 2), 3, rank=1)
    assert ["broadcast", "recv 0"] == fake.calls


def test_forming_and_aborting_run_in_the_context_of_transfers(fake: FakeProcessGroup) -> None:
    """A new thread would use device 0 and the engine's default stream."""
    form(fake, ready_keys(1), 2).close()
    assert ["broadcast", "send 1", "abort"] == fake.calls
    assert not fake.outside


def test_nccl_does_not_start_before_all_ranks_are_ready(fake: FakeProcessGroup) -> None:
    """A rank that never comes leaves no thread: the others never enter NCCL."""
    with pytest.raises(SourceTimeout):
        form(fake, ready_keys(1), 3, timeout_s=0.05)
    for thread in nccl._abandoned:
        thread.join(TIMEOUT_S)
    assert ["abort"] == fake.calls


def test_a_rank_that_dies_while_nccl_connects_is_abandoned(fake: FakeProcessGroup) -> None:
    """The deadline holds although NCCL waits longer; when NCCL gives up, the group is closed."""
    fake.connects.clear()
    with pytest.raises(SourceTimeout, match="did not connect before the deadline"):
        form(fake, ready_keys(1), 2)
    (thread,) = nccl._abandoned
    assert thread.is_alive()
    fake.connects.set()
    thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert "abort" == fake.calls[-1]


def test_closing_the_store_ends_forming_before_the_deadline(fake: FakeProcessGroup) -> None:
    """A source that notices that a reader has left, or that stops, does not wait for NCCL."""
    fake.connects.clear()
    keys = ready_keys(1)
    fake.on_block = keys.close
    with pytest.raises(SourceUnavailable, match="closed while it was formed"):
        form(fake, keys, 2)


def test_the_number_of_abandoned_groups_is_limited(fake: FakeProcessGroup) -> None:
    """Readers that die again and again do not fill the source with threads."""
    fake.connects.clear()
    for _ in range(nccl.MAX_ABANDONED):
        with pytest.raises(SourceTimeout):
            form(fake, ready_keys(1), 2)
    with pytest.raises(SourceUnavailable, match="earlier groups"):
        form(fake, ready_keys(1), 2)
    fake.connects.set()
    for thread in nccl._abandoned:
        thread.join(TIMEOUT_S)
    form(fake, ready_keys(1), 2)


def test_an_error_of_nccl_ends_forming(fake: FakeProcessGroup) -> None:
    """For example two ranks on one GPU, which NCCL refuses."""
    fake.fails_to_begin = "NCCL error: invalid usage, Duplicate GPU detected"
    with pytest.raises(SourceUnavailable, match="Duplicate GPU"):
        form(fake, ready_keys(1), 2)
    assert ["broadcast", "abort"] == fake.calls
    assert not nccl._abandoned


def test_the_store_lives_as_long_as_the_group(fake: FakeProcessGroup) -> None:
    """torch's C++ code keeps only its own half of a store written in Python alive."""
    keys = ready_keys(1)
    keys.put("torch/0", b"communicator id")
    group = form(fake, keys, 2)
    gc.collect()
    assert fake.store is not None
    assert b"communicator id" == fake.store.get("0")
    group.close()


def test_connecting_may_take_as_long_as_forming() -> None:
    """Otherwise the target would close the reader while a cold NCCL still connects."""
    assert nccl_transport(InstanceSettings()).connect_timeout_s > NcclBackend.form_timeout_s


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [("ready/1", READY, True), ("ready/2", READY, False), ("ready/1", b"x", False), ("0", READY, False)],
)
def test_a_reader_may_only_confirm_that_it_is_ready(key: str, value: bytes, expected: bool) -> None:
    """Reader 1 of 3 cannot confirm for another rank, or replace the communicator's id."""
    assert expected == NcclBackend().may_set(key, value, 1, 3, "127.0.0.1")


# -- the process group that torch creates ----------------------------------------------------------------


class RecordingProcessGroup:
    """Replaces `torch.distributed.ProcessGroupNCCL`."""

    class Options:
        """Options of an NCCL that has no attribute `cga_cluster_size`."""

        def __init__(self, *, is_high_priority_stream: bool) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace(blocking=1, min_ctas=-1, max_ctas=-1)

    def __init__(self, store: KeyStore, rank: int, size: int, options: Options) -> None:
        self.options = options
        self.calls: list[str] = []

    def abort(self) -> None:
        self.calls.append("abort")


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> RecordingProcessGroup:
    """The process group that the backend creates."""
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", RecordingProcessGroup, raising=False)
    return cast(RecordingProcessGroup, nccl._create_process_group(KeyStore(Rendezvous(), 0.0), 0, 2))


def test_the_watchdog_ends_before_the_group_is_used(created: RecordingProcessGroup) -> None:
    """torch's watchdog would end the process when a communicator fails."""
    assert ["abort"] == created.calls


def test_nccl_does_not_block_and_occupies_few_multiprocessors(created: RecordingProcessGroup) -> None:
    """Attributes that this version of torch lacks are skipped."""
    config = {name: value for name, value in COMMUNICATOR_CONFIG.items() if name != "cga_cluster_size"}
    assert {"blocking": 0, **config} == vars(created.options.config)


def test_transfers_stay_out_of_the_streams_that_engines_capture(created: RecordingProcessGroup) -> None:
    """The pool of normal priority is shared with graph captures."""
    assert created.options.is_high_priority_stream


def test_the_environment_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing it while another thread reads it is undefined behaviour in C."""

    def refuse(*args: object) -> None:
        raise AssertionError("the environment was written")

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", RecordingProcessGroup, raising=False)
    with monkeypatch.context() as patched:  # pytest writes it too
        patched.setattr(type(os.environ), "__setitem__", refuse)
        patched.setattr(type(os.environ), "__delitem__", refuse)
        nccl._create_process_group(KeyStore(Rendezvous(), 0.0), 0, 2)

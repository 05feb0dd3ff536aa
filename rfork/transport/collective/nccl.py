"""NCCL backend: process groups between GPUs.

`ProcessGroupNCCL` is made for training: a failed communicator ends the process, and a rank that never comes blocks its
callers for half an hour. A seed must survive both, so this module

- forms groups on a thread that is abandoned at the deadline,
- lets each group end its watchdog before it is used (`_create_process_group`),
- polls for completion, and calls NCCL only on the thread that forms the group or transfers.

Notes on torch name functions of its C++ sources from 2.6 to 2.13. None of this has run on a GPU yet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from concurrent.futures import Future
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from typing import TYPE_CHECKING, Final, cast

import torch
from torch.distributed import BroadcastOptions, Work

from rfork.cuda.device import CudaStream, cuda_driver
from rfork.errors import SourceTimeout, SourceUnavailable, TransportUnavailable
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.transport.collective.backend import TorchProcessGroup, group_error
from rfork.transport.collective.key_store import KeyStore, KeyValueStore

if TYPE_CHECKING:  # missing in a torch built without NCCL
    from torch.distributed import ProcessGroupNCCL

BLOCK_BYTES = 64 << 20
FORM_TIMEOUT_S = 45.0
"""The first communicator of a process loads NCCL's kernels, which CUDA loads lazily, opens the network cards, measures
the topology, and connects the ranks: tens of seconds on a host of eight GPUs and as many cards that starts cold. If a
rank is known to have died, forming ends earlier (`KeyValueStore.closed`).
"""
POLL_S = 0.0002
FORM_POLL_S = 0.02
GRACE_S = 1.0
"""Time after the deadline, or after the group was closed, in which the thread that forms it reports a precise error."""
ABORT_TIMEOUT_S = 10.0
MAX_ABANDONED = 4
"""Threads that may still wait for a rank of an abandoned group; more groups are refused until one of them ends."""
READY = b"ready"
COMMUNICATOR_CONFIG: Final[Mapping[str, int]] = {"min_ctas": 1, "max_ctas": 4, "cga_cluster_size": 0}
"""Limits of the multiprocessors that NCCL occupies, where torch's `NCCLConfig` has the attribute. By default NCCL uses
up to 32, on Hopper in clusters of four that must start together. Four of the 132 of an H100 are 3 %; one of them is
expected to move some 20 GB/s, so that four saturate a network card of 400 Gb/s (not measured by this project).
"""

log = logger(__name__)
_abandoned: list[threading.Thread] = []
_abandoned_lock = threading.Lock()


class NcclBackend:
    """Creates NCCL groups; see `Backend`."""

    name = "nccl"
    block_bytes = BLOCK_BYTES
    form_timeout_s = FORM_TIMEOUT_S
    open_to = "every client that can connect to them"

    def version(self) -> str:
        """Return NCCL's version as MAJOR.MINOR.PATCH."""
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]

    def is_compatible(self, version: str) -> bool:
        """Return True if major and minor version are equal: NCCL guarantees no other compatibility."""
        return version.split(".")[:2] == self.version().split(".")[:2]

    def device(self, image: Image) -> torch.device:
        """Return the image's GPU. Raises TransportUnavailable for an image in host memory or on several GPUs."""
        gpus = [device for device in image.devices if device.type != "cpu"]
        if image.device.type != "cuda" or len(gpus) != 1:
            raise TransportUnavailable(
                f"nccl serves the memory of one GPU, and the image is on {sorted(map(str, image.devices))}",
                hint="use http or gloo for weights in host memory",
            )
        return gpus[0]

    @contextmanager
    def transfer_context(self, device: torch.device) -> Iterator[None]:
        """Use a stream of its own, so that transfers wait neither for the engine's kernels nor for other groups."""
        driver = cuda_driver()
        index = device.index
        with driver.on_device(index), closing(CudaStream(driver, index)) as stream, stream.as_torch_stream():
            yield

    def form(
        self, keys: KeyValueStore, rank: int, size: int, readers: str, device: torch.device, deadline: float
    ) -> NcclGroup:
        """See `Backend.form`; returns once all ranks that exchange blocks are connected.

        A rank that dies once NCCL has begun to connect cannot be detected: `NCCLComm::getNcclComm` waits for it, and
        holds the mutex that `NCCLComm::abort` needs, until `TORCH_NCCL_NONBLOCKING_TIMEOUT` (30 min). torch reads
        that variable once in a process, at its first use, so only the operator can lower it. Instead all
        ranks confirm that they are ready before NCCL connects, and the thread that forms the group is abandoned if
        it does not end in time; it then closes the group when NCCL gives up.
        """
        with _abandoned_lock:
            _abandoned[:] = [thread for thread in _abandoned if thread.is_alive()]
            if len(_abandoned) >= MAX_ABANDONED:
                raise SourceUnavailable(f"nccl: {len(_abandoned)} earlier groups still wait for ranks that died")
        formed: Future[NcclGroup] = Future()
        thread = threading.Thread(
            target=self._form, args=(formed, keys, rank, size, device, deadline), name="rfork-nccl-form", daemon=True
        )
        thread.start()
        abandon_at = deadline + GRACE_S
        while not futures.wait([formed], FORM_POLL_S).done:
            now = time.monotonic()
            if keys.closed:
                abandon_at = min(abandon_at, now + GRACE_S)
            if now >= abandon_at and formed.cancel():
                with _abandoned_lock:
                    _abandoned.append(thread)
                if keys.closed:
                    raise SourceUnavailable("nccl: the group was closed while it was formed")
                raise SourceTimeout("nccl: the ranks of the group did not connect before the deadline")
        return formed.result()

    def _form(
        self,
        formed: Future[NcclGroup],
        keys: KeyValueStore,
        rank: int,
        size: int,
        device: torch.device,
        deadline: float,
    ) -> None:
        try:
            with self.transfer_context(device):
                group = self._connect(keys, rank, size, device, deadline)
        except Exception as error:  # the thread that waits raises it
            if formed.set_running_or_notify_cancel():
                formed.set_exception(group_error(error, "nccl") if isinstance(error, RuntimeError) else error)
            return
        if formed.set_running_or_notify_cancel():
            formed.set_result(group)
        else:
            group.close()

    def _connect(self, keys: KeyValueStore, rank: int, size: int, device: torch.device, deadline: float) -> NcclGroup:
        store = KeyStore(keys, deadline)
        group = NcclGroup(
            _create_process_group(store, rank, size), store, device, lambda: self.transfer_context(device)
        )
        try:
            probe = torch.zeros(1, dtype=torch.uint8, device=device)
            keys.put(f"ready/{rank}", READY)
            keys.get_values([f"ready/{other}" for other in range(size)], deadline, wait=True)
            group.warm_up(probe, rank, size, deadline)
        except BaseException:
            group.close()
            raise
        return group

    def broadcast_copies(self, readers: int) -> int:
        """NCCL broadcasts along a ring or a binary tree; within a host the source sends once."""
        return 1

    def may_set(self, key: str, value: bytes, rank: int, size: int, address: str) -> bool:
        """A reader may only confirm that it is ready; rank 0 publishes the communicator's id."""
        return key == f"ready/{rank}" and value == READY


class NcclGroup:
    """See `CollectiveGroup`. Transfers on the current stream of the calling thread.

    `abort` only sets a flag, which the transferring thread polls: NCCL calls do not run concurrently, because
    `ncclCommAbort` frees the communicator that another call may be using.

    `store`: kept as long as the group (see `KeyStore`). `context`: `Backend.transfer_context` for another thread.
    """

    def __init__(
        self,
        group: ProcessGroupNCCL,
        store: KeyStore,
        device: torch.device,
        context: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._group: ProcessGroupNCCL | None = group
        self._store = store
        self._device = device
        self._context = context
        self._aborted = threading.Event()

    def warm_up(self, probe: torch.Tensor, rank: int, size: int, deadline: float) -> None:
        """Connect the ranks: NCCL does so in the first broadcast, and in the first message of each pair. Both block in
        C++, where neither the deadline nor an abort is checked, so they belong to forming the group.
        """
        self.broadcast(probe, deadline)
        if rank:
            self.receive(probe, deadline)
        else:
            for reader in range(1, size):
                self.send(probe, reader, deadline)

    def send(self, block: torch.Tensor, rank: int, deadline: float) -> None:
        """See `CollectiveGroup.send`."""
        self._move(lambda group: _coalesced(group, lambda: group.send([block], rank, 0)), deadline)

    def receive(self, block: torch.Tensor, deadline: float) -> None:
        """See `CollectiveGroup.receive`."""
        self._move(lambda group: _coalesced(group, lambda: group.recv([block], 0, 0)), deadline)

    def broadcast(self, block: torch.Tensor, deadline: float) -> None:
        """See `CollectiveGroup.broadcast`."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._move(lambda group: group.broadcast([block], options), deadline)

    def _move(self, begin: Callable[[TorchProcessGroup], Work], deadline: float) -> None:
        group = self._group
        if group is None or self._aborted.is_set():
            raise SourceUnavailable("the nccl group is closed")
        if time.monotonic() >= deadline:
            raise SourceTimeout("the deadline passed before the next block")
        work: Work | None = None
        try:
            work = begin(cast(TorchProcessGroup, group))
            while not work.is_completed():
                if time.monotonic() >= deadline:
                    raise SourceTimeout("nccl: the block did not arrive before the deadline")
                if self._aborted.wait(POLL_S):
                    raise SourceUnavailable("the nccl group was aborted")
            work.wait()  # `is_completed` is also true after an error, which only this raises
        except Exception as error:
            self._abort_and_wait(work)
            if isinstance(error, RuntimeError):
                raise group_error(error, "nccl") from None
            raise

    def _abort_and_wait(self, work: Work | None) -> None:
        """Abort, and wait until no kernel accesses the block. NCCL's kernels run on a stream of `ProcessGroupNCCL`:
        `Work.synchronize` lets the current stream wait for it, and the host then waits for the current stream.
        """
        self._abort_communicator()
        if work is not None:
            with suppress(RuntimeError):
                work.synchronize()
        with suppress(RuntimeError):
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            event.synchronize()

    def _abort_communicator(self) -> None:
        """Call ncclCommAbort, which ends kernels that wait for the other side; on another thread, because it may hang
        if the network does.
        """
        self.abort()
        group, self._group = self._group, None
        if group is None:
            return

        def abort() -> None:
            with suppress(RuntimeError), self._context():
                group.abort()

        thread = threading.Thread(target=abort, name="rfork-nccl-abort", daemon=True)
        thread.start()
        thread.join(ABORT_TIMEOUT_S)
        if thread.is_alive():
            log.warning("nccl communicator does not end, its resources stay allocated", timeout_s=ABORT_TIMEOUT_S)

    def abort(self) -> None:
        """See `CollectiveGroup.abort`; the transferring thread aborts the communicator."""
        self._aborted.set()

    def close(self) -> None:
        """See `CollectiveGroup.close`."""
        self._abort_communicator()


def _create_process_group(store: KeyStore, rank: int, size: int) -> ProcessGroupNCCL:
    """Create a group without a watchdog, and without a communicator, which the first transfer creates.

    The watchdog ends the process when a communicator fails. Variables (TORCH_NCCL_ASYNC_ERROR_HANDLING,
    TORCH_NCCL_BLOCKING_WAIT) can disable it only in the environment, which another thread may be reading; and on an
    error it also sets the static `ProcessGroupNCCL::shouldDump_`, at which the heartbeat monitor of the engine's first
    group ends the process. `ProcessGroupNCCL::abort` sets `terminateProcessGroup_`: watchdog and monitor return, and
    `workEnqueue` hands no transfer to them. It aborts only communicators that exist. So all other variables of the
    watchdog and of the monitor (DUMP_ON_TIMEOUT, ENABLE_MONITORING, PROPAGATE_ERROR) have no effect, nor has
    `Options._timeout`.

    The group's stream has a high priority because torch takes it from a pool that it shares with everybody: engines
    capture CUDA graphs on streams of the pool of normal priority, and would capture transfers too.
    """
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.blocking = 0  # NCCL's calls return, so that a transfer can be polled and aborted
    for name, value in COMMUNICATOR_CONFIG.items():
        if hasattr(options.config, name):
            setattr(options.config, name, value)
    group = ProcessGroupNCCL(store, rank, size, options)
    group.abort()
    return group


def _coalesced(group: TorchProcessGroup, begin: Callable[[], Work]) -> Work:
    """Run a send as a batch, so that it uses the group's communicator instead of creating one per pair of
    ranks.
    """
    group._start_coalescing()
    try:
        begin()
    except Exception:
        with suppress(RuntimeError):  # otherwise NCCL would collect this thread's next calls in the same batch
            group._end_coalescing()
        raise
    return group._end_coalescing()

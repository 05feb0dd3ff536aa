"""NCCL: process groups between GPUs.

torch would end the process when a communicator fails or its watchdog hears nothing: right for training,
wrong for a seed. So its watchdog is told to handle nothing, and this module waits itself, by the clock, and
aborts what does not end. None of this has been run in this project's tests, which have no such devices.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed import BroadcastOptions, Work

from rfork.errors import SourceTimeout, SourceUnavailable, TransportUnavailable
from rfork.image.memory import Image
from rfork.transport.collective.group import TorchProcessGroup, group_error
from rfork.transport.collective.rendezvous import KeyStore, KeyValueStore

if TYPE_CHECKING:  # a torch without NCCL has none
    from torch.distributed import ProcessGroupNCCL

BLOCK_BYTES = 64 << 20
NO_TIMEOUT = timedelta(days=365)
POLL_S = 0.0002
GRACE_S = 2.0
NO_WATCHDOG_ENV = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
}
"""What torch reads when a group is made, and not later."""
_making = threading.Lock()


class NcclBackend:
    """Makes NCCL groups; see `Backend`."""

    name = "nccl"
    block_bytes = BLOCK_BYTES
    open_to = "whoever reaches them"

    def version(self) -> str:
        """NCCL's, as MAJOR.MINOR.PATCH."""
        return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]

    def fits(self, version: str) -> bool:
        """Whether major and minor are the same: NCCL promises nothing across these."""
        return version.split(".")[:2] == self.version().split(".")[:2]

    def device(self, image: Image) -> torch.device:
        """The image's GPU; raises TransportUnavailable for an image in host memory, or on several GPUs."""
        gpus = [device for device in image.devices if device.type != "cpu"]
        if image.device.type != "cuda" or len(gpus) != 1:
            raise TransportUnavailable(
                f"nccl gives the memory of one GPU, and the image lies on {sorted(map(str, image.devices))}",
                hint="use http or gloo for weights in host memory",
            )
        return gpus[0]

    @contextmanager
    def working(self, device: torch.device) -> Iterator[None]:
        """A stream of this thread's own: bytes wait for no kernel of the engine."""
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            yield

    def form(
        self, keys: KeyValueStore, rank: int, size: int, readers: str, device: torch.device, deadline: float
    ) -> NcclGroup:
        """See `Backend.form`; returns once the communicator is there."""
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = NO_TIMEOUT
        options.config.blocking = 0
        with _without_watchdog():
            made = ProcessGroupNCCL(KeyStore(keys, deadline), rank, size, options)
        group = NcclGroup(made, device)
        try:
            group.warm_up(deadline)
        except (SourceUnavailable, SourceTimeout):
            group.close()
            raise
        return group

    def sent_by_source(self, readers: int) -> int:
        """NCCL broadcasts along a ring or a tree of two branches; within a host once is the rule."""
        return 1

    def admits(self, key: str, value: bytes, rank: int, size: int, address: str) -> bool:
        """Only rank 0 has anything to tell: the communicator's id."""
        return False


class NcclGroup:
    """See `Group`. Moves bytes on the current stream of the thread that calls."""

    def __init__(self, group: ProcessGroupNCCL, device: torch.device) -> None:
        self._group: ProcessGroupNCCL | None = group
        self._device = device
        self._lock = threading.Lock()
        self._aborted = threading.Event()

    def warm_up(self, deadline: float) -> None:
        """Make the communicator: one byte to all. On a thread of its own: NCCL may not come back from it."""
        errors: list[Exception] = []

        def warm_up() -> None:
            try:
                with torch.cuda.device(self._device):
                    self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device), deadline)
            except (SourceUnavailable, SourceTimeout) as error:
                errors.append(error)

        meeting = threading.Thread(target=warm_up, name="rfork-nccl-meet", daemon=True)
        meeting.start()
        meeting.join(max(0.0, deadline - time.monotonic()) + GRACE_S)
        if meeting.is_alive():
            self.abort()
            raise SourceTimeout("nccl: the ranks of the group did not meet before the deadline")
        if errors:
            raise errors[0]

    def send(self, block: torch.Tensor, rank: int, deadline: float) -> None:
        """See `Group.send`."""
        self._move(lambda group: _coalesced(group, lambda: group.send([block], rank, 0)), deadline)

    def receive(self, block: torch.Tensor, deadline: float) -> None:
        """See `Group.receive`."""
        self._move(lambda group: _coalesced(group, lambda: group.recv([block], 0, 0)), deadline)

    def broadcast(self, block: torch.Tensor, deadline: float) -> None:
        """See `Group.broadcast`."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._move(lambda group: group.broadcast([block], options), deadline)

    def _move(self, begin: Callable[[TorchProcessGroup], Work], deadline: float) -> None:
        with self._lock:
            group = self._group
        if group is None or self._aborted.is_set():
            raise SourceUnavailable("the nccl group is over")
        if time.monotonic() >= deadline:
            raise SourceTimeout("no time is left for the next block")
        try:
            work = begin(cast(TorchProcessGroup, group))
            while not work.is_completed():
                if time.monotonic() >= deadline:
                    self._abort_and_wait()
                    raise SourceTimeout("nccl: the block was not there at the deadline")
                if self._aborted.wait(POLL_S):
                    break
        except RuntimeError as error:
            self._abort_and_wait()
            raise group_error(error, "nccl") from None
        if self._aborted.is_set():
            self._abort_and_wait()
            raise SourceUnavailable("the nccl group was aborted")

    def _abort_and_wait(self) -> None:
        """Abort, and wait until no kernel of ours reads or writes the block: another may abort just now."""
        self.abort()
        with suppress(RuntimeError):
            torch.cuda.current_stream(self._device).synchronize()

    def abort(self) -> None:
        """See `Group.abort`: ncclCommAbort, which ends kernels that wait for the other side."""
        if self._aborted.is_set():
            return
        self._aborted.set()
        with self._lock:
            group = self._group
        if group is not None:
            with suppress(RuntimeError):
                group.abort()

    def close(self) -> None:
        """See `Group.close`."""
        self.abort()
        with self._lock:
            self._group = None


def _coalesced(group: TorchProcessGroup, begin: Callable[[], Work]) -> Work:
    """As part of a batch a send uses the group's own communicator; alone, it would make one for each pair."""
    group._start_coalescing()
    begin()
    return group._end_coalescing()


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Make a group whose failures are ours to handle: torch takes this from the environment alone."""
    with _making:
        before = {name: os.environ.get(name) for name in NO_WATCHDOG_ENV}
        os.environ.update(NO_WATCHDOG_ENV)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

"""NCCL backend: process groups between GPUs.

By default torch ends the process when a communicator fails or its watchdog times out: right for training,
wrong for a seed. So the watchdog is disabled, and this module polls for completion and aborts on timeout. Not
covered by this project's tests, which have no GPUs for it.
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
from rfork.transport.collective.backend import TorchProcessGroup, group_error
from rfork.transport.collective.key_store import KeyStore, KeyValueStore

if TYPE_CHECKING:  # missing in a torch built without NCCL
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
"""Read by torch only when a group is created."""
_environment_lock = threading.Lock()


class NcclBackend:
    """Creates NCCL groups; see `Backend`."""

    name = "nccl"
    block_bytes = BLOCK_BYTES
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
        """Use a separate stream, so that transfers do not wait for the engine's kernels."""
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):  # type: ignore[no-untyped-call]
            yield

    def form(
        self, keys: KeyValueStore, rank: int, size: int, readers: str, device: torch.device, deadline: float
    ) -> NcclGroup:
        """See `Backend.form`; returns once the communicator is initialized."""
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = NO_TIMEOUT
        options.config.blocking = 0
        with _without_watchdog():
            process_group = ProcessGroupNCCL(KeyStore(keys, deadline), rank, size, options)
        group = NcclGroup(process_group, device)
        try:
            group.warm_up(deadline)
        except (SourceUnavailable, SourceTimeout):
            group.close()
            raise
        return group

    def broadcast_copies(self, readers: int) -> int:
        """NCCL broadcasts along a ring or a binary tree; within a host the source sends once."""
        return 1

    def may_set(self, key: str, value: bytes, rank: int, size: int, address: str) -> bool:
        """Readers set no keys: only rank 0 publishes one, the communicator's id."""
        return False


class NcclGroup:
    """See `CollectiveGroup`. Transfers on the current stream of the calling thread."""

    def __init__(self, group: ProcessGroupNCCL, device: torch.device) -> None:
        self._group: ProcessGroupNCCL | None = group
        self._device = device
        self._lock = threading.Lock()
        self._aborted = threading.Event()

    def warm_up(self, deadline: float) -> None:
        """Initialize the communicator by broadcasting one byte, on a separate thread because NCCL may never
        return.
        """
        errors: list[Exception] = []

        def warm_up() -> None:
            try:
                with torch.cuda.device(self._device):
                    self.broadcast(torch.zeros(1, dtype=torch.uint8, device=self._device), deadline)
            except (SourceUnavailable, SourceTimeout) as error:
                errors.append(error)

        thread = threading.Thread(target=warm_up, name="rfork-nccl-meet", daemon=True)
        thread.start()
        thread.join(max(0.0, deadline - time.monotonic()) + GRACE_S)
        if thread.is_alive():
            self.abort()
            raise SourceTimeout("nccl: the ranks of the group did not connect before the deadline")
        if errors:
            raise errors[0]

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
        with self._lock:
            group = self._group
        if group is None or self._aborted.is_set():
            raise SourceUnavailable("the nccl group is closed")
        if time.monotonic() >= deadline:
            raise SourceTimeout("the deadline passed before the next block")
        try:
            work = begin(cast(TorchProcessGroup, group))
            while not work.is_completed():
                if time.monotonic() >= deadline:
                    self._abort_and_wait()
                    raise SourceTimeout("nccl: the block did not arrive before the deadline")
                if self._aborted.wait(POLL_S):
                    break
        except RuntimeError as error:
            self._abort_and_wait()
            raise group_error(error, "nccl") from None
        if self._aborted.is_set():
            self._abort_and_wait()
            raise SourceUnavailable("the nccl group was aborted")

    def _abort_and_wait(self) -> None:
        """Abort, and wait until none of our kernels accesses the block; another thread may be aborting at the
        same time.
        """
        self.abort()
        with suppress(RuntimeError):
            torch.cuda.current_stream(self._device).synchronize()

    def abort(self) -> None:
        """See `CollectiveGroup.abort`. Calls ncclCommAbort, which ends kernels that wait for the other side."""
        if self._aborted.is_set():
            return
        self._aborted.set()
        with self._lock:
            group = self._group
        if group is not None:
            with suppress(RuntimeError):
                group.abort()

    def close(self) -> None:
        """See `CollectiveGroup.close`."""
        self.abort()
        with self._lock:
            self._group = None


def _coalesced(group: TorchProcessGroup, begin: Callable[[], Work]) -> Work:
    """Run a send as a batch, so that it uses the group's communicator instead of creating one per pair of
    ranks.
    """
    group._start_coalescing()
    begin()
    return group._end_coalescing()


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Disable torch's watchdog for groups created in this context; torch reads it only from the environment."""
    with _environment_lock:
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

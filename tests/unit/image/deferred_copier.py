"""Implementation of `DeviceCopier` whose copies run only when they are waited for.

It shows which copies a pass starts, and which it waits for, before each step; and any one copy can fail. The fake
driver cannot replace it: its copies complete at random times, and when the program waits is not visible to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class DeferredCopy:
    """A copy that runs when it is waited for."""

    def __init__(self, copies: DeferredCopier, copy: Callable[[], None]) -> None:
        self._copies = copies
        self._copy = copy
        copies.pending.append(self)

    def wait(self) -> None:
        if self in self._copies.pending:
            self._copies.pending.remove(self)
            self._copy()


class DeferredCopier:
    """Copies between host and all memory except `host`; at most `max_copies` copies start."""

    def __init__(self, host: Sequence[torch.Tensor] = (), max_copies: int | None = None) -> None:
        self.pending: list[DeferredCopy] = []
        self.started_count = 0
        self.pinned_bytes: list[int] = []
        self._host = {tensor.untyped_storage().data_ptr() for tensor in host}
        self._max_copies = max_copies

    def needs_staging(self, memory: torch.Tensor) -> bool:
        return memory.untyped_storage().data_ptr() not in self._host

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.pinned_bytes.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    def device_to_host(self, host: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> DeferredCopy:
        return self._begin(host, memory)

    def host_to_device(self, memory: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> DeferredCopy:
        return self._begin(memory, host)

    def finish_earlier_work(self) -> None:
        return

    def _begin(self, destination: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> DeferredCopy:
        if self.started_count == self._max_copies:
            raise RuntimeError("the device failed")
        self.started_count += 1

        def copy() -> None:
            for one, other in zip(destination, source, strict=True):
                one.copy_(other)

        return DeferredCopy(self, copy)

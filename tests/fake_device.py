"""A device that is none: host memory that is reached by copies only, each done when it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rfork.image.memory import Image


class FakeCopying:
    """A copy that happens when it is waited for."""

    def __init__(self, copies: FakeCopies, copy: Callable[[], None]) -> None:
        self._copies = copies
        self._copy = copy
        copies.under_way.append(self)

    def wait(self) -> None:
        if self in self._copies.under_way:
            self._copies.under_way.remove(self)
            self._copy()


class FakeCopies:
    """`Copies` of all memory but what `host` names; `fails_after`: so many copies begin, and no more."""

    def __init__(self, host: Sequence[torch.Tensor] = (), fails_after: int | None = None) -> None:
        self.under_way: list[FakeCopying] = []
        self.begun = self.begun_bytes = 0
        self.pinned_bytes: list[int] = []
        self._host = {tensor.untyped_storage().data_ptr() for tensor in host}
        self._fails_after = fails_after

    def stages(self, memory: torch.Tensor) -> bool:
        return memory.untyped_storage().data_ptr() not in self._host

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.pinned_bytes.append(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8)

    def fetch(self, host: Sequence[torch.Tensor], memory: Sequence[torch.Tensor]) -> FakeCopying:
        return self._begin(host, memory)

    def put(self, memory: Sequence[torch.Tensor], host: Sequence[torch.Tensor]) -> FakeCopying:
        return self._begin(memory, host)

    def _begin(self, into: Sequence[torch.Tensor], source: Sequence[torch.Tensor]) -> FakeCopying:
        if self.begun == self._fails_after:
            raise RuntimeError("the device failed")
        self.begun += 1
        self.begun_bytes += sum(tensor.numel() for tensor in into)

        def copy() -> None:
            for one, other in zip(into, source, strict=True):
                one.copy_(other)

        return FakeCopying(self, copy)


def on_device(image: Image, copies: FakeCopies) -> Image:
    """The same image, as if it lay on a device."""
    return Image(image.layout, image.regions, copies)

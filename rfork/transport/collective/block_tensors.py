"""Image ranges as one tensor each: in place where they are one run of memory, else through a staging tensor.

So an image of many small tensors costs what its bytes cost, not a message each.
"""

from __future__ import annotations

import torch

from rfork.image.memory import Image


class BlockTensors:
    """Takes ranges of at most `max_bytes` bytes out of an image, and puts them in. Used by one thread.

    `device`: where the group wants its tensors; parts that lie elsewhere go through the staging tensor,
    which is there.
    """

    def __init__(self, image: Image, max_bytes: int, device: torch.device) -> None:
        self._image = image
        self._max_bytes = max_bytes
        self._device = device
        self._staging: torch.Tensor | None = None

    def gather(self, begin: int, end: int) -> torch.Tensor:
        """The bytes of `[begin, end)`, to be sent. On the source, inside `Gate.reading`."""
        parts = self._image.tensor_slices(begin, end)
        if self._is_direct(parts):
            return parts[0]
        block = self._block(end - begin)
        with torch.no_grad():
            torch._foreach_copy_(_cut(block, parts), parts)
        return block

    def destination(self, begin: int, end: int) -> torch.Tensor:
        """Where the bytes of `[begin, end)` are to arrive; `scatter` brings them to where they belong."""
        parts = self._image.tensor_slices(begin, end)
        return parts[0] if self._is_direct(parts) else self._block(end - begin)

    def scatter(self, block: torch.Tensor, begin: int, end: int) -> None:
        """After the bytes have arrived in what `destination` gave."""
        if self._staging is None or block.data_ptr() != self._staging.data_ptr():
            return
        parts = self._image.tensor_slices(begin, end)
        with torch.no_grad():
            torch._foreach_copy_(parts, _cut(block, parts))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def scratch(self, nbytes: int) -> torch.Tensor:
        """Room for bytes that nobody wants any more."""
        return self._block(nbytes)

    def _is_direct(self, parts: list[torch.Tensor]) -> bool:
        return len(parts) == 1 and parts[0].device == self._device

    def _block(self, nbytes: int) -> torch.Tensor:
        if self._staging is None:
            self._staging = torch.empty(self._max_bytes, dtype=torch.uint8, device=self._device)
        return self._staging[:nbytes]


def _cut(block: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The block as pieces of the parts' sizes."""
    return list(torch.split(block, [part.numel() for part in parts]))

"""Maps image ranges to single tensors: in place if the range is contiguous, otherwise through a staging
tensor.

So an image of many small tensors needs one message per block, not one per tensor.
"""

from __future__ import annotations

import torch

from rfork.image.memory import Image


class BlockTensors:
    """Copies image ranges of at most `max_bytes` bytes to and from single tensors. Used by one thread.

    `device`: the device that the group requires. Parts on another device go through the staging tensor, which
    is allocated on `device`.
    """

    def __init__(self, image: Image, max_bytes: int, device: torch.device) -> None:
        self._image = image
        self._max_bytes = max_bytes
        self._device = device
        self._staging: torch.Tensor | None = None

    def gather(self, begin: int, end: int) -> torch.Tensor:
        """Return the bytes of `[begin, end)` for sending. On the source, within `AccessGate.read_guard`.

        The copies run on the current stream; NCCL's stream waits for it before it sends. They need not wait for the
        engine's streams: an image is served once its digest is known, which waits for the weights.
        """
        parts = self._image.tensor_slices(begin, end)
        if self._is_direct(parts):
            return parts[0]
        block = self._block(end - begin)
        with torch.no_grad():
            torch._foreach_copy_(_split_block(block, parts), parts)
        return block

    def destination(self, begin: int, end: int) -> torch.Tensor:
        """Return the tensor to receive `[begin, end)` into; call `scatter` afterwards."""
        parts = self._image.tensor_slices(begin, end)
        return parts[0] if self._is_direct(parts) else self._block(end - begin)

    def scatter(self, block: torch.Tensor, begin: int, end: int) -> None:
        """Copy the received bytes from the tensor returned by `destination` into the image."""
        if self._staging is None or block.data_ptr() != self._staging.data_ptr():
            return
        parts = self._image.tensor_slices(begin, end)
        with torch.no_grad():
            torch._foreach_copy_(parts, _split_block(block, parts))
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def scratch(self, nbytes: int) -> torch.Tensor:
        """Return a tensor for bytes that are received but not needed."""
        return self._block(nbytes)

    def _is_direct(self, parts: list[torch.Tensor]) -> bool:
        return len(parts) == 1 and parts[0].device == self._device

    def _block(self, nbytes: int) -> torch.Tensor:
        if self._staging is None:
            self._staging = torch.empty(self._max_bytes, dtype=torch.uint8, device=self._device)
        return self._staging[:nbytes]


def _split_block(block: torch.Tensor, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Split the block into pieces with the sizes of `parts`."""
    return list(torch.split(block, [part.numel() for part in parts]))

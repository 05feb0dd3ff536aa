"""The other way round: from a layout to tensors, as views of one buffer that holds the image."""

from __future__ import annotations

import torch

from rfork.errors import UnsupportedTensor
from rfork.image.layout import Layout
from rfork.image.strides import byte_extent
from rfork.image.tensor_specs import TensorSpec


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """The torch dtype of a spec. Raises UnsupportedTensor when this torch has none of that name."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedTensor(spec.name, f"this torch has no dtype {spec.dtype!r}")
    return dtype


def tensor_views(layout: Layout, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every tensor of `layout` by name, as a view of `buffer` (uint8, 1-D, `image_bytes` long), which
    holds the image or will. Aliases share memory again, and nothing is copied.

    A tensor that does not lie at a multiple of its item's size (possible only where tensors of
    different item sizes overlap) is still a view on the CPU; other devices cannot read such a one.

    Raises ValueError when the buffer does not fit, UnsupportedTensor for a tensor that cannot be made.
    """
    if buffer.dtype != torch.uint8 or buffer.shape != (layout.image_bytes,) or not buffer.is_contiguous():
        actual = f"{buffer.dtype} {tuple(buffer.shape)}"
        raise ValueError(f"needs a flat uint8 buffer of {layout.image_bytes} bytes, got {actual}")
    return {spec.name: _view(spec, buffer) for spec in layout.tensors}


def allocate_buffer(layout: Layout, device: torch.device | str = "cpu") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A fresh buffer for the image on `device`, of undefined content, and `tensor_views` it."""
    buffer = torch.empty(layout.image_bytes, dtype=torch.uint8, device=device)
    return buffer, tensor_views(layout, buffer)


def _view(spec: TensorSpec, buffer: torch.Tensor) -> torch.Tensor:
    dtype = dtype_of(spec)
    tensor = torch.empty(0, dtype=dtype, device=buffer.device)
    begin, length = spec.offset, byte_extent(spec.shape, spec.stride, dtype.itemsize)
    if begin < 0 or min((*spec.shape, *spec.stride), default=0) < 0 or begin + length > buffer.numel():
        raise UnsupportedTensor(spec.name, f"{spec.describe()} is not within {buffer.numel()} bytes")
    storage, begin = buffer.untyped_storage(), int(buffer.storage_offset()) + begin
    if (storage.data_ptr() + begin) % dtype.itemsize or begin % dtype.itemsize:
        if buffer.device.type != "cpu":
            raise UnsupportedTensor(spec.name, f"byte {spec.offset} is no multiple of its item's size")
        # A storage of its own over the same memory: offsets of storages count whole items.
        storage, begin = storage[begin : begin + length], 0
    return tensor.set_(storage, begin // dtype.itemsize, spec.shape, spec.stride)

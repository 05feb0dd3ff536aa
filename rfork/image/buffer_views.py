"""Creates the tensors of a layout as views of one buffer that contains the image."""

from __future__ import annotations

import torch

from rfork.errors import UnsupportedTensor
from rfork.image.layout import Layout
from rfork.image.strides import byte_extent
from rfork.image.tensor_specs import TensorSpec


def dtype_of(spec: TensorSpec) -> torch.dtype:
    """Return the torch dtype of a spec. Raises UnsupportedTensor if this torch has no such dtype."""
    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedTensor(spec.name, f"this torch has no dtype {spec.dtype!r}")
    return dtype


def tensor_views(layout: Layout, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return every tensor of `layout` by name, as a view of `buffer` (uint8, 1-D, `image_bytes` long).

    Aliases share memory again, and nothing is copied. A tensor whose offset is not a multiple of its item
    size (possible only if tensors of different item sizes overlap) is still a view on the CPU; other devices
    cannot read it.

    Raises ValueError if the buffer does not fit, and UnsupportedTensor for a tensor that cannot be created.
    """
    if buffer.dtype != torch.uint8 or buffer.shape != (layout.image_bytes,) or not buffer.is_contiguous():
        actual = f"{buffer.dtype} {tuple(buffer.shape)}"
        raise ValueError(f"needs a flat uint8 buffer of {layout.image_bytes} bytes, got {actual}")
    return {spec.name: _view(spec, buffer) for spec in layout.tensors}


def allocate_buffer(layout: Layout, device: torch.device | str = "cpu") -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return an uninitialised buffer for the image on `device`, and its `tensor_views`."""
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
            raise UnsupportedTensor(spec.name, f"byte {spec.offset} is not a multiple of the item size")
        # A new storage over the same memory, because storage offsets count complete items.
        storage, begin = storage[begin : begin + length], 0
    return tensor.set_(storage, begin // dtype.itemsize, spec.shape, spec.stride)

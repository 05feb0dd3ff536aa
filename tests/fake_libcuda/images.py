"""Images and modules whose tensors are in the memory of fake devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Literal

import torch
from torch import nn

from rfork.image.layout import Layout, TensorSpec
from rfork.image.memory import Image
from tests.fake_libcuda.fake_gpu import GRANULARITY, FakeGpu

Kind = Literal["legacy", "expandable"]


def pattern(index: int, size: int) -> bytes:
    """Return bytes that differ between tensors and between offsets."""
    period = bytes((position * 7 + index * 13 + 1) % 251 for position in range(251))
    return (period * (size // 251 + 1))[:size]


def patterns(sizes: Sequence[int]) -> bytes:
    """Return the bytes of a filled image with these sizes."""
    return b"".join(pattern(index, size) for index, size in enumerate(sizes))


def device_image(
    gpu: FakeGpu,
    sizes: Sequence[int],
    *,
    on_host: Collection[int] = (),
    filled: bool = False,
    align: int = 512,
    kind: Kind | Sequence[Kind] = "legacy",
    device: int | Sequence[int] = 0,
    piece: int = GRANULARITY,
) -> Image:
    """Return an image of byte tensors in device memory, except those with an index in `on_host`; zeros unless `filled`.

    Tensors are adjacent and aligned to `align` bytes, as with torch's allocator. With sequences of kinds or devices,
    each tensor has an allocation of its own.
    """
    tensors: list[torch.Tensor] = []
    if isinstance(kind, str) and isinstance(device, int):
        padded_sizes = [-(-size // align) * align for size in sizes]
        buffer, at = gpu.allocate(max(sum(padded_sizes), 1), device, kind, piece), 0
        for size, padded_size in zip(sizes, padded_sizes, strict=True):
            tensors.append(buffer[at : at + size])
            at += padded_size
    else:
        kinds = [kind] * len(sizes) if isinstance(kind, str) else kind
        devices = [device] * len(sizes) if isinstance(device, int) else device
        for size, one_device, one_kind in zip(sizes, devices, kinds, strict=True):
            tensors.append(gpu.allocate(max(size, 1), one_device, one_kind, piece)[:size])
    specs: list[TensorSpec] = []
    offset = 0
    for index, size in enumerate(sizes):
        specs.append(TensorSpec(f"t{index}", "uint8", (size,), (1,), offset))
        offset += size
        data = pattern(index, size) if filled else bytes(size)
        if index in on_host:
            tensors[index] = torch.frombuffer(bytearray(data or b"0"), dtype=torch.uint8)[:size]
        elif filled and size:
            gpu.write(tensors[index], data)
    return Image(Layout(tuple(specs), offset), tensors)


def device_bytes(gpu: FakeGpu, image: Image) -> bytes:
    """Return the bytes of an image without the driver."""
    parts: list[bytes] = []
    for region in image.tensor_slices(0, image.layout.image_bytes):
        on_host = gpu.device_of(region).type == "cpu"
        parts.append(bytes(region.numpy()) if on_host else gpu.read(region))
    return b"".join(parts)


def move_to_device(gpu: FakeGpu, module: nn.Module, device: int = 0, kind: Kind = "legacy") -> nn.Module:
    """Replace a module's parameters and buffers by equal ones in device memory; tied parameters stay tied."""
    moved: dict[int, torch.Tensor] = {}

    def on_device(tensor: torch.Tensor) -> torch.Tensor:
        memory = gpu.allocate(max(tensor.nbytes, 1), device, kind)
        if tensor.nbytes:
            gpu.write(memory, bytes(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy()))
        return memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(on_device(parameter), requires_grad=False)
                owner._parameters[name] = moved[id(parameter)]  # type: ignore[assignment]
        for name, buffer in list(owner._buffers.items()):
            if buffer is not None:
                owner._buffers[name] = on_device(buffer)
    return module

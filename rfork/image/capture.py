"""Capture: from a module to its image.

The order of an image is canonical: two processes that build the same module get the same layout,
whatever addresses their allocators chose. It is also the order in which safetensors files are
written, so that an image can be the data section of one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy

from rfork.errors import UnsupportedTensor
from rfork.image.layout import Layout
from rfork.image.memory import Image
from rfork.image.specs import TensorSpec
from rfork.image.strides import contiguous_stride, span_of
from rfork.image.walk import named_tensors

WIDEST_ALIGNMENT = 16
DEVICES = frozenset({"cpu", "cuda"})


def capture(module: nn.Module, *, exclude: Sequence[str] = ()) -> Image:
    """The image of every tensor `module` serves with, less those whose name matches a pattern of `exclude`.

    Patterns are those of `fnmatch`, as ``*.kv_cache.*``. Which tensors are found, and under what
    names, is said at `rfork.image.walk.named_tensors`. Copies nothing: the image's bytes are the
    tensors' own. A tensor that is replaced later (``parameter.data = …``) is no longer in the image.

    Tensors whose bytes overlap in memory are carried once, as one region, with all bytes between the
    first and the last of them; so is a tensor with gaps between its rows. A module without tensors
    gives an empty image.

    Raises UnsupportedTensor, naming the tensor, for one that has no plain bytes in CPU or CUDA memory
    (meta, fake, sparse, quantized, nested, lazy) or whose values are not its bytes (conjugate and
    negative views).
    """
    # Parameter classes of engines override __torch_function__; only plain tensor properties are asked for.
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        tensors = {
            name: tensor
            for name, tensor in named_tensors(module).items()
            if not any(fnmatchcase(name, pattern) for pattern in exclude)
        }
        return image_of(tensors)


def image_of(tensors: Mapping[str, torch.Tensor]) -> Image:
    """The image of named tensors; as `capture`, for tensors that hang on no module."""
    for name, tensor in tensors.items():
        if reason := _why_not(tensor):
            raise UnsupportedTensor(name, reason)
    rank = {name: place for place, name in enumerate(sorted(tensors, key=natural))}
    regions = sorted(_regions(tensors, rank), key=lambda region: (-region.alignment, rank[region.names[0]]))
    specs: list[TensorSpec] = []
    dtypes: dict[torch.dtype, str] = {}
    offset = 0
    for region in regions:
        for name in region.names:
            tensor = tensors[name]
            specs.append(_spec(name, tensor, offset + tensor.data_ptr() - region.begin, dtypes))
        offset += region.end - region.begin
    specs += [_spec(name, tensor, 0, dtypes) for name, tensor in tensors.items() if tensor.numel() == 0]
    specs.sort(key=lambda spec: (spec.offset, rank[spec.name]))
    return Image(Layout(specs, offset), [_bytes_of(region, tensors) for region in regions])


def natural(name: str) -> tuple[tuple[str | int, ...], str]:
    """The key that sorts numbers in names by value: ``layers.2`` before ``layers.10``."""
    parts = re.split(r"([0-9]+)", name)
    return tuple(int(part) if index % 2 else part for index, part in enumerate(parts)), name


def alignment_of(itemsize: int, length: int) -> int:
    """The alignment, in bytes, of a region: the largest power of two that divides its length, at most
    the widest item's size (and at most 16). Regions sorted by it, widest first, need no padding.
    """
    alignment = min(itemsize & -itemsize, WIDEST_ALIGNMENT)
    while length % alignment:
        alignment //= 2
    return alignment


@dataclass(frozen=True, slots=True)
class _Region:
    """Memory `[begin, end)` of tensors whose bytes overlap; their names, naturally sorted."""

    begin: int
    end: int
    itemsize: int
    names: tuple[str, ...]

    @property
    def alignment(self) -> int:
        return alignment_of(self.itemsize, self.end - self.begin)


def _regions(tensors: Mapping[str, torch.Tensor], rank: Mapping[str, int]) -> list[_Region]:
    """One region for each set of tensors that overlap in memory; neighbours that only touch are two."""
    placed: dict[torch.device, list[tuple[int, int, str]]] = {}
    for name, tensor in tensors.items():
        if length := _length(tensor):
            begin = tensor.data_ptr()
            placed.setdefault(tensor.device, []).append((begin, begin + length, name))
    regions: list[_Region] = []
    for spans in placed.values():
        spans.sort()
        first, reached = 0, spans[0][1]
        for place, (begin, end, _) in enumerate(spans):
            if begin >= reached:
                regions.append(_region(spans[first:place], reached, tensors, rank))
                first = place
            reached = max(reached, end)
        regions.append(_region(spans[first:], reached, tensors, rank))
    return regions


def _region(
    spans: Sequence[tuple[int, int, str]],
    end: int,
    tensors: Mapping[str, torch.Tensor],
    rank: Mapping[str, int],
) -> _Region:
    """The region of tensors (first and past last byte, name) that overlap, up to address `end`."""
    if len(spans) == 1:  # nearly always
        begin, _, name = spans[0]
        return _Region(begin, end, tensors[name].itemsize, (name,))
    names = sorted((name for _, _, name in spans), key=rank.__getitem__)
    return _Region(spans[0][0], end, max(tensors[name].itemsize for name in names), tuple(names))


def _bytes_of(region: _Region, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The region's memory as a uint8 tensor that keeps its storage alive."""
    for name in region.names:
        storage = tensors[name].untyped_storage()
        begin = region.begin - storage.data_ptr()
        if begin >= 0 and region.end <= storage.data_ptr() + storage.nbytes():
            memory = torch.empty(0, dtype=torch.uint8, device=tensors[name].device)
            return memory.set_(storage, begin, (region.end - region.begin,), (1,))
    raise UnsupportedTensor(region.names[0], f"overlaps {region.names[-1]!r}, which lies in another storage")


def _spec(name: str, tensor: torch.Tensor, offset: int, dtypes: dict[torch.dtype, str]) -> TensorSpec:
    """`dtypes` keeps the words for types, which cost more than all else here."""
    dtype = dtypes.get(tensor.dtype)
    if dtype is None:
        dtype = dtypes[tensor.dtype] = str(tensor.dtype).removeprefix("torch.")
    shape = tuple(tensor.shape)
    # Strides of dimensions with one element mean nothing; two loaders may well disagree on them.
    stride = contiguous_stride(shape) if tensor.is_contiguous() else tuple(tensor.stride())
    return TensorSpec(name, dtype, shape, stride, offset)


def _length(tensor: torch.Tensor) -> int:
    """The bytes from its first element through its last; 0 when it has none."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return span_of(tensor.shape, tensor.stride(), tensor.itemsize)


def _why_not(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be carried, or None."""
    if is_lazy(tensor):
        return "it is lazy and not initialised yet: run the module once"
    if isinstance(tensor, FakeTensor) or is_functorch_wrapped_tensor(tensor):
        return "it is a stand-in of a tracer or transform, without bytes"
    if tensor.is_nested:
        return "it is nested"
    if tensor.layout != torch.strided:
        return f"its layout is {tensor.layout}, not strided"
    if tensor.device.type not in DEVICES:
        return f"it lies on device {tensor.device}, not in CPU or CUDA memory"
    if tensor.is_quantized:
        return "it is a quantized wrapper: carry its integer values and scales instead"
    if tensor.is_conj() or tensor.is_neg():
        return "it is a conjugate or negative view: resolve it first (resolve_conj, resolve_neg)"
    needed = tensor.storage_offset() * tensor.itemsize + _length(tensor)
    if tensor.numel() and tensor.untyped_storage().nbytes() < needed:
        return f"its storage has {tensor.untyped_storage().nbytes()} bytes, it needs {needed}"
    return None

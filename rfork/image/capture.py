"""Capture: from a module to its image.

The order of an image is canonical: two processes that build the same module get the same layout, whatever
addresses their allocators chose. It is also the order of safetensors files, so an image can be the data
section of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Mapping, Sequence
from fnmatch import translate
from typing import TypeVar

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy

from rfork.errors import UnsupportedTensor
from rfork.image.layout import Layout, SpecType, TensorSpecTable, byte_extent, contiguous_stride
from rfork.image.memory import Image, StorageTable
from rfork.image.module_tensors import BASE_TENSOR_TYPES, state_of_module
from rfork.image.ranges import normalise

MAX_ALIGNMENT = 16
_Value = TypeVar("_Value")
DIGITS_PATTERN = re.compile(r"([0-9]+)")


def capture(
    module: nn.Module, *, exclude: Sequence[str] = (), like: Layout | None = None, wrappers: Sequence[str] = ()
) -> Image:
    """Return the image of everything `module` serves with, except tensors that match a pattern of `exclude`.

    Runs on both sides: source and target must capture equal layouts. Patterns are those of `fnmatch`, such as
    ``*.kv_cache.*``, or complete names. With `like`, only tensors named in that layout are captured, missing
    ones are skipped, and its attributes are kept. A module may have been wrapped since then: attributes named
    in `wrappers` refer to wrapped modules, whose tensors keep their names in `like`.
    `rfork.image.module_tensors.state_of_module` defines which tensors are found and their names. Nothing is
    copied: the image's bytes are the tensors' own. A tensor that is replaced later (``parameter.data = …``) is
    no longer in the image.

    Plain values (numbers, text, flags, enums) on modules and their objects are not bytes of the image. They
    become the layout's attributes, so that a fork between modules that differ in one is rejected; see
    `rfork.image.module_tensors`.

    Tensors whose bytes overlap in memory become one region, with all bytes from the first to the last of
    them; so does a tensor with gaps between its rows. A module without tensors has an empty image.

    Raises UnsupportedTensor, with the name, for a tensor that has no plain bytes in CPU or CUDA memory (meta,
    fake, sparse, quantized, nested, lazy), or whose values are not its bytes (conjugate and negative views);
    for state outside tensors (packed weights, extra state, tensors in sets); and for an excluded tensor that
    lies between the rows of an included one.
    """
    # Engines' parameter classes override __torch_function__, but only plain tensor properties are needed.
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        is_excluded = _matcher(exclude)
        state = state_of_module(module, is_excluded)
        excluded_tensors: dict[str, torch.Tensor] = {}
        if like is not None:
            names = {spec.name for spec in like.tensors}
            tensors = _named_like(names, state.tensors, wrappers)
            refused = _named_like(names, state.refused, wrappers)
            attributes = like.attributes
        else:
            refused = state.refused
            tensors = state.tensors
            if is_excluded is not None:
                tensors = {name: tensor for name, tensor in tensors.items() if not is_excluded(name)}
                excluded_tensors = {name: tensor for name, tensor in state.tensors.items() if name not in tensors}
                refused = {name: reason for name, reason in refused.items() if not is_excluded(name)}
            attributes = state.attributes.lines(is_excluded)
        if refused:
            name, reason = next(iter(refused.items()))
            raise UnsupportedTensor(name, reason, hint=_exclusion_hint(name))
        image = image_from_tensors(tensors, attributes)
        if excluded_tensors:
            _refuse_interleaved(tensors, excluded_tensors)
        return image


def _named_like(names: Container[str], found: Mapping[str, _Value], wrappers: Container[str]) -> dict[str, _Value]:
    """Return the entries whose name, with or without the attributes of wrappers, is in `names`."""
    kept = {name: value for name, value in found.items() if name in names}
    if wrappers:
        for name, value in found.items():
            if name not in kept:
                unwrapped = ".".join(part for part in name.split(".") if part not in wrappers)
                if unwrapped in names:
                    kept.setdefault(unwrapped, value)
    return kept


def image_from_tensors(tensors: Mapping[str, torch.Tensor], attributes: Sequence[str] = ()) -> Image:
    """Return the image of named tensors; like `capture`, for tensors without a module."""
    # Column lists: with one object per tensor, garbage collection would dominate the time spent here.
    lengths = {name: _byte_length(name, tensor) for name, tensor in tensors.items()}
    names = sorted(tensors, key=natural_sort_key)
    ordered = [tensors[name] for name in names]
    begins = [tensor.data_ptr() for tensor in ordered]
    ends = [begin + lengths[name] for begin, name in zip(begins, names, strict=True)]
    offsets = [0] * len(names)
    storages: list[torch.UntypedStorage] = []
    addresses: list[int] = []
    sizes: list[int] = []
    image_bytes = 0
    for members in _regions(ordered, begins, ends):
        if len(members) == 1:  # the common case
            first, begin, end = members[0], begins[members[0]], ends[members[0]]
            offsets[first] = image_bytes
            storages.append(ordered[first].untyped_storage())
        else:
            begin, end = min(begins[index] for index in members), max(ends[index] for index in members)
            for index in members:
                offsets[index] = image_bytes + begins[index] - begin
            storages.append(_storage_of(begin, end, {names[index]: ordered[index] for index in members}))
        addresses.append(begin)
        sizes.append(end - begin)
        image_bytes += end - begin
    by_offset = sorted(range(len(names)), key=offsets.__getitem__)
    known_types: dict[tuple[torch.dtype, torch.Size], SpecType] = {}
    specs = TensorSpecTable.of_columns(
        [names[index] for index in by_offset],
        [_spec_type(ordered[index], known_types) for index in by_offset],
        [offsets[index] for index in by_offset],
    )
    return Image(Layout(specs, image_bytes, attributes), StorageTable(storages, addresses, sizes))


def natural_sort_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """Return a sort key that orders numbers in names by value: ``layers.2`` before ``layers.10``."""
    parts: list[str | int] = DIGITS_PATTERN.split(name)
    parts[1::2] = map(int, parts[1::2])
    return tuple(parts), name


def alignment_of(itemsize: int, length: int) -> int:
    """Return the alignment of a region in bytes.

    It is the largest power of two that divides its length, at most the widest item size, and at most 16.
    Regions sorted by alignment, widest first, need no padding.
    """
    return min(itemsize & -itemsize, MAX_ALIGNMENT, length & -length)


def _matcher(exclude: Sequence[str]) -> Callable[[str], object] | None:
    """Return a function that is true for excluded names; None if nothing is excluded."""
    if not exclude:
        return None
    return re.compile("|".join(f"{translate(pattern)}|{re.escape(pattern)}\\Z" for pattern in exclude)).match


def _exclusion_hint(name: str) -> str:
    """Return the hint for state that cannot be captured."""
    return f"to fork without it, pass exclude=[{name!r}] on both sides and initialise it yourself"


def _refuse_interleaved(kept: Mapping[str, torch.Tensor], excluded: Mapping[str, torch.Tensor]) -> None:
    """Raise UnsupportedTensor for an excluded tensor whose bytes lie between the rows of an included one."""
    gappy: list[tuple[int, int, str]] = []
    dense: list[tuple[int, int]] = []
    for name, tensor in kept.items():
        begin = tensor.data_ptr()
        if tensor.is_contiguous():
            dense.append((begin, begin + tensor.nbytes))
        else:
            gappy.append((begin, begin + byte_extent(tensor.shape, tensor.stride(), tensor.itemsize), name))
    if not gappy:
        return
    dense_ranges = normalise(dense)
    for name, tensor in excluded.items():
        if _unsupported_reason(tensor):
            continue
        begin = tensor.data_ptr()
        end = begin + byte_extent(tensor.shape, tensor.stride(), tensor.itemsize)
        for kept_begin, kept_end, kept_name in gappy:
            if not (begin < kept_end and kept_begin < end) or _same_elements(tensor, kept[kept_name]):
                continue
            if any(dense_begin <= begin and end <= dense_end for dense_begin, dense_end in dense_ranges):
                continue  # an included tensor covers all of it
            raise UnsupportedTensor(
                name,
                f"it is excluded, but lies between the elements of {kept_name!r}, which is not",
                hint=f"exclude both or neither, or make {kept_name!r} contiguous",
            )


def _same_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def _regions(tensors: Sequence[torch.Tensor], begins: Sequence[int], ends: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the indices of each set of tensors that overlap in memory, ascending; the sets in image order.

    Adjacent tensors form separate sets. Tensors without bytes are in none.
    """
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if begins[index] < ends[index]:
            by_device.setdefault(tensor.device, []).append(index)
    regions: list[tuple[int, ...]] = []
    for indices in by_device.values():
        indices.sort(key=begins.__getitem__)
        start, region_end = 0, ends[indices[0]]
        for position, index in enumerate(indices):
            if begins[index] >= region_end:
                regions.append((indices[start],) if position - start == 1 else tuple(sorted(indices[start:position])))
                start = position
            region_end = max(region_end, ends[index])
        regions.append(tuple(sorted(indices[start:])))

    def sort_key(members: tuple[int, ...]) -> int:
        """Sort by descending alignment, then by first name."""
        begin, end = begins[members[0]], ends[members[0]]
        itemsize = tensors[members[0]].itemsize
        if len(members) > 1:
            begin, end = min(begins[index] for index in members), max(ends[index] for index in members)
            itemsize = max(tensors[index].itemsize for index in members)
        return members[0] - len(tensors) * alignment_of(itemsize, end - begin)

    regions.sort(key=sort_key)
    return regions


def _storage_of(begin: int, end: int, tensors: Mapping[str, torch.Tensor]) -> torch.UntypedStorage:
    """Return the storage that contains the memory `[begin, end)` of overlapping tensors."""
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        if storage.data_ptr() <= begin and end <= storage.data_ptr() + storage.nbytes():
            return storage
    first, *_, last = tensors
    raise UnsupportedTensor(first, f"overlaps {last!r}, which lies in another storage")


def _spec_type(tensor: torch.Tensor, known: dict[tuple[torch.dtype, torch.Size], SpecType]) -> SpecType:
    """Return the type of one tensor; `known` caches types, because formatting them would dominate the time."""
    dtype, shape = tensor.dtype, tensor.shape
    if not tensor.is_contiguous():
        return _dtype_name(dtype), tuple(shape), tuple(tensor.stride())
    spec_type = known.get((dtype, shape))
    if spec_type is None:
        # Strides of dimensions with one element are meaningless, and loaders may disagree on them.
        spec_type = known[dtype, shape] = _dtype_name(dtype), tuple(shape), contiguous_stride(shape)
    return spec_type


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _byte_length(name: str, tensor: torch.Tensor) -> int:
    """Return the number of bytes from the first element to the last; 0 if there are none. Raises UnsupportedTensor."""
    if reason := _unsupported_reason(tensor):
        raise UnsupportedTensor(name, reason, hint=_exclusion_hint(name))
    if tensor.is_contiguous():
        length: int = tensor.nbytes
    else:
        length = byte_extent(tensor.shape, tensor.stride(), tensor.itemsize)
    storage_bytes = tensor.untyped_storage().nbytes()
    needed = tensor.storage_offset() * tensor.itemsize + length
    if length and storage_bytes < needed:
        raise UnsupportedTensor(name, f"its storage has {storage_bytes} bytes, but it needs {needed}")
    if length and not tensor.data_ptr():
        raise UnsupportedTensor(
            name,
            f"it is a {type(tensor).__name__} of {length} bytes without an address, such as a wrapper without "
            "__tensor_flatten__",
            hint=_exclusion_hint(name),
        )
    return length


def _unsupported_reason(tensor: torch.Tensor) -> str | None:
    """Return why a tensor cannot be captured, or None."""
    if not issubclass(type(tensor), torch.Tensor):
        return f"it is of type {type(tensor).__name__}, not a tensor"
    if type(tensor) not in BASE_TENSOR_TYPES and is_lazy(tensor):
        return "it is lazy and not initialised yet: run the module once"
    if isinstance(tensor, FakeTensor) or is_functorch_wrapped_tensor(tensor):
        return "it is a placeholder of a tracer or transform, without bytes"
    if tensor.is_nested:
        return "it is nested"
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}, not strided"
    if not (tensor.is_cpu or tensor.is_cuda):
        return f"it is on device {tensor.device}, not in CPU or CUDA memory"
    if tensor.is_quantized:
        return "it is a quantized wrapper: use its integer values and scales instead"
    if tensor.is_conj() or tensor.is_neg():
        return "it is a conjugate or negative view: resolve it first (resolve_conj, resolve_neg)"
    return None

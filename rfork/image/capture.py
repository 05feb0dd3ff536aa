"""Capture: from a module to its image.

The order of an image is canonical: two processes that build the same module get the same layout, whatever
addresses their allocators chose. It is also the order of safetensors files, so an image can be the data
section of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import translate
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy

from rfork.errors import LayoutMismatch, UnsupportedTensor
from rfork.gc_pause import gc_paused
from rfork.image.layout import Layout, SpecType, TensorSpecTable, byte_extent, contiguous_stride
from rfork.image.leaf_plan import Column
from rfork.image.memory import Image, StorageTable
from rfork.image.module_tensors import BASE_TENSOR_TYPES, Attributes, ModuleTensors, state_of_module
from rfork.image.ranges import normalise

MAX_ALIGNMENT = 16
_Value = TypeVar("_Value")
ADDRESS_TYPES = frozenset({torch.int64, torch.uint64})
MAX_ADDRESSES = 1 << 16
"""Maximum elements of a tensor that may be a table of addresses."""
BATCH_COUNTER = "num_batches_tracked"
"""Buffer of torch's normalisation layers. It is never an address, but leftover memory in a module of `to_empty`."""
WILDCARDS = frozenset("*?[")
"""Characters with a meaning in patterns of `fnmatch`."""
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
    for state outside tensors (packed weights, extra state, tensors in sets); for tables of addresses; and for an
    excluded tensor that lies between the rows of an included one.
    """
    with _reading_modules():
        return _image_of(state_of_module(module, _matcher(exclude)), exclude, like, wrappers)


def plain_values(module: nn.Module, exclude: Sequence[str] = ()) -> Attributes:
    """Return the plain values of a module; see `capture`."""
    with _reading_modules():
        return state_of_module(module, _matcher(exclude)).attributes


def recapture(
    module: nn.Module,
    layout: Layout,
    *,
    exclude: Sequence[str] = (),
    wrappers: Sequence[str] = (),
    values: Attributes | None = None,
) -> Image:
    """Return an image of the tensors of `layout` where they are now, without tensors attached to the module since.

    The parameters are those of `capture`; `values`, if given, are the module's `plain_values` when the layout was
    captured. Raises LayoutMismatch if a tensor is missing or has another type, or if one of the values has changed,
    and UnsupportedTensor.
    """
    with _reading_modules():
        state = state_of_module(module, _matcher(exclude))
        if values is not None and (change := state.attributes.change_since(values, _matcher(exclude))):
            raise LayoutMismatch(change)
        image = _image_of(state, exclude, layout, wrappers)
    if difference := layout.first_difference(image.layout):
        raise LayoutMismatch(difference)
    return image


@contextmanager
def _reading_modules() -> Iterator[None]:
    # Engines' parameter classes override __torch_function__, but only plain tensor properties are needed.
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass(), gc_paused():
        yield


def _image_of(state: ModuleTensors, exclude: Sequence[str], like: Layout | None, wrappers: Sequence[str]) -> Image:
    """Return the image of a module's state; see `capture`."""
    is_excluded = _matcher(exclude)
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
    if like is None:
        _refuse_addresses(tensors, image)
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


class TensorColumns(NamedTuple):
    """Properties of tensors, one list per property.

    With one object per tensor, creating them and collecting garbage would dominate the time of a capture.
    """

    storages: list[torch.UntypedStorage]
    begins: list[int]
    """Addresses."""
    lengths: list[int]
    """Bytes from the first element to the last; 0 if there are none."""
    itemsizes: list[int]
    devices: list[int]
    """Index of the GPU, -1 for the CPU."""
    spec_types: list[SpecType]


def image_from_tensors(tensors: Mapping[str, torch.Tensor], attributes: Sequence[str] = ()) -> Image:
    """Return the image of named tensors; like `capture`, for tensors without a module."""
    names = sorted(tensors, key=natural_sort_key)
    columns = _columns(names, [tensors[name] for name in names])
    firsts, groups = _regions(columns)
    begins, lengths = np.array(columns.begins, np.int64), np.array(columns.lengths, np.int64)
    storages = [columns.storages[first] for first in firsts]
    region_begins, region_lengths = begins[firsts], lengths[firsts]
    for position, members in groups.items():
        begin, end = int(begins[members].min()), int((begins[members] + lengths[members]).max())
        region_begins[position], region_lengths[position] = begin, end - begin
        storages[position] = _storage_of(begin, end, {names[index]: tensors[names[index]] for index in members})
    region_offsets = np.cumsum(region_lengths) - region_lengths
    offsets = np.zeros(len(names), np.int64)
    offsets[firsts] = region_offsets
    for position, members in groups.items():
        offsets[members] = region_offsets[position] + begins[members] - region_begins[position]
    by_offset = np.argsort(offsets, kind="stable")
    order = by_offset.tolist()
    specs = TensorSpecTable.of_columns(
        [names[index] for index in order],
        [columns.spec_types[index] for index in order],
        offsets[by_offset].tolist(),
    )
    table = StorageTable(storages, region_begins.tolist(), region_lengths.tolist())
    return Image(Layout(specs, int(region_lengths.sum()), attributes), table)


def _columns(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> TensorColumns:
    """Return the columns of these tensors. Raises UnsupportedTensor."""
    storages, begins, lengths, itemsizes, devices, spec_types = columns = TensorColumns([], [], [], [], [], [])
    are_on_cpu: dict[int, bool] = {}
    known_types: dict[tuple[torch.dtype, torch.Size], tuple[SpecType, int, int]] = {}
    for name, tensor in zip(names, tensors, strict=True):
        # Each property that makes a plain tensor's bytes unusable (sparse, quantized, conjugate, …) has a dispatch key.
        keys = torch._C._dispatch_keys(tensor).raw_repr() if type(tensor) in BASE_TENSOR_TYPES else None
        is_on_cpu = None if keys is None else are_on_cpu.get(keys)
        if is_on_cpu is None:
            if reason := _unsupported_reason(tensor):
                raise UnsupportedTensor(name, reason, hint=_exclusion_hint(name))
            is_on_cpu = tensor.is_cpu
            if keys is not None:
                are_on_cpu[keys] = is_on_cpu
        storage, begin = tensor.untyped_storage(), tensor.data_ptr()
        if tensor.is_contiguous():
            shape = tensor.shape
            known = known_types.get((tensor.dtype, shape))
            if known is None:
                # Strides of dimensions with one element are meaningless, and loaders may disagree on them.
                spec_type = _dtype_name(tensor.dtype), tuple(shape), contiguous_stride(shape)
                known = known_types[tensor.dtype, shape] = spec_type, tensor.nbytes, tensor.itemsize
            spec_type, length, itemsize = known
        else:
            itemsize = tensor.itemsize
            spec_type = _dtype_name(tensor.dtype), tuple(tensor.shape), tuple(tensor.stride())
            length = byte_extent(tensor.shape, tensor.stride(), itemsize)
        if length:
            storage_bytes = storage.nbytes()
            needed = tensor.storage_offset() * itemsize + length
            if storage_bytes < needed:
                raise UnsupportedTensor(name, f"its storage has {storage_bytes} bytes, but it needs {needed}")
            if not begin:
                raise UnsupportedTensor(
                    name,
                    f"it is a {type(tensor).__name__} of {length} bytes without an address, such as a wrapper without "
                    "__tensor_flatten__",
                    hint=_exclusion_hint(name),
                )
        storages.append(storage)
        begins.append(begin)
        lengths.append(length)
        itemsizes.append(itemsize)
        devices.append(-1 if is_on_cpu else tensor.get_device())
        spec_types.append(spec_type)
    return columns


def natural_sort_key(name: str) -> tuple[tuple[str | int, ...], str]:
    """Return a sort key that orders numbers in names by value: ``layers.2`` before ``layers.10``."""
    parts: list[str | int] = DIGITS_PATTERN.split(name)
    parts[1::2] = map(int, parts[1::2])
    return tuple(parts), name


def alignment_of(itemsize: Column, length: Column) -> Column:
    """Return the alignment of regions in bytes.

    It is the largest power of two that divides a region's length, at most the widest item size, and at most 16.
    Regions sorted by alignment, widest first, need no padding.
    """
    alignment: Column = np.minimum(np.minimum(itemsize & -itemsize, MAX_ALIGNMENT), length & -length)
    return alignment


def _matcher(exclude: Sequence[str]) -> Callable[[str], object] | None:
    """Return a function that is true for excluded names; None if nothing is excluded."""
    if not exclude:
        return None
    # A model has thousands of names, and a regular expression that begins with ``.*`` tries each of their positions.
    names = frozenset(exclude)
    suffixes: list[str] = []
    infixes: list[str] = []
    others: list[str] = []
    for pattern in exclude:
        text = pattern.strip("*")
        if WILDCARDS.intersection(text) or not pattern.startswith("*"):
            others.append(translate(pattern))
        elif pattern.endswith("*"):
            infixes.append(text)
        else:
            suffixes.append(text)
    ends, match = tuple(suffixes), re.compile("|".join(others)).match if others else None

    def is_excluded(name: str) -> bool:
        return (
            name in names
            or name.endswith(ends)
            or any(text in name for text in infixes)
            or (match is not None and match(name) is not None)
        )

    return is_excluded


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


def _refuse_addresses(tensors: Mapping[str, torch.Tensor], image: Image) -> None:
    """Raise UnsupportedTensor for a table of addresses of the image, such as the arguments of a grouped kernel.

    The addresses of the source are wrong in the target. Tables in GPU memory are not read. A table contains nothing
    else, and the beginning of a tensor: single addresses are also left over in uninitialised memory.
    """
    begins = np.array(image.runs.addresses, np.uint64)
    order = np.argsort(begins)
    begins, ends = begins[order], (begins + np.array(image.runs.lengths, np.uint64))[order]
    for name, tensor in tensors.items():
        if tensor.dtype not in ADDRESS_TYPES or not tensor.is_cpu or not 0 < tensor.numel() <= MAX_ADDRESSES:
            continue
        if name.rpartition(".")[2] == BATCH_COUNTER:
            continue
        values = tensor.detach().reshape(-1).numpy().view(np.uint64)
        values = values[values != 0]
        runs = np.searchsorted(begins, values, side="right").astype(np.int64) - 1
        if not values.size or np.any((runs < 0) | (values >= ends[np.maximum(runs, 0)])):
            continue
        if any(each.data_ptr() in values for each in tensors.values()):
            raise UnsupportedTensor(
                name,
                "it contains addresses of the module's own memory, which are others in each process",
                hint=_exclusion_hint(name),
            )


def _same_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def _regions(columns: TensorColumns) -> tuple[Column, dict[int, Column]]:
    """Return the regions in image order: the first tensor of each, and all tensors of those that have several.

    A region is a set of tensors that overlap in memory. Adjacent tensors are in separate regions, and tensors without
    bytes are in none. The order is by descending alignment, then by first tensor. Several tensors are given by the
    position of their region, in ascending order.
    """
    begins, lengths = np.array(columns.begins, np.int64), np.array(columns.lengths, np.int64)
    itemsizes, devices = np.array(columns.itemsizes, np.int64), np.array(columns.devices, np.int64)
    ends = begins + lengths
    found: list[Column] = []
    groups: dict[int, Column] = {}
    alignments = np.zeros(len(begins), np.int64)  # of the region that starts with this tensor
    for device in set(columns.devices):
        indices = np.flatnonzero((devices == device) & (lengths > 0))
        indices = indices[np.argsort(begins[indices], kind="stable")]
        if not len(indices):
            continue
        reached = np.maximum.accumulate(ends[indices])
        starts = np.flatnonzero(np.append(True, begins[indices][1:] >= reached[:-1]))
        counts = np.diff(np.append(starts, len(indices)))
        single = indices[starts[counts == 1]]
        alignments[single] = alignment_of(itemsizes[single], lengths[single])
        found.append(single)
        for start, count in zip(starts[counts > 1].tolist(), counts[counts > 1].tolist(), strict=True):
            members = np.sort(indices[start : start + count])
            length = ends[members].max() - begins[members].min()
            alignments[members[0]] = alignment_of(itemsizes[members].max(), length)
            groups[int(members[0])] = members
            found.append(members[:1])
    firsts = np.concatenate([*found, np.zeros(0, np.int64)])
    firsts = firsts[np.lexsort((firsts, -alignments[firsts]))]
    if not groups:
        return firsts, {}
    positions = {first: position for position, first in enumerate(firsts.tolist())}
    return firsts, {positions[first]: members for first, members in groups.items()}


def _storage_of(begin: int, end: int, tensors: Mapping[str, torch.Tensor]) -> torch.UntypedStorage:
    """Return the storage that contains the memory `[begin, end)` of overlapping tensors."""
    for tensor in tensors.values():
        storage = tensor.untyped_storage()
        if storage.data_ptr() <= begin and end <= storage.data_ptr() + storage.nbytes():
            return storage
    first, *_, last = tensors
    raise UnsupportedTensor(first, f"overlaps {last!r}, which lies in another storage")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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

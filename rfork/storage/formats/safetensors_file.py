"""Reads and checks the header of one safetensors file, and writes plain files for every Hugging Face tool.

Format: https://github.com/huggingface/safetensors. Checks what safetensors requires: the tensors cover the
data section without holes or overlaps, and the length of each matches its dtype and shape.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import NamedTuple

import torch
from pydantic import JsonValue
from pydantic_core import from_json

from rfork.errors import CheckpointError, RforkError, StorageCorrupt
from rfork.gc_pause import gc_paused
from rfork.image.host_memory import host_view
from rfork.image.layout import Layout, byte_extent, contiguous_stride, dtype_of
from rfork.image.safetensors_header import DTYPES, LAYOUT_KEY, MAX_HEADER_BYTES, header_length, layout_of
from rfork.storage.blob import Blob, BlobStore, read_range
from rfork.storage.tensors import TensorOutline

FIRST_READ = 128 << 10
"""Bytes to read first; usually includes the complete header, so that one request suffices."""

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    **{word: getattr(torch, name) for name, word in DTYPES.items()},
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    **({"F8_E8M0": torch.float8_e8m0fnu} if hasattr(torch, "float8_e8m0fnu") else {}),
}
SUBBYTE_DTYPES: Mapping[str, torch.dtype] = {"F4": torch.float4_e2m1fn_x2} if hasattr(torch, "float4_e2m1fn_x2") else {}
"""Dtypes of which torch packs two elements in one item: the last dimension halves."""

ALIGNMENT = 8
"""Alignment of the data section, as in safetensors' own writer."""


class TensorLocation(NamedTuple):
    """Location of a tensor: `nbytes` bytes of a blob from `offset`, from the first element to the last.

    `stride` counts elements; None: contiguous.
    """

    name: str
    blob: Blob
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file: its tensors by name in storage order, including aliases.

    `begin` is the offset of its data section; `head_digest` covers all bytes before it. `aliases` are names
    that the header does not list as tensors. `layout` is set for a snapshot.
    """

    name: str
    blob: Blob
    begin: int
    head_digest: bytes
    locations: Mapping[str, TensorLocation]
    aliases: frozenset[str]
    layout: Layout | None


def read_shard(name: str, blob: Blob) -> Shard:
    """Read and check the header of a file. Raises StorageCorrupt with a one-line message, or the blob's
    errors.
    """
    head = read_range(blob, 0, min(blob.size, FIRST_READ))
    try:
        begin = header_length(head[:8])
    except RforkError as error:
        raise _corrupt(blob, str(error)) from None
    if begin > blob.size:
        raise _corrupt(blob, f"truncated: {blob.size} bytes, but the header alone has {begin}")
    if begin > len(head):
        head += read_range(blob, len(head), begin - len(head))
    with gc_paused():
        return _shard(name, blob, head[:begin])


def _shard(name: str, blob: Blob, head: bytes) -> Shard:
    locations, metadata = _entries(blob, head)
    layout = None
    if LAYOUT_KEY in metadata:
        stored = frozenset(locations)
        layout, locations = _tensors_from_layout(blob, head)
        aliases = frozenset(locations) - stored
    else:
        aliases = _add_aliases(locations, metadata)
        if aliases:
            locations = dict(sorted(locations.items(), key=lambda item: item[1].offset))
    return Shard(name, blob, len(head), hashlib.sha256(head).digest(), locations, aliases, layout)


def _entries(blob: Blob, head: bytes) -> tuple[dict[str, TensorLocation], Mapping[str, JsonValue]]:
    begin, size = len(head), blob.size - len(head)
    if head[8:9] != b"{":
        raise _corrupt(blob, "the header is not a JSON object")
    try:
        header = from_json(head[8:], cache_strings="keys", allow_inf_nan=False)
    except ValueError as error:
        raise _corrupt(blob, f"the header cannot be parsed: {error}") from None
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise _corrupt(blob, "__metadata__ in the header is not an object")
    spec_cache = _HeaderTypeCache(blob)
    found: list[TensorLocation] = []
    for name, entry in header.items():
        try:
            dtype_and_shape = entry["dtype"], *entry["shape"]
            first, last = entry["data_offsets"]
            dtype, shape, nbytes = spec_cache[dtype_and_shape]
            if type(first) is type(last) is int and first >= 0 and last - first == nbytes:
                found.append(TensorLocation(name, blob, begin + first, nbytes, dtype, shape))
                continue
        except (KeyError, TypeError, ValueError):
            raise _corrupt(blob, f"the header entry of {name} is invalid") from None
        actual_text = f"{list(shape)} {dtype_and_shape[0]}, {nbytes} bytes, but its offsets are {first} to {last}"
        raise _corrupt(blob, f"{name} is {actual_text}")
    found.sort(key=itemgetter(3))  # of tensors with the same offset, empty ones come first
    found.sort(key=itemgetter(2))
    end = begin
    for name, _, offset, nbytes, _, _, _ in found:
        if offset != end:
            what = "overlaps the previous tensor" if offset < end else "follows a gap"
            raise _corrupt(blob, f"{name} {what}, at byte {offset - begin} of the data")
        end = offset + nbytes
    reached = end - begin
    if reached > size:
        raise _corrupt(blob, f"truncated: {size} bytes of data, but the header lists {reached}")
    if reached < size:
        raise _corrupt(blob, f"{size - reached} trailing bytes that the header does not list")
    return {location[0]: location for location in found}, metadata


class _HeaderTypeCache(dict[tuple[str | int, ...], tuple[torch.dtype, tuple[int, ...], int]]):
    """Maps dtype and shape from the header to torch dtype, shape and bytes; most tensors of a model share a
    few.
    """

    def __init__(self, blob: Blob) -> None:
        self._blob = blob

    def __missing__(self, dtype_and_shape: tuple[str | int, ...]) -> tuple[torch.dtype, tuple[int, ...], int]:
        word, *sizes = dtype_and_shape
        shape = tuple(size for size in sizes if type(size) is int and size >= 0)
        if len(shape) != len(sizes):
            raise ValueError(f"{sizes} is not a valid shape")
        dtype = TORCH_DTYPES.get(str(word))
        if dtype is None and word in SUBBYTE_DTYPES and shape and shape[-1] % 2 == 0:
            dtype, shape = SUBBYTE_DTYPES[str(word)], (*shape[:-1], shape[-1] // 2)
        if dtype is None:
            raise _corrupt(self._blob, f"the header uses an unknown dtype, {word!r}")
        value = self[dtype_and_shape] = dtype, shape, math.prod(shape) * dtype.itemsize
        return value


def _add_aliases(locations: dict[str, TensorLocation], metadata: Mapping[str, JsonValue]) -> frozenset[str]:
    """Add the names of tied tensors, which `safetensors.torch.save_model` writes as ``alias: kept name``."""
    added: set[str] = set()
    for alias, kept in metadata.items():
        # Every file contains ``format: pt``, which might also be the name of a tensor.
        if alias != "format" and isinstance(kept, str) and kept in locations and alias not in locations:
            locations[alias] = locations[kept]._replace(name=alias)
            added.add(alias)
    return frozenset(added)


def _tensors_from_layout(blob: Blob, head: bytes) -> tuple[Layout, dict[str, TensorLocation]]:
    """Return the tensors of a snapshot from its layout: with strides, packed dtypes and aliases."""
    try:
        layout = layout_of(head)
        if len(head) + layout.image_bytes != blob.size:
            follow = blob.size - len(head)
            raise _corrupt(blob, f"its layout has {layout.image_bytes} bytes, but {follow} bytes follow the header")
        return layout, {location.name: location for location in _layout_locations(blob, len(head), layout)}
    except StorageCorrupt:
        raise
    except RforkError as error:
        raise _corrupt(blob, str(error)) from None


def _layout_locations(blob: Blob, begin: int, layout: Layout) -> Iterator[TensorLocation]:
    known: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[torch.dtype, int, bool]] = {}
    for spec in layout.tensors:
        spec_key = spec[1:4]
        if spec_key not in known:
            dtype = dtype_of(spec)
            if len(spec.shape) != len(spec.stride) or min((*spec.shape, *spec.stride), default=0) < 0:
                raise _corrupt(blob, f"the layout entry of {spec.name} is invalid")
            nbytes = byte_extent(spec.shape, spec.stride, dtype.itemsize)
            known[spec_key] = dtype, nbytes, spec.stride == contiguous_stride(spec.shape)
        dtype, nbytes, plain = known[spec_key]
        if not 0 <= spec.offset <= layout.image_bytes - nbytes:
            raise _corrupt(blob, f"{spec.name} is outside of the snapshot's {layout.image_bytes} bytes")
        stride = None if plain else spec.stride
        yield TensorLocation(spec.name, blob, begin + spec.offset, nbytes, dtype, spec.shape, stride)


def _corrupt(blob: Blob, why: str) -> StorageCorrupt:
    return StorageCorrupt(f"{blob.uri}: {why}", hint="download the checkpoint again")


def in_file_order(outlines: Sequence[TensorOutline]) -> list[TensorOutline]:
    """Sort by decreasing item size, then by name, like safetensors' own writer; this aligns all tensors."""
    return sorted(outlines, key=lambda outline: (-outline.spec.dtype.itemsize, outline.name))


def write_safetensors(
    store: BlobStore,
    name: str,
    outlines: Sequence[TensorOutline],
    tensors: Iterator[torch.Tensor],
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write one file; `tensors` must be contiguous, in host memory and in the order of `outlines`.

    Raises CheckpointError, before anything is written, if safetensors cannot represent a tensor; StorageError
    subclasses.
    """
    head = header_of(outlines)
    with store.write(name) as writer:
        writer.write([memoryview(head)])
        for outline, tensor in zip(outlines, tensors, strict=False):
            if tensor.nbytes != outline.spec.nbytes or not tensor.is_contiguous():
                raise ValueError(f"{outline.name} does not match its outline")
            if tensor.nbytes:
                writer.write([host_view(tensor.data_ptr(), tensor.nbytes)])
            if progress is not None:
                progress(tensor.nbytes)


def header_of(outlines: Sequence[TensorOutline]) -> bytes:
    """Return the header of a file; raises CheckpointError if safetensors cannot represent a tensor."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for outline in outlines:
        dtype = DTYPES.get(str(outline.spec.dtype).removeprefix("torch."))
        if dtype is None or outline.name == "__metadata__":
            raise CheckpointError(
                f"{outline.name} ({outline.spec.dtype}) cannot be stored in a safetensors file",
                hint="a .tensors file or a snapshot can store tensors of every dtype",
            )
        end = at + outline.spec.nbytes
        entries[outline.name] = {"dtype": dtype, "shape": outline.spec.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    padded = -(-len(text) // ALIGNMENT) * ALIGNMENT
    if padded > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the safetensors header would have {padded} bytes; readers accept at most {MAX_HEADER_BYTES}",
            hint="write several files: pass a folder and a shard size",
        )
    return struct.pack("<Q", padded) + text.ljust(padded)

"""Header of a safetensors file whose data section is an image.

With it in front, the bytes of an image are a file that every safetensors tool reads, and chunk `[a, b)` is
file range `[header + a, header + b)`. Format: https://github.com/huggingface/safetensors.

What safetensors cannot express (strides, aliases, small and packed types) is kept in ``__metadata__``:
``rfork.layout`` is the layout's size and tensors as JSON, ``rfork.attributes`` its attributes,
``rfork.weights_id`` the weights_id, and each exact alias has an entry ``alias: kept name``, as
`safetensors.torch.save_model` writes it.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from json.encoder import encode_basestring_ascii as quoted

from pydantic import JsonValue, TypeAdapter, ValidationError

from rfork.errors import CheckpointError, StorageCorrupt, StorageError
from rfork.image.layout import Layout, TensorSpec, byte_extent, contiguous_stride, dtype_of

ALIGNMENT = 4096
"""The data section starts at a multiple of this, padded with spaces after the JSON. As it is a page, the file
can be mapped with aligned tensors, and read and written with O_DIRECT in page-aligned chunks.
"""

MAX_HEADER_BYTES = 100_000_000
"""safetensors readers reject longer headers."""

MAX_NAMED_TENSORS = 100_000
"""Maximum number of tensors listed in a live image's header: 0.3 s of work and 25 MB per export."""

LAYOUT_KEY, ATTRIBUTES_KEY, WEIGHTS_KEY = "rfork.layout", "rfork.attributes", "rfork.weights_id"

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
    "bool": "BOOL", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
"""Types that every reader since safetensors 0.4 knows."""

_Spec = tuple[str, str, tuple[int, ...], tuple[int, ...], int]
_layout_json: TypeAdapter[tuple[int, tuple[_Spec, ...]]] = TypeAdapter(tuple[int, tuple[_Spec, ...]])
_attributes_json: TypeAdapter[tuple[str, ...]] = TypeAdapter(tuple[str, ...])
_header_json: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])


def header(layout: Layout, weights_id: str | None = None) -> bytes:
    """Return the 8-byte length and the JSON header; their total length is a multiple of 4096.

    A region covered by one contiguous tensor of a safetensors type becomes an entry with that tensor's name,
    type and shape. Any other region is plain bytes (U8) under the name of its first tensor.

    Raises StorageError if the header would be longer than safetensors allows.
    """
    metadata = {
        "format": "pt",
        LAYOUT_KEY: f"[{layout.image_bytes},[{','.join(layout.tensors.json_lines(','))}]]",
    }
    if layout.attributes:
        metadata[ATTRIBUTES_KEY] = json.dumps(layout.attributes, separators=(",", ":"))
    if weights_id is not None:
        metadata[WEIGHTS_KEY] = weights_id
    spec_cache = _SpecSizeCache()
    entries: list[str] = []
    for begin, end, specs in _regions(layout, spec_cache):
        name, entry = specs[0].name, f'"dtype":"U8","shape":[{end - begin}]'
        kept = next((spec for spec in specs if spec_cache.of(spec) == (end - begin, True)), None)
        if kept is not None:
            shape = ",".join(map(str, kept.shape))
            name, entry = kept.name, f'"dtype":"{DTYPES[kept.dtype]}","shape":[{shape}]'
            for spec in specs:
                if spec.name != name and spec[1:] == kept[1:]:
                    metadata.setdefault(spec.name, name)
        entries.append(f'{quoted(name)}:{{{entry},"data_offsets":[{begin},{end}]}}')
    return _padded(metadata, entries)


def live_header(layout: Layout) -> bytes:
    """Return the header of an image served from memory: `header`, if it can list every tensor.

    With more than `MAX_NAMED_TENSORS` tensors the data section is one entry of plain bytes named ``image``
    without the layout, which targets get from the peer service.
    """
    if len(layout.tensors) <= MAX_NAMED_TENSORS:
        return header(layout)
    size = layout.image_bytes
    entry = f'"image":{{"dtype":"U8","shape":[{size}],"data_offsets":[0,{size}]}}'
    return _padded({"format": "pt"}, [entry])


def _padded(metadata: Mapping[str, str], entries: Sequence[str]) -> bytes:
    """Return length and JSON, padded with spaces."""
    metadata_json = f'"__metadata__":{json.dumps(metadata, separators=(",", ":"))}'
    text = f"{{{','.join((metadata_json, *entries))}}}".encode()
    padded = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT - 8
    if padded > MAX_HEADER_BYTES:
        raise StorageError(f"a safetensors header of {padded} bytes; readers accept at most {MAX_HEADER_BYTES}")
    return struct.pack("<Q", padded) + text.ljust(padded)


def header_length(prefix: bytes) -> int:
    """Return the length of the complete header (the start of the data section) from a file's first 8 bytes.

    Raises StorageCorrupt if they are not the start of a safetensors file.
    """
    if len(prefix) < 8:
        raise StorageCorrupt(f"not a safetensors file: it has {len(prefix)} bytes")
    (length,) = struct.unpack_from("<Q", prefix)
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise StorageCorrupt(f"not a safetensors file: a header of {length} bytes")
    return 8 + int(length)


def layout_of(header: bytes) -> Layout:
    """Return the layout in a header. Raises CheckpointError if it has none, StorageCorrupt if it is truncated."""
    metadata = _metadata(header)
    text = metadata.get(LAYOUT_KEY)
    if not isinstance(text, str):
        raise CheckpointError("a safetensors file, but not a snapshot of an image: it has no rfork.layout")
    try:
        image_bytes, specs = _layout_json.validate_json(text, strict=False)
        attributes = _attributes_json.validate_json(str(metadata.get(ATTRIBUTES_KEY, "[]")))
    except ValidationError as error:
        raise StorageCorrupt(f"invalid layout of the snapshot: {error.errors()[0]['msg']}") from None
    return Layout((TensorSpec(*spec) for spec in specs), image_bytes, attributes)


def weights_id_of(header: bytes) -> str | None:
    """Return the weights_id in the header, if it has one."""
    value = _metadata(header).get(WEIGHTS_KEY)
    return value if isinstance(value, str) else None


def _metadata(header: bytes) -> dict[str, JsonValue]:
    length = header_length(header)
    if len(header) < length:
        raise StorageCorrupt(f"truncated safetensors header: {len(header)} of {length} bytes")
    try:
        entries = _header_json.validate_json(header[8:length])
    except ValidationError as error:
        raise StorageCorrupt(f"invalid safetensors header: {error.errors()[0]['msg']}") from None
    metadata = entries.get("__metadata__")
    return metadata if isinstance(metadata, dict) else {}


class _SpecSizeCache:
    """Properties derived from a spec's type, shape and stride, computed once per combination."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[int, ...], tuple[int, ...]], tuple[int, bool]] = {}

    def of(self, spec: TensorSpec) -> tuple[int, bool]:
        """Return the bytes it spans, and whether it is contiguous and of a safetensors type."""
        key = spec.dtype, spec.shape, spec.stride
        found = self._known.get(key)
        if found is None:
            length = byte_extent(spec.shape, spec.stride, dtype_of(spec).itemsize)
            plain = spec.dtype in DTYPES and spec.stride == contiguous_stride(spec.shape)
            found = self._known[key] = length, plain
        return found


def _regions(layout: Layout, spec_cache: _SpecSizeCache) -> Iterator[tuple[int, int, Sequence[TensorSpec]]]:
    """Yield begin, end and specs (first name first) of each set of overlapping specs; empty specs are separate."""
    group: list[TensorSpec] = []
    begin = end = 0
    for spec in layout.tensors:
        length, _ = spec_cache.of(spec)
        if length == 0:
            yield spec.offset, spec.offset, [spec]
        elif spec.offset < end:
            group.append(spec)
            end = max(end, spec.offset + length)
        else:
            if group:
                yield begin, end, group
            group, begin, end = [spec], spec.offset, spec.offset + length
    if group:
        yield begin, end, group

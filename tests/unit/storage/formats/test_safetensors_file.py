"""Headers of safetensors files: read as safetensors reads them, or refused in one line."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import JsonValue
from safetensors import SafetensorError
from safetensors.torch import load, save

from rfork.errors import StorageCorrupt
from rfork.image.capture import image_from_tensors
from rfork.image.safetensors_header import header
from rfork.storage.formats.safetensors_file import read_shard
from tests.unit.storage.recording_store import RecordingBlob

Header = dict[str, JsonValue]


def packed(entries: Header | bytes, data: bytes = b"", length: int | None = None) -> bytes:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: JsonValue, shape: JsonValue, begin: JsonValue, end: JsonValue) -> Header:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


VALID_FILE = packed({"a": entry("F32", [2], 0, 8)}, bytes(8))

MALFORMED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "it has 0 bytes"),
    "no length": (b"1234567", "it has 7 bytes"),
    "longer than allowed": (packed({}, length=100_000_001), "a header of 100000001 bytes"),
    "longer than the file": (packed({}, length=90), "truncated: 10 bytes, but the header alone has 98"),
    "no JSON": (packed(b"{]"), "the header cannot be parsed"),
    "not UTF-8": (packed(b'{"\xff": 1}'), "the header cannot be parsed"),
    "too deeply nested": (packed(b'{"a":' + b"[" * 5000), "the header cannot be parsed"),
    "a list": (packed(b"[1]"), "not a JSON object"),
    "metadata of another type": (packed({"__metadata__": 3}), "__metadata__ in the header is not an object"),
    "an entry that is no object": (packed({"a": 3}), "entry of a is invalid"),
    "an entry without a dtype": (packed({"a": {"shape": [], "data_offsets": [0, 0]}}), "entry of a is"),
    "an unknown dtype": (packed({"a": entry("F13", [1], 0, 4)}, bytes(4)), "an unknown dtype, 'F13'"),
    "a dtype that is a list": (packed({"a": entry(["F32"], [1], 0, 4)}, bytes(4)), "entry of a is invalid"),
    "a negative shape": (packed({"a": entry("F32", [-1, -2], 0, 8)}, bytes(8)), "entry of a is"),
    "a fractional shape": (packed({"a": entry("F32", [2.5], 0, 10)}, bytes(10)), "entry of a is"),
    "a shape that is a string": (packed({"a": entry("F32", "2", 0, 8)}, bytes(8)), "entry of a is"),
    "fractional offsets": (
        packed({"a": entry("F32", [2], 0.0, 8.0)}, bytes(8)),
        r"a is \[2\] F32, 8 bytes",
    ),
    "three offsets": (
        packed({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]}}, bytes(8)),
        "entry of a is",
    ),
    "a length of another shape": (packed({"a": entry("F32", [3], 0, 8)}, bytes(8)), r"a is \[3\] F32, 12 b"),
    "negative offsets": (packed({"a": entry("F32", [2], -8, 0)}, bytes(8)), "offsets are -8 to 0"),
    "a truncated file": (VALID_FILE[:-1], "truncated: 7 bytes of data, but the header lists 8"),
    "trailing bytes": (VALID_FILE + b"x", "1 trailing bytes"),
    "a hole": (packed({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 3, 5)}, bytes(5)), "b follows a gap"),
    "a gap at the start": (packed({"a": entry("U8", [2], 1, 3)}, bytes(3)), "a follows a gap"),
    "an overlap": (
        packed({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, bytes(3)),
        "b overlaps",
    ),
}


@pytest.mark.parametrize(("data", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_header_is_refused_in_one_line(data: bytes, message: str) -> None:
    """Each error names the file before a tensor is read; safetensors refuses the file too."""
    with pytest.raises(StorageCorrupt, match=message) as caught:
        read_shard("x", RecordingBlob("file:///x.safetensors", data))
    assert str(caught.value).startswith("file:///x.safetensors: ")
    assert 1 == len(str(caught.value).splitlines())
    with pytest.raises((SafetensorError, KeyError, ValueError)):
        load(data)


DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
Shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@given(st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(st.sampled_from(DTYPES), Shapes), max_size=8))
def test_offsets_equal_those_of_safetensors(specs: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
    """Dtype, shape and bytes of each file that safetensors writes are read correctly."""
    specs.pop("__metadata__", None)
    stored = {name: torch.randint(0, 2, shape, dtype=torch.uint8).to(dtype) for name, (dtype, shape) in specs.items()}
    data = save(stored)
    shard = read_shard("x", RecordingBlob("file:///x", data))
    expected = {name: (tensor.dtype, tuple(tensor.shape), tensor.nbytes) for name, tensor in stored.items()}
    assert expected == {
        name: (location.dtype, location.shape, location.nbytes) for name, location in shard.locations.items()
    }
    for name, location in shard.locations.items():
        memory = torch.frombuffer(
            bytearray(data[location.offset : location.offset + location.nbytes] + b"x"), dtype=torch.uint8
        )
        assert torch.equal(stored[name].reshape(-1).view(torch.uint8), memory[:-1])


def test_tensors_are_in_order_of_offsets() -> None:
    """Tensors are ordered by their bytes, not by the header."""
    data = packed({"b": entry("U8", [2], 1, 3), "a": entry("U8", [1], 0, 1), "0": entry("U8", [0], 3, 3)}, bytes(3))
    assert ["a", "b", "0"] == list(read_shard("x", RecordingBlob("file:///x", data)).locations)


def test_a_long_header_needs_two_reads() -> None:
    """The first read covers most headers; the second one fetches the rest of a longer header."""
    entries: Header = {f"layer.{number}.weight": entry("U8", [1], number, number + 1) for number in range(20_000)}
    blob = RecordingBlob("file:///x", packed(entries, bytes(20_000)))
    assert 20_000 == len(read_shard("x", blob).locations)
    begin = blob.size - 20_000
    assert [(0, 128 << 10), (128 << 10, begin)] == blob.read_ranges


def test_tied_names_are_read_from_metadata() -> None:
    """Tied names that safetensors stores count; descriptive metadata does not."""
    metadata: Header = {"format": "pt", "tied": "pt", "other": "nothing"}
    shard = read_shard(
        "x",
        RecordingBlob("file:///x", packed({"__metadata__": metadata, "pt": entry("U8", [1], 0, 1)}, b"x")),
    )
    assert ["pt", "tied"] == list(shard.locations)
    assert {"tied"} == set(shard.aliases)


def test_two_packed_elements_share_a_byte() -> None:
    """Two F4 elements share a byte, and torch's type counts both as one."""
    shard = read_shard("x", RecordingBlob("file:///x", packed({"a": entry("F4", [2, 8], 0, 8)}, bytes(8))))
    location = shard.locations["a"]
    assert torch.float4_e2m1fn_x2 == location.dtype
    assert (2, 4) == location.shape
    assert 8 == location.nbytes


def snapshot_bytes() -> bytes:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    image = image_from_tensors({"w": base.t(), "row": base[1], "z": torch.ones(3, dtype=torch.bfloat16)})
    with image.readable(0, image.layout.image_bytes) as views:
        return header(image.layout) + b"".join(bytes(view) for view in views)


def test_a_snapshot_is_read_by_its_layout() -> None:
    """Strides and nested tensors are restored, although safetensors cannot express them."""
    locations = read_shard("x", RecordingBlob("file:///x", snapshot_bytes())).locations
    assert {"w": ((6, 4), (1, 6)), "row": ((6,), None), "z": ((3,), None)} == {
        name: (location.shape, location.stride) for name, location in locations.items()
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'[[\\"w\\"', b'[[\\"w\\"]', "invalid layout of the snapshot"),
        (b'"[102,', b'"[103,', "its layout has 103 bytes"),
        (b"float32", b"floatxy", "floatxy"),
    ],
)
def test_an_invalid_layout_in_a_snapshot_is_refused(old: bytes, new: bytes, message: str) -> None:
    """A layout that does not match its file is refused like any invalid header."""
    data = snapshot_bytes()
    changed = data.replace(old, new, 1)
    (length,) = struct.unpack_from("<Q", changed)
    grown = len(changed) - len(data)
    changed = struct.pack("<Q", length + grown) + changed[8:]
    with pytest.raises(StorageCorrupt, match=message):
        read_shard("x", RecordingBlob("file:///x", changed))

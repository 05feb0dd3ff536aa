"""The compact map: rows, encoding, and refusal of invalid bytes."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.placement.placement_map import (
    HEADER,
    MAP_FORMAT,
    BoxType,
    MapRow,
    PlacementMap,
    PlacementMapBuilder,
    TensorType,
)


def small_map() -> PlacementMap:
    """Return a map of one tensor: two rows of four are relocated, one is computed and one is padding."""
    builder = PlacementMapBuilder()
    weight = builder.checkpoint.append("weight", TensorType("float32", 4, (8, 3)))
    own = builder.own.append("own", TensorType("float32", 4, (4, 3), (12, 4)))
    builder.append(weight, (5, 0), own, 0, BoxType((2, 3), (12, 4)))
    builder.append_computed("mul", own, 24, BoxType((3,), (4,)))
    builder.append_computed("fill_", own, 36, BoxType((3,), (4,)))
    builder.aliases["head"] = "own"
    builder.read_completely.append("weight")
    return builder.build()


def test_rows_have_names() -> None:
    """Iterating a map yields its rows with the names of the tensors."""
    expected = [
        MapRow("weight", (5, 0), (2, 3), "own", 0, (12, 4)),
        MapRow("", (), (3,), "own", 24, (4,), "mul"),
        MapRow("", (), (3,), "own", 36, (4,), "fill_"),
    ]
    assert expected == list(small_map())


def test_padding_is_not_computed() -> None:
    """Elements that a constant was written to are listed as unwritten."""
    assert {"own": 3} == small_map().unwritten_elements


def test_computed_tensors_are_named() -> None:
    """An own tensor with computed elements is listed with its operation."""
    assert {"own": "mul"} == small_map().computed


def test_rows_of_some_tensors() -> None:
    """A map of some own tensors has their rows in the same order, and the same tables."""
    builder = PlacementMapBuilder()
    scalar = builder.checkpoint.append("scalar", TensorType("float32", 4, ()))
    weight = builder.checkpoint.append("weight", TensorType("float32", 4, (8, 3)))
    owns = [builder.own.append(name, TensorType("float32", 4, (4, 3), (12, 4))) for name in ("a", "b", "c")]
    builder.append(weight, (5, 0), owns[0], 0, BoxType((2, 3), (12, 4)))
    builder.append(scalar, (), owns[1], 0, BoxType((), ()))
    builder.append(weight, (1, 2), owns[2], 0, BoxType((1, 1), (12, 4)))
    builder.append_computed("mul", owns[1], 24, BoxType((3,), (4,)))
    builder.append(weight, (0, 1), owns[0], 24, BoxType((1, 2), (12, 4)))
    complete = builder.build()
    part = complete.only({"a", "b", "unknown"}, "packed")
    assert [row for row in complete if row.own in ("a", "b")] == [row for row in part if row.own != "c"]
    assert {"b": "mul", "c": "packed"} == part.computed
    assert complete is complete.only({"a", "b", "c"}, "packed")
    assert part == PlacementMap.from_bytes(part.to_bytes())
    assert complete.checkpoint is part.checkpoint


def test_a_map_without_rows_can_be_restricted() -> None:
    """A rank without tensors has a map of some of them."""
    assert [] == list(PlacementMapBuilder().build().only((), "packed"))


def test_a_map_is_equal_to_its_decoded_bytes() -> None:
    """Encoding and decoding keeps everything, and equal maps are encoded equally."""
    assert small_map() == PlacementMap.from_bytes(small_map().to_bytes())


def test_tensors_that_are_read_completely_are_encoded() -> None:
    """The decoded map names them."""
    assert ("weight",) == PlacementMap.from_bytes(small_map().to_bytes()).read_completely


def test_an_empty_map_can_be_encoded() -> None:
    """A rank without tensors has a map."""
    empty = PlacementMapBuilder().build()
    assert empty == PlacementMap.from_bytes(empty.to_bytes())


def test_columns_are_immutable() -> None:
    """The columns of a map cannot be written."""
    with pytest.raises(ValueError, match="read-only"):
        small_map().offsets[0] = 1


def test_another_format_version_is_refused() -> None:
    """The error names both versions."""
    data = MAP_FORMAT.magic + HEADER.pack(MAP_FORMAT.version + 1, 0)
    with pytest.raises(ValueError, match=f"version {MAP_FORMAT.version + 1}.*reads {MAP_FORMAT.version}"):
        PlacementMap.from_bytes(data)


def test_a_large_body_is_refused_before_it_is_decompressed() -> None:
    """The announced size is limited."""
    with pytest.raises(ValueError, match="limit"):
        PlacementMap.from_bytes(MAP_FORMAT.magic + HEADER.pack(MAP_FORMAT.version, (1 << 32) - 1))


def test_a_body_larger_than_announced_is_refused() -> None:
    """Decompression stops at the announced size."""
    data = MAP_FORMAT.magic + HEADER.pack(MAP_FORMAT.version, 8) + zlib.compress(bytes(1 << 20))
    with pytest.raises(ValueError, match="invalid"):
        PlacementMap.from_bytes(data)


@given(st.binary(max_size=80), st.integers(0, 400))
def test_damaged_bytes_are_refused(junk: bytes, position: int) -> None:
    """Any other bytes raise ValueError or decode to a valid map."""
    data = small_map().to_bytes()
    damaged = data[:position] + junk + data[position + len(junk) :]
    for each in (junk, MAP_FORMAT.magic + junk, damaged):
        try:
            PlacementMap.from_bytes(each)._validate()
        except ValueError:
            continue


Change = Callable[[dict[str, Any], npt.NDArray[np.int64]], object]


def changed(change: Change) -> bytes:
    """Return the encoded small map after a change to its header and to its columns."""
    data = small_map().to_bytes()
    body = zlib.decompress(data[len(MAP_FORMAT.magic) + HEADER.size :])
    (size,) = struct.unpack_from("<Q", body)
    header = json.loads(body[8 : 8 + size])
    columns = np.frombuffer(body[8 + size :], dtype="<i8").copy()
    change(header, columns)
    text = json.dumps(header).encode()
    body = struct.pack("<Q", len(text)) + text + columns.tobytes()
    return MAP_FORMAT.magic + HEADER.pack(MAP_FORMAT.version, len(body)) + zlib.compress(body)


def set_column(position: int, value: int) -> Change:
    return lambda _, columns: columns.__setitem__(position, value)


INVALID: dict[str, tuple[Change, str]] = {
    "type of a tensor": (set_column(0, 7), "index outside"),
    "checkpoint tensor": (set_column(2, 1), "index outside"),
    "operation": (set_column(3, -4), "index outside"),
    "own tensor": (set_column(5, 1), "index outside"),
    "negative offset": (set_column(8, -4), "outside its own tensor"),
    "offset": (set_column(8, 28), "outside its own tensor"),
    "box type": (set_column(11, 2), "index outside"),
    "first index": (set_column(14, 7), "outside its checkpoint tensor"),
    "rank": (lambda header, _: header["checkpoint"]["types"][0].__setitem__(2, [8]), "invalid"),
    "empty box": (lambda header, _: header["box_types"].__setitem__(0, [[0, 3], [12, 4]]), "without elements"),
    "own shape and strides": (lambda header, _: header["own"]["types"][0].__setitem__(3, [4]), "invalid"),
    "number of rows": (lambda header, _: header.__setitem__("rows", 2), "bytes after"),
    "missing table": (lambda header, _: header.pop("own"), "invalid"),
    "aliases": (lambda header, _: header.__setitem__("aliases", []), "invalid"),
    "tensor that is read": (lambda header, _: header["read_completely"].append("other"), "not in its table"),
    "name": (lambda header, _: header["own"].__setitem__("names", [3]), "not a text"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid_maps_are_refused(case: str) -> None:
    """A decoded map never refers to what does not exist."""
    change, message = INVALID[case]
    with pytest.raises(ValueError, match=message):
        PlacementMap.from_bytes(changed(change))


def test_the_helper_of_the_invalid_maps_changes_nothing_else() -> None:
    """Without a change, the same map is decoded."""
    assert small_map() == PlacementMap.from_bytes(changed(lambda *_: None))


def test_a_map_of_60000_tensors_has_less_than_4_megabytes() -> None:
    """The map of a large mixture-of-experts model is small, as types repeat and names compress."""
    layers, experts = 80, 250
    builder = PlacementMapBuilder()
    for layer in range(layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        w13 = builder.own.append(f"{prefix}.w13_weight", TensorType("bfloat16", 2, (experts, 64, 32), (4096, 64, 2)))
        w2 = builder.own.append(f"{prefix}.w2_weight", TensorType("bfloat16", 2, (experts, 32, 32), (2048, 64, 2)))
        for expert in range(experts):
            for position, name in enumerate(("gate_proj", "up_proj")):
                weight = builder.checkpoint.append(
                    f"{prefix}.{expert}.{name}.weight", TensorType("bfloat16", 2, (64, 32))
                )
                builder.append(weight, (32, 0), w13, expert * 4096 + position * 2048, BoxType((32, 32), (64, 2)))
            weight = builder.checkpoint.append(
                f"{prefix}.{expert}.down_proj.weight", TensorType("bfloat16", 2, (32, 64))
            )
            builder.append(weight, (0, 32), w2, expert * 2048, BoxType((32, 32), (64, 2)))
    data = builder.build().to_bytes()
    assert 60_000 == len(PlacementMap.from_bytes(data))
    assert len(data) < 4_000_000

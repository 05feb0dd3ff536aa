"""Safetensors sources: each access path returns what safetensors returns, and reads no more than necessary."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from contextlib import closing

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from rfork.errors import CheckpointError, StorageError
from rfork.image.capture import image_from_tensors
from rfork.image.safetensors_header import header
from rfork.settings import StorageSettings
from rfork.storage.formats import tensor_blocks
from rfork.storage.formats.safetensors_file import read_shard
from rfork.storage.formats.safetensors_source import SafetensorsSource
from tests.unit.storage.recording_store import RecordingBlob

Tensors = Mapping[str, torch.Tensor]
SMALL = StorageSettings(staging_bytes=16 << 20, concurrency=3)


def source_of(
    *shards: bytes, uri: str = "file:///f/", options: StorageSettings = SMALL, broken_from: int | None = None
) -> tuple[SafetensorsSource, list[RecordingBlob]]:
    """Return a source for shards, and their blobs with the reads of headers removed."""
    blobs = [RecordingBlob(f"{uri}{number}", data, broken_from) for number, data in enumerate(shards)]
    source = SafetensorsSource(uri, [read_shard(str(number), blob) for number, blob in enumerate(blobs)], options)
    for blob in blobs:
        blob.read_ranges.clear()
    return source, blobs


def same(expected: Tensors, actual: Tensors) -> bool:
    """Return True if names, types, shapes and bytes are equal."""
    return expected.keys() == actual.keys() and all(
        (tensor.dtype, tensor.shape) == (actual[name].dtype, actual[name].shape)
        and torch.equal(
            tensor.contiguous().reshape(-1).view(torch.uint8),
            actual[name].contiguous().reshape(-1).view(torch.uint8),
        )
        for name, tensor in expected.items()
    )


def experts(count: int, shape: Sequence[int] = (3, 5), first: int = 0) -> dict[str, torch.Tensor]:
    values = torch.arange(math.prod(shape), dtype=torch.int16).reshape(tuple(shape))
    return {f"layers.{number}.weight": (values + number).view(torch.bfloat16) for number in range(first, first + count)}


DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
Files = st.lists(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 40), max_size=3).map(tuple)), max_size=6),
    min_size=1,
    max_size=3,
)


@settings(max_examples=40, deadline=None)
@given(Files)
def test_all_access_paths_return_the_stored_tensors(
    files: list[list[tuple[torch.dtype, tuple[int, ...]]]],
) -> None:
    """Read at once, into tensors, as a stream or one by one, from one file or several, tensors equal the
    stored ones.
    """
    shards = [
        save({
            f"{file}.{number}": torch.randint(0, 2, shape, dtype=torch.uint8).to(dtype)
            for number, (dtype, shape) in enumerate(specs)
        })
        for file, specs in enumerate(files)
    ]  # fmt: skip
    expected: dict[str, torch.Tensor] = {}
    for shard in shards:
        expected |= load(shard)
    source, _ = source_of(*shards)
    with closing(source):
        into = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        source.read_into(into)
        found = (source.load(), into, dict(source.stream()), {name: source[name] for name in expected})
    assert [True] * 4 == [same(expected, tensors) for tensors in found]


def test_many_small_tensors_are_read_in_few_reads() -> None:
    """Many small tensors are read completely in few reads, none of which covers only one tensor."""
    shards = [experts(2500, first=2500 * number) for number in range(8)]
    source, blobs = source_of(*(save(shard) for shard in shards))
    expected = {name: tensor for shard in shards for name, tensor in shard.items()}
    with closing(source):
        assert same(expected, source.load())
    data = sum(tensor.nbytes for tensor in expected.values())
    assert data == sum(blob.read_bytes for blob in blobs)
    assert sum(len(blob.read_ranges) for blob in blobs) < 100


def test_tensors_are_converted() -> None:
    """Another dtype, another memory order, a single element and rows with gaps are converted from one file."""
    stored = {
        "cast": torch.arange(1000.0),
        "turned": torch.arange(6.0).reshape(2, 3),
        "gaps": torch.arange(6.0).reshape(2, 3),
        "scalar": torch.tensor(2.5),
        "integers": torch.arange(4),
        "none": torch.empty(0, 7),
    }
    into = {
        "cast": torch.empty(1000, dtype=torch.bfloat16),
        "turned": torch.empty(3, 2).t(),
        "gaps": torch.full((2, 5), -1.0)[:, 1:4],
        "scalar": torch.empty((), dtype=torch.float64),
        "integers": torch.empty(4, dtype=torch.int64),
        "none": torch.empty(0, 7, dtype=torch.float16),
    }
    progress_bytes: list[int] = []
    source, _ = source_of(save(stored))
    with closing(source):
        source.read_into(into, progress_bytes.append)
    assert [True] * 6 == [torch.equal(tensor.to(into[name].dtype), into[name]) for name, tensor in stored.items()]
    base = into["gaps"]._base
    assert base is not None
    assert [-1.0, -1.0] == base[:, 0].tolist()
    assert sum(tensor.nbytes for tensor in stored.values()) == sum(progress_bytes)


def test_only_requested_names_are_read() -> None:
    """Large gaps between tensors are skipped; small ones are read as well."""
    stored = {
        "a": torch.ones(1 << 10, dtype=torch.uint8),
        "b": torch.ones(1 << 10, dtype=torch.uint8),
        "c": torch.ones(1 << 10, dtype=torch.uint8),
        "d": torch.ones(1 << 20, dtype=torch.uint8),
        "e": torch.ones(1 << 10, dtype=torch.uint8),
    }
    source, blobs = source_of(save(stored))
    with closing(source):
        for read in (
            lambda: source.load(["a", "c", "e"]),
            lambda: dict(source.stream(["a", "c", "e"])),
            lambda: source.read_into({name: torch.empty_like(stored[name]) for name in ("e", "c", "a")}),
        ):
            blobs[0].read_ranges.clear()
            read()
            assert 4 << 10 == blobs[0].read_bytes


class Tied:
    """Module with tied names: two parameters that share memory."""

    def __init__(self) -> None:
        self.memory = torch.zeros(1000, dtype=torch.uint8)
        self.names = {"two": self.memory.view(10, 100).view(-1), "one": self.memory}


def test_tied_names_are_read_once() -> None:
    """Two names of one tensor cost one read; of two stored tensors, the last one counts."""
    source, blobs = source_of(
        save({"one": torch.ones(1000, dtype=torch.uint8), "two": torch.full((1000,), 2, dtype=torch.uint8)})
    )
    tied = Tied()
    with closing(source):
        source.read_into(tied.names)
    assert 1000 == blobs[0].read_bytes
    assert {2} == set(tied.memory.tolist())


def test_overlapping_tensors_of_a_snapshot_are_restored() -> None:
    """Tensors that shared memory share it again, and transposed ones are transposed, for every target."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    image = image_from_tensors({"w": base.t(), "row": base[1], "tied": base.t(), "z": torch.ones(3)})
    with image.readable(0, image.layout.image_bytes) as views:
        data = header(image.layout) + b"".join(bytes(view) for view in views)
    source, _ = source_of(data)
    expected = {"w": base.t(), "row": base[1], "tied": base.t(), "z": torch.ones(3)}
    with closing(source):
        found = source.load()
        into = {
            "w": torch.empty(6, 4),
            "row": torch.empty(6),
            "tied": torch.empty(4, 6).t(),
            "z": torch.empty(3),
        }
        source.read_into(into)
    assert same(expected, found)
    assert same(expected, into)
    found["w"][0, 1] = -5
    assert -5 == found["row"][0].item()
    assert -5 == found["tied"][0, 1].item()


def test_an_unaligned_file_is_read() -> None:
    """Old files begin their data at any byte; their tensors can be read."""
    stored = {"a": torch.arange(5, dtype=torch.int64), "b": torch.arange(3.0)}
    data = save(stored)
    length = int.from_bytes(data[:8], "little")
    unaligned = (length + 3).to_bytes(8, "little") + data[8 : 8 + length] + b"   " + data[8 + length :]
    source, _ = source_of(unaligned)
    cast = {"a": torch.empty(5, dtype=torch.int32), "b": torch.empty(3, dtype=torch.float64)}
    with closing(source):
        source.read_into(cast)
        found = (source.load(), dict(source.stream()), {name: source[name] for name in stored})
    assert [True] * 3 == [same(stored, tensors) for tensors in found]
    assert [0, 1, 2, 3, 4] == cast["a"].tolist()
    assert [0.0, 1.0, 2.0] == cast["b"].tolist()


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("b", torch.empty(2), "lacks b"),
        ("a", torch.empty(3), r"a has shape \[2\], but \[3\]"),
        ("a", torch.empty(2, dtype=torch.int32), "a is torch.float32, but torch.int32"),
        ("a", torch.empty(2, device="meta"), "cannot load into a: it has no memory"),
    ],
)
def test_a_mismatch_is_refused_before_a_byte_is_read(name: str, tensor: torch.Tensor, message: str) -> None:
    """A name, shape or dtype that does not match is named."""
    source, blobs = source_of(save({"a": torch.ones(2), "c": torch.ones(2)}))
    with closing(source), pytest.raises(CheckpointError, match=message):
        source.read_into({"c": torch.empty(2), name: tensor})
    assert [] == blobs[0].read_ranges


def test_a_name_that_is_not_stored_is_an_error() -> None:
    """A name that is not stored is the caller's mistake and raises immediately."""
    source, _ = source_of(save({"a": torch.ones(2)}))
    with closing(source):
        for read in (source.load, source.stream):
            with pytest.raises(CheckpointError, match=r"lacks x \(1 in total\)"):
                read(["x", "a"])
        with pytest.raises(KeyError):
            source["x"]


def test_one_name_in_two_files_is_an_error() -> None:
    """Without an index, it is ambiguous which one counts."""
    data = save({"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match="a is in 1 and in another file"):
        source_of(data, data)


@pytest.fixture
def long_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow reads the time that a busy machine needs to end them."""
    monkeypatch.setattr(tensor_blocks, "GRACE_S", 60.0)


@pytest.mark.usefixtures("long_timeouts")
def test_a_failed_read_is_raised_on_every_access_path() -> None:
    """A read past the end of storage raises its error on each access path and leaves no thread running."""
    stored = experts(2000, (40, 40))
    source, _ = source_of(save(stored), broken_from=4 << 20)
    with closing(source):
        for read in (
            source.load,
            lambda: dict(source.stream()),
            lambda: source.read_into({name: torch.empty_like(tensor) for name, tensor in stored.items()}),
            lambda: source.read_into({name: tensor.float() for name, tensor in stored.items()}),
        ):
            with pytest.raises(StorageError, match="ends before byte"):
                read()
    assert [] == [thread.name for thread in threading.enumerate() if thread.name.startswith("rfork-stream")]


@pytest.mark.usefixtures("long_timeouts")
def test_a_stream_that_is_closed_early_reads_little() -> None:
    """Closing the stream ends the reads, which are only a few blocks ahead."""
    stored = experts(40, (1 << 10, 1 << 9))
    source, blobs = source_of(save(stored))
    with closing(source):
        stream = source.stream()
        next(stream)
        stream.close()  # type: ignore[attr-defined]  # a generator's
        read = blobs[0].read_bytes
        assert read <= SMALL.staging_bytes + (4 << 20)
        assert read == blobs[0].read_bytes
    assert [] == [thread.name for thread in threading.enumerate() if thread.name == "rfork-stream"]


def test_the_caller_owns_the_tensors_of_a_stream() -> None:
    """Later tensors do not change earlier ones."""
    stored = experts(40, (1 << 10, 1 << 8))
    source, _ = source_of(save(stored))
    with closing(source):
        kept = dict(source.stream())
    assert same(stored, kept)


def test_a_closed_source_stops_reading() -> None:
    """A stream that is running when its source is closed ends with an error."""
    source, blobs = source_of(save(experts(40, (1 << 10, 1 << 9))))
    stream = source.stream()
    next(stream)
    for blob in blobs:
        blob.close()
    with pytest.raises(StorageError, match="is closed"):
        list(stream)

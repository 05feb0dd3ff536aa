"""Conversions between formats preserve names, types, shapes and bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rfork.errors import (
    CheckpointError,
    RforkError,
    SettingsError,
    StorageAccessDenied,
    StorageFull,
    StorageNotFound,
)
from rfork.settings import StorageSettings
from rfork.storage.convert import convert
from rfork.storage.formats.detect import open_source
from rfork.storage.module_io.save import save
from rfork.storage.tensorizer.encryption import Secret
from rfork.storage.tensorizer.writer import write_tensors
from tests.memory_bucket import InMemoryBucket, bucket
from tests.tensor_samples import KEY, Raw, raw_tensors

__all__ = ["bucket"]

TENSORS = {
    "layers.0.weight": torch.arange(12.0).reshape(3, 4),
    "layers.0.bias": torch.arange(3.0).to(torch.bfloat16),
    "layers.1.weight": torch.arange(6, dtype=torch.int8).reshape(2, 3),
    "norm": torch.ones(1),
    "empty": torch.zeros(0, 2),
}
TYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
)


def read_raw(uri: str, key: bytes | None = None) -> Raw:
    """Return the tensors at a URI."""
    with closing(open_source(uri, key=key)) as source:
        return raw_tensors(source.stream())


@pytest.fixture
def source(bucket: InMemoryBucket) -> str:
    """Write a `.tensors` file of `TENSORS` to a bucket and return its URI."""
    write_tensors(TENSORS, "s3://bucket/in/model.tensors")
    return "s3://bucket/in/model.tensors"


tensors = st.dictionaries(
    st.text("abc.01", min_size=1, max_size=12),
    st.tuples(st.sampled_from(TYPES), st.lists(st.integers(0, 5), max_size=3)),
    min_size=1,
    max_size=8,
)


def random_tensors(specs: Mapping[str, tuple[torch.dtype, list[int]]]) -> dict[str, torch.Tensor]:
    """Return random bytes as one tensor for each type and shape."""
    found: dict[str, torch.Tensor] = {}
    for name, (dtype, shape) in specs.items():
        found[name] = torch.randint(0, 2, shape, dtype=torch.uint8).to(dtype)
    return found


@given(
    specs=tensors,
    chain=st.lists(st.sampled_from(["a.tensors", "folder/", "shards/", "a.safetensors"]), min_size=1, max_size=4),
)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_chain_of_conversions_keeps_every_byte(
    bucket: InMemoryBucket, specs: Mapping[str, tuple[torch.dtype, list[int]]], chain: list[str]
) -> None:
    """A chain of formats that starts and ends with safetensors keeps names, types, shapes and bytes."""
    bucket.objects.clear()
    first = random_tensors(specs)
    write_tensors(first, "s3://bucket/0/model.tensors")
    at = "s3://bucket/0/model.tensors"
    for step, name in enumerate([*chain, "last.safetensors"], 1):
        following = f"s3://bucket/{step}/{name}"
        saved = convert(at, following, max_shard_bytes=40 if name == "shards/" else None)
        assert len(first) == saved.tensors
        assert sum(tensor.nbytes for tensor in first.values()) == saved.nbytes
        at = following
    assert raw_tensors(first) == read_raw(at)
    assert 0 == bucket.open_blobs


def test_safetensors_reads_the_converted_files(tmp_path: Path) -> None:
    """The loader of safetensors reads a converted file, and each file of a converted folder."""
    save_file(TENSORS, tmp_path / "in.safetensors")
    convert(str(tmp_path / "in.safetensors"), str(tmp_path / "model.tensors"))
    convert(str(tmp_path / "model.tensors"), str(tmp_path / "out.safetensors"))
    convert(str(tmp_path / "model.tensors"), str(tmp_path / "folder"), max_shard_bytes=50)
    index = json.loads((tmp_path / "folder" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    loaded = {name: tensor for file in files for name, tensor in load_file(tmp_path / "folder" / file).items()}
    right = raw_tensors(TENSORS)
    assert right == raw_tensors(load_file(tmp_path / "out.safetensors"))
    assert right == raw_tensors(loaded)
    assert 2 == len(files)
    assert 64 == index["metadata"]["total_size"]
    assert TENSORS.keys() == index["weight_map"].keys()


def test_only_and_dtype_select_and_convert(bucket: InMemoryBucket, source: str) -> None:
    """`only` selects names by pattern; `dtype` converts floating-point tensors and no others."""
    convert(source, "s3://bucket/out.tensors", only=["layers.*", "norm"], dtype=torch.float16)
    assert {
        "layers.0.weight": TENSORS["layers.0.weight"].half(),
        "layers.0.bias": TENSORS["layers.0.bias"].half(),
        "layers.1.weight": TENSORS["layers.1.weight"],
        "norm": TENSORS["norm"].half(),
    }.keys() == read_raw("s3://bucket/out.tensors").keys()
    assert raw_tensors({"norm": torch.ones(1).half()})["norm"] == read_raw("s3://bucket/out.tensors")["norm"]
    assert raw_tensors(TENSORS)["layers.1.weight"] == read_raw("s3://bucket/out.tensors")["layers.1.weight"]


def test_source_and_target_have_separate_secrets(bucket: InMemoryBucket, source: str) -> None:
    """The source is decrypted with one secret and the target encrypted with another."""
    convert(source, "s3://bucket/locked.tensors", lock=Secret(key=KEY))
    with pytest.raises(StorageAccessDenied, match="is encrypted"):
        convert("s3://bucket/locked.tensors", "s3://bucket/out.tensors")
    assert "out.tensors" not in bucket.objects
    convert("s3://bucket/locked.tensors", "s3://bucket/out.safetensors", unlock=Secret(key=KEY))
    assert (
        raw_tensors(TENSORS) == read_raw("s3://bucket/out.safetensors") == read_raw("s3://bucket/locked.tensors", KEY)
    )


@pytest.mark.parametrize("target", ["out.tensors", "out.safetensors", "snapshot/", "shards/"])
def test_an_existing_target_is_replaced_only_by_force(bucket: InMemoryBucket, source: str, target: str) -> None:
    """Without `force` the existing target stays; with it, nothing of the target remains."""
    max_shard_bytes = 30 if target == "shards/" else None
    write_tensors({"old": torch.ones(40)}, "s3://bucket/old.tensors")
    convert("s3://bucket/old.tensors", f"s3://bucket/{target}", max_shard_bytes=max_shard_bytes)
    before = dict(bucket.objects)
    with pytest.raises(SettingsError, match="already exists"):
        convert(source, f"s3://bucket/{target}", max_shard_bytes=max_shard_bytes)
    assert before == bucket.objects
    convert(source, f"s3://bucket/{target}", max_shard_bytes=max_shard_bytes, force=True)
    assert raw_tensors(TENSORS) == read_raw(f"s3://bucket/{target}")


def test_a_forced_conversion_replaces_other_formats(bucket: InMemoryBucket, source: str) -> None:
    """A load after a forced conversion returns the converted tensors, whatever format was there before."""
    convert(source, "s3://bucket/snapshot.safetensors/", max_shard_bytes=20)
    with pytest.raises(SettingsError, match="contains a checkpoint"):
        convert(source, "s3://bucket/snapshot.safetensors/", force=True)
    write_tensors({"old": torch.ones(40)}, "s3://bucket/old.tensors")
    save({"old": torch.ones(40)}, "s3://bucket/a.safetensors", shared=True)
    with pytest.raises(SettingsError, match="already exists"):
        convert(source, "s3://bucket/a.safetensors")
    convert(source, "s3://bucket/a.safetensors", force=True)
    assert raw_tensors(TENSORS) == read_raw("s3://bucket/a.safetensors")
    convert(source, "s3://bucket/shards/", max_shard_bytes=20)
    convert(source, "s3://bucket/shards/", max_shard_bytes=1000, force=True)
    assert ["shards/model.safetensors"] == [name for name in bucket.objects if name.startswith("shards/")]


@pytest.mark.parametrize(
    ("target", "max_shard_bytes"),
    [("out.tensors", None), ("out.tensors", 20), ("out.safetensors", None), ("out/", 20)],
)
@pytest.mark.parametrize("error", [StorageFull("no space left"), KeyboardInterrupt()])
def test_a_failed_conversion_leaves_nothing(
    bucket: InMemoryBucket, source: str, target: str, max_shard_bytes: int | None, error: BaseException
) -> None:
    """A failed conversion leaves no file behind and keeps none open."""
    before = dict(bucket.objects)
    for failing in range(1, 12):
        bucket.log.clear()

        def fail(operation: str, path: str, failing: int = failing) -> None:
            if (
                operation in ("write", "commit")
                and len(bucket.paths_of("write") + bucket.paths_of("commit")) == failing
            ):
                raise error

        bucket.fault = fail
        try:
            convert(source, f"s3://bucket/{target}", max_shard_bytes=max_shard_bytes)
        except type(error):
            bucket.fault = None
            assert before == bucket.objects
            assert 0 == bucket.open_blobs
            continue
        break
    assert failing > 3


def test_a_damaged_source_leaves_nothing(bucket: InMemoryBucket, source: str) -> None:
    """A tensor that does not match its hash ends the conversion, even after others were written."""
    content = bytearray(bucket.objects["in/model.tensors"])
    content[-9] ^= 1
    at = content.rindex(TENSORS["norm"].numpy().tobytes())
    content[at] ^= 1
    bucket.objects["in/model.tensors"] = bytes(content)
    with pytest.raises(RforkError, match="norm does not match its hash"):
        convert(source, "s3://bucket/out.safetensors")
    assert ["in/model.tensors"] == list(bucket.objects)


@pytest.mark.parametrize(
    ("source_name", "target", "how", "error", "message"),
    [
        ("in/model.tensors", "s3://bucket/in/model.tensors", {}, SettingsError, "is also the source"),
        ("in", "s3://bucket/in/", {}, SettingsError, "is also the source"),
        ("in/model.tensors", "s3://bucket/in/", {}, SettingsError, "is also the source"),
        ("in", "s3://bucket/in/model.safetensors", {}, SettingsError, "is also the source"),
        ("in/model.tensors", "https://host/out.tensors", {}, SettingsError, "read-only"),
        ("in/model.tensors", "s3://bucket/out.gguf", {}, SettingsError, "cannot be written"),
        ("in/model.tensors", "s3://bucket/a.safetensors", {"max_shard_bytes": 9}, SettingsError, "cannot be sharded"),
        ("in/model.tensors", "s3://bucket/out/", {"lock": Secret(key=KEY)}, SettingsError, "encrypted"),
        ("in/model.tensors", "ftp://host/out", {}, SettingsError, "unknown scheme"),
        ("in/model.tensors", "s3://bucket/out.tensors", {"only": ["x.*"]}, CheckpointError, "matches 'x"),
        ("none.tensors", "s3://bucket/out.tensors", {}, StorageNotFound, "none.tensors"),
        ("none", "s3://bucket/out.tensors", {}, CheckpointError, "nothing to load"),
    ],
)
def test_invalid_input_raises_a_one_line_error(
    bucket: InMemoryBucket,
    source: str,
    source_name: str,
    target: str,
    how: dict[str, object],
    error: type[RforkError],
    message: str,
) -> None:
    """Invalid input is refused before anything is written, with or without force."""
    for force in (False, True):
        with pytest.raises(error, match=message) as raised:
            convert(f"s3://bucket/{source_name}", target, force=force, **how)  # type: ignore[arg-type]
        assert 1 == len(str(raised.value).splitlines())
    assert ["in/model.tensors"] == list(bucket.objects)


def test_a_dtype_that_safetensors_lacks_is_named(bucket: InMemoryBucket) -> None:
    """Complex tensors can be converted to `.tensors` files and snapshots; safetensors refuses them."""
    write_tensors({"wave": torch.ones(2, dtype=torch.complex64)}, "s3://bucket/in.tensors")
    convert("s3://bucket/in.tensors", "s3://bucket/snapshot/")
    with pytest.raises(CheckpointError, match="wave"):
        convert("s3://bucket/in.tensors", "s3://bucket/out.safetensors")
    assert raw_tensors({"wave": torch.ones(2, dtype=torch.complex64)}) == read_raw("s3://bucket/snapshot/")


def test_memory_is_bounded(bucket: InMemoryBucket) -> None:
    """Tensors are read in groups of at most half the memory that the settings allow."""
    tensors = {f"t{number}": torch.full((1 << 20,), number, dtype=torch.uint8) for number in range(64)}
    write_tensors(tensors, "s3://bucket/in.tensors")
    progress_calls: list[tuple[int, int]] = []
    bucket.log.clear()
    convert(
        "s3://bucket/in.tensors",
        "s3://bucket/out.tensors",
        settings=StorageSettings(staging_bytes=16 << 20),
        progress=lambda done, total: progress_calls.append((done, total)),
    )
    reads = [index for index, (operation, _) in enumerate(bucket.log) if operation == "read"]
    writes = [index for index, (operation, _) in enumerate(bucket.log) if operation == "write"]
    assert (64 << 20, 64 << 20) == progress_calls[-1]
    assert reads[-1] > writes[len(writes) // 3]  # the previous group is read while the third is written
    assert bucket.objects["in.tensors"] == bucket.objects["out.tensors"]

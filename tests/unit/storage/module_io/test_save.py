"""Saving modules and named tensors in the format that the name selects."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch import nn

from rfork.errors import SettingsError, UnsupportedTensor
from rfork.schema import Rank
from rfork.storage.formats.detect import open_source
from rfork.storage.module_io.save import save
from tests.memory_bucket import InMemoryBucket, bucket
from tests.tensor_samples import KEY, PASSWORD, raw_tensors, samples

__all__ = ["bucket"]

RANK = Rank(tp=1, tp_size=2, pp=1, pp_size=2)


@pytest.mark.parametrize(
    ("uri", "written"),
    [
        ("s3://bucket/m.tensors", "m.tensors"),
        ("s3://bucket/model-rank-%03d.tensors", "model-rank-003.tensors"),
        ("s3://bucket/m.safetensors", "m.safetensors"),
        ("s3://bucket/folder", "folder/model-rank-003.safetensors"),
    ],
)
def test_the_name_selects_the_format(bucket: InMemoryBucket, uri: str, written: str) -> None:
    """A tensorizer file, a snapshot, or a rank's snapshot in a folder contains every tensor."""
    progress_bytes: list[int] = []
    saved = save(samples(), uri, rank=RANK, progress=progress_bytes.append)
    assert f"s3://bucket/{written}" == saved.uri
    assert len(samples()) == saved.tensors
    assert saved.nbytes == sum(progress_bytes)
    assert written in bucket.objects
    with closing(open_source(f"s3://bucket/{written}")) as source:
        assert raw_tensors(samples()) == raw_tensors(source.stream())


def test_a_snapshot_contains_the_complete_state(bucket: InMemoryBucket) -> None:
    """A snapshot contains non-persistent buffers too; a tensorizer file contains the state dict."""
    module = nn.Linear(3, 2)
    module.register_buffer("made", torch.ones(2), persistent=False)
    save(module, "s3://bucket/snapshot/")
    save(module, "s3://bucket/m.tensors")
    with closing(open_source("s3://bucket/snapshot/")) as source:
        assert {"weight", "bias", "made"} == set(source.specs)
    with closing(open_source("s3://bucket/m.tensors")) as source:
        assert raw_tensors(module.state_dict()) == raw_tensors(source.stream())


def test_shared_snapshots_store_equal_chunks_once(bucket: InMemoryBucket) -> None:
    """Two revisions of the same weights share their chunks."""
    save(samples(), "s3://bucket/model/1/", shared=True)
    first = len([name for name in bucket.objects if "/chunks/" in name])
    save(samples(), "s3://bucket/model/2/", shared=True)
    assert first == len([name for name in bucket.objects if "/chunks/" in name])
    with closing(open_source("s3://bucket/model/2/")) as source:
        assert raw_tensors(samples()) == raw_tensors(source.stream())


def test_only_tensorizer_files_accept_secrets(bucket: InMemoryBucket) -> None:
    """A key or password is refused for a snapshot, which would not be encrypted."""
    for uri in ("s3://bucket/m.safetensors", "s3://bucket/folder/"):
        with pytest.raises(SettingsError, match="files can be encrypted"):
            save(samples(), uri, key=KEY)
        with pytest.raises(SettingsError, match="files can be encrypted"):
            save(samples(), uri, password=PASSWORD)
    with pytest.raises(SettingsError, match="cannot share chunks"):
        save(samples(), "s3://bucket/m.tensors", shared=True)
    assert {} == bucket.objects


@pytest.mark.parametrize("uri", ["s3://bucket/m.tensors", "s3://bucket/m.safetensors"])
def test_a_tensor_without_bytes_is_named(bucket: InMemoryBucket, uri: str) -> None:
    """A module on the meta device is refused, and nothing is written."""
    with pytest.raises(UnsupportedTensor, match="weight"):
        save(nn.Linear(2, 2, bias=False, device="meta"), uri)
    assert {} == bucket.objects

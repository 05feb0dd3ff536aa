"""Saving modules and named tensors by the name that they are given."""

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
def test_the_name_says_what_is_written(bucket: InMemoryBucket, uri: str, written: str) -> None:
    """A tensorizer file, a snapshot, or a rank's snapshot in a folder: each holds every tensor."""
    progress_bytes: list[int] = []
    saved = save(samples(), uri, rank=RANK, progress=progress_bytes.append)
    assert (f"s3://bucket/{written}", len(samples())) == (saved.uri, saved.tensors)
    assert saved.nbytes == sum(progress_bytes)
    assert written in bucket.objects
    with closing(open_source(f"s3://bucket/{written}")) as source:
        assert raw_tensors(samples()) == raw_tensors(source.stream())


def test_a_module_is_saved_with_all_that_it_serves_with(bucket: InMemoryBucket) -> None:
    """A snapshot has buffers that are not persistent too; a tensorizer file is the state dict."""
    module = nn.Linear(3, 2)
    module.register_buffer("made", torch.ones(2), persistent=False)
    save(module, "s3://bucket/snapshot/")
    save(module, "s3://bucket/m.tensors")
    with closing(open_source("s3://bucket/snapshot/")) as source:
        assert {"weight", "bias", "made"} == set(source.specs)
    with closing(open_source("s3://bucket/m.tensors")) as source:
        assert raw_tensors(module.state_dict()) == raw_tensors(source.stream())


def test_shared_snapshots_store_equal_chunks_once(bucket: InMemoryBucket) -> None:
    """Two revisions of the same weights have their chunks in common."""
    save(samples(), "s3://bucket/model/1/", shared=True)
    first = len([name for name in bucket.objects if "/chunks/" in name])
    save(samples(), "s3://bucket/model/2/", shared=True)
    assert first == len([name for name in bucket.objects if "/chunks/" in name])
    with closing(open_source("s3://bucket/model/2/")) as source:
        assert raw_tensors(samples()) == raw_tensors(source.stream())


def test_secrets_are_for_tensorizer_files(bucket: InMemoryBucket) -> None:
    """A key or password with a snapshot's name is refused: nobody thinks it encrypted."""
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
    """Nothing is written of a module that is on the meta device."""
    with pytest.raises(UnsupportedTensor, match="weight"):
        save(nn.Linear(2, 2, device="meta"), uri)
    assert {} == bucket.objects

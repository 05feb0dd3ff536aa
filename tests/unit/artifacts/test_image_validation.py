"""Images that are rejected before any byte is requested or before any file is installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rfork.artifacts.cache_types import CACHE_TYPES
from rfork.artifacts.client import ArtifactReport, install_image
from rfork.artifacts.metadata import METADATA_TENSOR, check_layout
from rfork.errors import LayoutMismatch, SourceCorrupt
from rfork.image.capture import image_from_tensors
from rfork.image.layout import Layout, TensorSpec
from tests.unit.artifacts.file_trees import (
    FOREVER,
    KEY,
    SETTINGS,
    cache_dir,
    image_with,
    pack_tree,
    write_tree,
)


def test_a_group_without_its_files_is_rejected(tmp_path: Path) -> None:
    """Nothing of the image is installed: Triton would count the incomplete group as a cache hit and fail."""
    group = json.dumps({"child_paths": {"k.cubin": "k.cubin", "k.json": "k.json"}}).encode()
    image = image_with({"triton/AB/__grp__k.json": group, "triton/AB/k.json": b"{}"}, KEY)
    with pytest.raises(SourceCorrupt, match=r"lacks 'k.cubin'"):
        install_image(image, [cache_dir(tmp_path / "b")], KEY, SETTINGS, FOREVER, ArtifactReport("m", KEY.id))
    assert not (tmp_path / "b").exists()


def test_the_metadata_size_is_limited() -> None:
    """The limit is about 1.2 KiB per file and is checked before any byte is requested."""
    specs = [("triton/a", "uint8", (1,), (1,), 0), (METADATA_TENSOR, "uint8", (1 << 20,), (1,), 1)]
    layout = Layout((TensorSpec(*spec) for spec in specs), (1 << 20) + 1)
    with pytest.raises(SourceCorrupt, match="metadata of the artifacts is too large"):
        check_layout(layout, CACHE_TYPES, 100, 1 << 30)


@pytest.mark.parametrize(
    "name",
    ["triton/../../outside", "triton//etc/cron.d/x", "/etc/passwd", "triton/a/./b", "triton/", "triton",
     "triton/a\\b", "triton/a\nb", "triton/" + "x" * 256, "triton/AB/lock", "../triton/a",
     "triton/.rfork-x.tmp/a", "triton/a\0b"],
)  # fmt: skip
def test_a_malicious_name_rejects_the_complete_image(name: str, tmp_path: Path) -> None:
    """It is rejected before any byte is requested, even if other names are valid."""
    layout = image_with({name: b"evil", "triton/AB/good": b"good"}).layout
    with pytest.raises(SourceCorrupt):
        check_layout(layout, CACHE_TYPES, 100, 1 << 20)


def test_a_file_cannot_also_be_a_folder() -> None:
    """One of them would be written through the other."""
    with pytest.raises(SourceCorrupt, match="as a file and as a folder"):
        check_layout(image_with({"triton/a": b"1", "triton/a/b": b"2"}).layout, CACHE_TYPES, 100, 1 << 20)


@pytest.mark.parametrize(
    ("max_files", "max_bytes", "message"),
    [(1, 1 << 20, "have 2 files, more than 1"), (100, 10, "more than RFORK_ARTIFACTS_MAX_BYTES")],
)
def test_an_oversized_image_is_rejected(max_files: int, max_bytes: int, message: str) -> None:
    """It is rejected before memory is allocated; the error names the limit."""
    layout = image_with({"triton/a": b"1", "triton/b": b"2"}).layout
    with pytest.raises(SourceCorrupt, match=message):
        check_layout(layout, CACHE_TYPES, max_files, max_bytes)


@pytest.mark.parametrize(("shape", "offset"), [((9,), 0), ((1,), 8), ((1,), -1), ((-1,), 0), ((8,), 0)], ids=str)
def test_a_file_outside_the_image_is_rejected(shape: tuple[int], offset: int) -> None:
    """A file outside the image's bytes, or (the last case) on the bytes of another file, is corrupt."""
    specs = [("triton/a", "uint8", shape, (1,), offset), (METADATA_TENSOR, "uint8", (4,), (1,), 0)]
    with pytest.raises(SourceCorrupt):
        check_layout(Layout((TensorSpec(*spec) for spec in specs), 8), CACHE_TYPES, 100, 1 << 20)


def test_an_image_of_weights_is_rejected() -> None:
    """The error names a tensor that is not a file."""
    with pytest.raises(SourceCorrupt, match="which is not a file"):
        check_layout(image_from_tensors({"weight": torch.zeros(2, 2)}).layout, CACHE_TYPES, 100, 1 << 20)


def test_another_key_is_rejected_with_the_differences(tmp_path: Path) -> None:
    """Each value that differs is named with both sides."""
    image = pack_tree(write_tree(tmp_path / "a", {"AB/k": b"k"})).image
    own_key = replace(KEY, driver="560.1", torch="2.14.0")
    with pytest.raises(LayoutMismatch) as caught:
        install_image(image, [cache_dir(tmp_path / "b")], own_key, SETTINGS, FOREVER, ArtifactReport("m", own_key.id))
    differences = "driver: here 560.1, there 550.54; torch: here 2.14.0, there 2.13.0"
    assert f"these artifacts were built for another machine: {differences}" == str(caught.value)
    assert not (tmp_path / "b").exists()

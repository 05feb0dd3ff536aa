from __future__ import annotations

from pathlib import Path

import torch

from rfork.diagnostics import CheckResult
from rfork.diagnostics.storage import check_extra, check_gpu_direct, check_snapshot
from rfork.image.capture import image_from_tensors
from rfork.settings import StorageSettings
from rfork.storage.snapshots.writer import write_snapshot


def test_a_package_that_is_there() -> None:
    """A kind of storage whose package is installed can be used."""
    expected = CheckResult("storage s3", "ok", "s3:// URIs can be used")
    assert expected == check_extra("storage s3", "boto3", "s3", "s3:// URIs", lambda _: True)


def test_a_package_that_is_missing() -> None:
    """A kind whose package is missing is no failure, and the extra that brings it is named."""
    expected = CheckResult("storage s3", "skip", "s3:// URIs cannot be used", "pip install 'rfork[s3]' for them")
    assert expected == check_extra("storage s3", "boto3", "s3", "s3:// URIs", lambda _: False)


def test_gpu_direct_is_optional() -> None:
    """Without kvikio a GPU is filled through host memory."""
    gpu_direct_checks = [check_gpu_direct(lambda _: False), check_gpu_direct(lambda _: True)]
    assert ["skip", "ok"] == [check.status for check in gpu_direct_checks]


def test_the_snapshot_that_is_set(tmp_path: Path) -> None:
    """A snapshot that can be opened is told by its size and weights."""
    image = image_from_tensors({"a": torch.arange(1000)})
    written = write_snapshot(image, image.manifest(), f"{tmp_path}/")
    expected = CheckResult("snapshot", "ok", f"{tmp_path}/: 0.000 GB, weights {written.weights_id}")
    assert expected == check_snapshot(f"{tmp_path}/", StorageSettings())


def test_a_snapshot_that_is_not_there(tmp_path: Path) -> None:
    """A setting that names nothing fails the check, with a word on what to do."""
    check = check_snapshot(f"{tmp_path}/nothing/", StorageSettings())
    assert ("snapshot", "fail", True) == (check.name, check.status, bool(check.fix))

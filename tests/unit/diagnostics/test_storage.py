from __future__ import annotations

from pathlib import Path

import torch

from rfork.diagnostics import CheckResult
from rfork.diagnostics.storage import check_extra, check_gpu_direct, check_snapshot
from rfork.image.capture import image_from_tensors
from rfork.settings import StorageSettings
from rfork.storage.snapshots.writer import write_snapshot


def test_an_installed_package() -> None:
    """A storage backend whose package is installed is supported."""
    expected = CheckResult("storage s3", "ok", "s3:// URIs supported")
    assert expected == check_extra("storage s3", "boto3", "s3", "s3:// URIs", lambda _: True)


def test_a_missing_package() -> None:
    """A missing package is no failure, and the result names its extra."""
    expected = CheckResult("storage s3", "off", "s3:// URIs not supported", "pip install 'rfork[s3]'")
    assert expected == check_extra("storage s3", "boto3", "s3", "s3:// URIs", lambda _: False)


def test_gpu_direct_is_optional() -> None:
    """Without kvikio data reaches a GPU through host memory."""
    gpu_direct_checks = [check_gpu_direct(lambda _: False), check_gpu_direct(lambda _: True)]
    assert ["off", "ok"] == [check.status for check in gpu_direct_checks]


def test_a_configured_snapshot(tmp_path: Path) -> None:
    """The result shows the size and weights_id of the snapshot."""
    image = image_from_tensors({"a": torch.arange(1000)})
    written = write_snapshot(image, image.manifest(), f"{tmp_path}/")
    expected = CheckResult("snapshot", "ok", f"{tmp_path}/: 0.000 GB, weights {written.weights_id}")
    assert expected == check_snapshot(f"{tmp_path}/", StorageSettings())


def test_a_missing_snapshot_is_a_failure(tmp_path: Path) -> None:
    """A missing snapshot fails the check, with a fix."""
    check = check_snapshot(f"{tmp_path}/nothing/", StorageSettings())
    assert ("snapshot", "fail", True) == (check.name, check.status, bool(check.fix))

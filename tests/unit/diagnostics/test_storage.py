"""The storage checks of `rfork doctor`."""

from __future__ import annotations

from pathlib import Path

import torch

from rfork.diagnostics.result import CheckResult
from rfork.diagnostics.storage import check_backend, check_gpu_direct_storage, check_snapshot
from rfork.image.capture import image_from_tensors
from rfork.settings import StorageSettings
from rfork.storage.snapshots.writer import write_snapshot


def test_a_backend_whose_package_is_installed_is_supported() -> None:
    """The result names the supported feature."""
    expected = CheckResult("storage s3", "ok", "s3:// URIs supported")
    assert expected == check_backend("storage s3", "s3:// URIs", "s3", installed=True)


def test_a_missing_package_is_no_failure() -> None:
    """The backend is off, and the result names the extra to install."""
    expected = CheckResult("storage s3", "off", "s3:// URIs not supported", "pip install 'rfork[s3]'")
    assert expected == check_backend("storage s3", "s3:// URIs", "s3", installed=False)


def test_gpu_direct_storage_is_optional() -> None:
    """Without kvikio, data reaches a GPU through host memory."""
    assert "ok" == check_gpu_direct_storage(True).status
    assert "off" == check_gpu_direct_storage(False).status


def test_a_readable_snapshot_is_shown_with_size_and_weights(tmp_path: Path) -> None:
    """The result shows the size and weights_id of the snapshot."""
    image = image_from_tensors({"a": torch.arange(1000)})
    written = write_snapshot(image, image.manifest(), f"{tmp_path}/")
    expected = CheckResult("snapshot", "ok", f"{tmp_path}/: 0.000 GB, weights {written.weights_id}")
    assert expected == check_snapshot(f"{tmp_path}/", StorageSettings())


def test_a_missing_snapshot_is_a_failure(tmp_path: Path) -> None:
    """A missing snapshot fails the check, with a fix."""
    check = check_snapshot(f"{tmp_path}/nothing/", StorageSettings())
    assert "snapshot" == check.name
    assert "fail" == check.status
    assert check.fix

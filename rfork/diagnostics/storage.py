"""Checks of storage: supported backends, and the configured snapshot."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from rfork.diagnostics.result import CheckResult
from rfork.errors import RforkError
from rfork.settings import InstanceSettings, StorageSettings
from rfork.storage.snapshots.entry import open_files, snapshot_location


def run_checks(settings: InstanceSettings, storage: StorageSettings) -> list[CheckResult]:
    """Run all storage checks and return the results in display order."""
    checks = [
        check_backend("storage s3", "s3:// URIs", "s3", installed=is_installed("boto3")),
        check_backend("storage cloud", "gs:// and az:// URIs", "cloud", installed=is_installed("obstore")),
        check_backend("storage encrypted", "encrypted .tensors", "tensorizer", installed=is_installed("libnacl")),
    ]
    if torch.cuda.is_available():
        checks.append(check_gpu_direct_storage(is_installed("kvikio")))
    if settings.snapshot is not None:
        checks.append(check_snapshot(settings.snapshot, storage))
    return checks


def check_backend(name: str, feature: str, extra: str, *, installed: bool) -> CheckResult:
    """Check that a storage backend can be used. `installed`: the package that rfork's `extra` installs is present."""
    if installed:
        return CheckResult(name, "ok", f"{feature} supported")
    return CheckResult(name, "off", f"{feature} not supported", f"pip install 'rfork[{extra}]'")


def check_gpu_direct_storage(kvikio_installed: bool) -> CheckResult:
    """Check for reads from local disks directly into GPU memory (GPUDirect Storage)."""
    if kvikio_installed:
        return CheckResult("storage gds", "ok", "kvikio is installed and decides at run time")
    return CheckResult(
        "storage gds",
        "off",
        "local files are copied to the GPU through pinned host memory",
        "if GPUDirect Storage is set up: pip install 'rfork[gds-cuda12]' (or gds-cuda13)",
    )


def check_snapshot(uri: str, storage: StorageSettings) -> CheckResult:
    """Check the manifest and header of the snapshot that instances read if there is no source."""
    try:
        files = open_files(*snapshot_location(uri), storage)
    except RforkError as error:
        return CheckResult(
            "snapshot", "fail", str(error), error.hint or "correct RFORK_SNAPSHOT, or write one: rfork snapshot write"
        )
    try:
        manifest_file = files.manifest_file
        return CheckResult(
            "snapshot",
            "ok",
            f"{uri}: {manifest_file.image_bytes / 1e9:.3f} GB, weights {manifest_file.weights_id}",
        )
    finally:
        files.data.close()


def is_installed(module: str) -> bool:
    """Return whether a top-level module can be imported."""
    return find_spec(module) is not None

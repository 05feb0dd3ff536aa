"""Checks of storage: supported backends, and the configured snapshot."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from rfork.diagnostics import CheckResult
from rfork.errors import RforkError
from rfork.settings import InstanceSettings, StorageSettings
from rfork.storage.snapshots.files import open_files, snapshot_location

Finder = Callable[[str], bool]


def installed(module: str) -> bool:
    """Return whether a top-level module can be imported."""
    return find_spec(module) is not None


def run_checks(settings: InstanceSettings, storage: StorageSettings) -> list[CheckResult]:
    """Run all storage checks and return the results in display order."""
    checks = [
        check_extra("storage s3", "boto3", "s3", "s3:// URIs", installed),
        check_extra("storage cloud", "obstore", "cloud", "gs:// and az:// URIs", installed),
        check_extra("storage encrypted", "libnacl", "tensorizer", "encrypted .tensors", installed),
        *([check_gpu_direct(installed)] if torch.cuda.is_available() else []),
    ]
    return checks if settings.snapshot is None else [*checks, check_snapshot(settings.snapshot, storage)]


def check_extra(name: str, module: str, extra: str, feature: str, has: Finder) -> CheckResult:
    """Check that the package required by a storage backend is installed."""
    if has(module):
        return CheckResult(name, "ok", f"{feature} supported")
    return CheckResult(name, "off", f"{feature} not supported", f"pip install 'rfork[{extra}]'")


def check_gpu_direct(has: Finder) -> CheckResult:
    """Check for reads from local disks directly into GPU memory (GPUDirect Storage)."""
    if has("kvikio"):
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

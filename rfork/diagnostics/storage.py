"""What `rfork doctor` says of storage: which kinds can be read here, and the snapshot that is set."""

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
    """Whether a top-level module can be imported."""
    return find_spec(module) is not None


def run_checks(settings: InstanceSettings, storage: StorageSettings) -> list[CheckResult]:
    """Every check of storage, in the order to print."""
    checks = [
        check_extra("storage s3", "boto3", "s3", "s3:// URIs", installed),
        check_extra("storage cloud", "obstore", "cloud", "gs:// and az:// URIs", installed),
        check_extra("storage encrypted", "libnacl", "tensorizer", "encrypted .tensors", installed),
        *([check_gpu_direct(installed)] if torch.cuda.is_available() else []),
    ]
    return checks if settings.snapshot is None else [*checks, check_snapshot(settings.snapshot, storage)]


def check_extra(name: str, module: str, extra: str, what: str, has: Finder) -> CheckResult:
    """A package that one kind of storage needs."""
    if has(module):
        return CheckResult(name, "ok", f"{what} can be used")
    return CheckResult(name, "skip", f"{what} cannot be used", f"pip install 'rfork[{extra}]' for them")


def check_gpu_direct(has: Finder) -> CheckResult:
    """Reads from local disks straight into a GPU's memory."""
    if has("kvikio"):
        return CheckResult("storage gds", "ok", "kvikio is installed; it decides at run time")
    return CheckResult(
        "storage gds",
        "skip",
        "local files reach the GPU through pinned host memory",
        "pip install 'rfork[gds-cuda12]' (or gds-cuda13) where GPUDirect Storage is set up",
    )


def check_snapshot(uri: str, storage: StorageSettings) -> CheckResult:
    """The snapshot that instances read where nobody holds the weights: its manifest and header."""
    try:
        files = open_files(*snapshot_location(uri), storage)
    except RforkError as error:
        return CheckResult(
            "snapshot", "fail", str(error), error.hint or "mend RFORK_SNAPSHOT, or write one: rfork snapshot"
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

"""The driver probes with the fake driver alone: each has a result, and all results are what the fake documents.

A GPU's results are reported next to these: see `benchmarks.gpu.probes`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rfork.cuda import library

ROOT = Path(__file__).resolve().parents[3]
Result = int | str
WITHOUT_DEVICE = {"cuInit", "cuDriverGetVersion", "cuGetErrorString"}
"""Functions that need no device, and are the same in any thread."""

NO_CONTEXT, UNSAFE, INTACT = 201, "900, capture invalidated", "0, capture intact"
CALLS: dict[str, tuple[Result, Result]] = {
    # Call: without a context, and in the default mode while another thread captures.
    "cuDeviceGet": (0, INTACT),
    "cuDeviceGetCount": (0, INTACT),
    "cuDeviceGetUuid_v2": (0, INTACT),
    "cuDeviceGetAttribute": (0, INTACT),
    "cuDeviceCanAccessPeer": (0, INTACT),
    "cuDevicePrimaryCtxRetain": (0, INTACT),
    "cuCtxPushCurrent_v2 and cuCtxPopCurrent_v2": (0, INTACT),
    "cuThreadExchangeStreamCaptureMode": (0, INTACT),
    "cuMemGetAddressRange_v2": (NO_CONTEXT, INTACT),
    "cuPointerGetAttribute": (NO_CONTEXT, INTACT),
    "cuFlushGPUDirectRDMAWrites": (NO_CONTEXT, INTACT),
    "cuMemHostAlloc": (NO_CONTEXT, UNSAFE),
    "cuMemHostRegister_v2": (NO_CONTEXT, UNSAFE),
    "cuStreamCreate": (NO_CONTEXT, INTACT),
    "cuStreamQuery": (NO_CONTEXT, UNSAFE),
    "cuMemcpyAsync": (NO_CONTEXT, INTACT),
    "cuEventCreate": (NO_CONTEXT, INTACT),
    "cuEventRecord, legacy stream": (NO_CONTEXT, UNSAFE),
    "cuEventRecord": (NO_CONTEXT, INTACT),
    "cuStreamWaitEvent": (NO_CONTEXT, INTACT),
    "cuStreamSynchronize": (NO_CONTEXT, UNSAFE),
    "cuEventSynchronize": (NO_CONTEXT, UNSAFE),
    "cuEventQuery": (0, UNSAFE),
    "cuEventDestroy_v2": (NO_CONTEXT, INTACT),
    "cuStreamDestroy_v2": (NO_CONTEXT, INTACT),
    "cuMemHostUnregister": (NO_CONTEXT, UNSAFE),
    "cuMemFreeHost": (NO_CONTEXT, UNSAFE),
    "cuIpcGetMemHandle": (NO_CONTEXT, INTACT),
    "cuIpcOpenMemHandle_v2": (NO_CONTEXT, UNSAFE),
    "cuIpcCloseMemHandle": (NO_CONTEXT, UNSAFE),
    "cuMemRetainAllocationHandle": (0, INTACT),
    "cuMemExportToShareableHandle": (0, INTACT),
    "cuMemImportFromShareableHandle": (0, INTACT),
    "cuMemAddressReserve": (0, UNSAFE),
    "cuMemMap": (0, UNSAFE),
    "cuMemSetAccess": (0, UNSAFE),
    "cuMemUnmap": (0, UNSAFE),
    "cuMemAddressFree": (0, UNSAFE),
    "cuMemRelease": (0, INTACT),
}
TABLE: dict[str, dict[str, Result]] = {
    "rdma writes": {"order": 200, "flush options": 1, "dma-buf": 1, "cuFlushGPUDirectRDMAWrites": 0},
    "address ranges": {
        "cuMemGetAddressRange, cudaMalloc": "the allocation",
        "cuMemGetAddressRange, expandable": "the reservation",
        "MAPPING_SIZE, expandable": 20 << 20,
        "RANGE_SIZE, expandable": "another size",
        "IS_LEGACY_CUDA_IPC_CAPABLE, cudaMalloc": 1,
        "ALLOWED_HANDLE_TYPES, cudaMalloc": 0,
        "IS_LEGACY_CUDA_IPC_CAPABLE, expandable": 0,
        "ALLOWED_HANDLE_TYPES, expandable": 1,
    },
    "mapped memory": {
        "cuIpcGetMemHandle": 1,
        "cuMemRetainAllocationHandle": 0,
        "its handle, retained twice": "equal",
        "cuMemRetainAllocationHandle, cudaMalloc": 1,
        "cuMemExportToShareableHandle": 0,
        "cuMemImportFromShareableHandle, own process": 0,
        "cuMemRelease, released handle": 1,
        "cuMemImportFromShareableHandle, process has ended": 0,
        "cuMemAddressReserve, not a multiple of 2 MiB": 1,
        "cuMemAddressReserve": 0,
        "cuMemMap, more than the memory": 1,
        "cuMemMap, less than the memory": 0,
        "cuMemMap": 0,
        "cuMemMap, mapped address": 1,
        "cuMemSetAccess, PROT_READ": 801,
        "cuMemSetAccess, PROT_READWRITE": 0,
        "cuMemRelease, mapped memory": 0,
        "copy after cuMemRelease": "right bytes",
        "cuMemAddressFree, mapped address": 1,
        "cuMemUnmap, a part": 1,
        "cuMemUnmap": 0,
        "cuMemAddressFree": 0,
    },
    "legacy handles": {
        "cuIpcGetMemHandle": 0,
        "cuIpcGetMemHandle, within the allocation": 1,
        "cuIpcOpenMemHandle, own process": 201,
        "cuIpcOpenMemHandle, flags 0": 1,
        "cuIpcOpenMemHandle": 0,
        "copy": "right bytes",
        "cuIpcOpenMemHandle, again": 0,
        "its address, opened twice": "equal",
        "cuMemGetAddressRange": "the allocation",
        "IS_LEGACY_CUDA_IPC_CAPABLE": 0,
        "cuIpcCloseMemHandle": 0,
        "memory after cuIpcCloseMemHandle": "mapped",
        "cuIpcCloseMemHandle, again": 0,
        "memory after cuIpcCloseMemHandle, again": "not mapped",
        "cuIpcCloseMemHandle, closed handle": 1,
        "cuIpcOpenMemHandle, after it was closed": 0,
        "cuIpcOpenMemHandle, freed memory": 205,
    },
    "handle of a dead owner": {"": 205},
    "host memory": {
        "cuMemHostRegister": 0,
        "copy from it": "right bytes",
        "cuMemHostRegister, a part again": 712,
        "cuMemHostUnregister, a part": 713,
        "cuMemHostUnregister": 0,
        "cuMemHostUnregister, again": 713,
        "cuMemHostRegister, parts of pages": 0,
    },
    "copies": {
        "cuMemcpyAsync, 0 bytes": 0,
        "cuStreamQuery, two streams": 600,
        "two streams": "the later one is first",
        "cuStreamQuery, two streams, with an event": 600,
        "two streams, with an event": "in order",
        "cuStreamQuery, complete": 0,
        "memory in two pieces": "right bytes",
    },
    "without a context": {name: results[0] for name, results in CALLS.items()},
    "during a global capture": {name: results[1] for name, results in CALLS.items()},
    "relaxed during a global capture": {
        name: "906, capture intact" if name.endswith("legacy stream") else INTACT for name in CALLS
    },
    "driver in a forked child": {"": 3},
    "host access": {"": "signal 11"},
    "copy after close": {"": 1},
    "copy of freed memory": {"": 1},
    "copy of a dead owner": {"": "right bytes"},
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Result]]:
    """Results of the fake by probe and case, from a run without a GPU."""
    file = tmp_path_factory.mktemp("probes") / "result.json"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FAKE_CUDA_")}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu.probes", "--device", "cpu", "--json", str(file)],
        cwd=ROOT,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    found: dict[str, dict[str, Result]] = {}
    for row in json.loads(file.read_text())["rows"]:
        probe, _, case = row["probe"].partition(": ")
        found.setdefault(probe, {})[case] = row["fake"]
    return found


@pytest.mark.parametrize("probe", TABLE)
def test_the_fake_does_what_it_documents(results: dict[str, dict[str, Result]], probe: str) -> None:
    """Each case of the probe has the result of the table."""
    assert TABLE[probe] == results[probe]


def test_every_probe_is_in_the_table(results: dict[str, dict[str, Result]]) -> None:
    """No probe is missing in the results or in the table."""
    assert TABLE.keys() == results.keys()


def test_every_call_of_rfork_has_a_probe() -> None:
    """Each function that rfork loads from the driver is called without a context and during a capture."""
    called = {name.partition(",")[0] for names in CALLS for name in names.split(" and ")}
    assert library._SIGNATURES.keys() - WITHOUT_DEVICE == called - {"cuEventQuery"}

"""The constants and structures of rfork's CUDA bindings are those of NVIDIA's header."""

from __future__ import annotations

import ctypes

import pytest

from rfork.cuda import library
from tests.fake_libcuda.fake_gpu import FakeGpu

OTHER_NAMES = {"HANDLE_BYTES": "CU_IPC_HANDLE_SIZE", "SUCCESS": "CUDA_SUCCESS"}
CONSTANTS = [name for name, value in vars(library).items() if name.isupper() and isinstance(value, int)]
CONSTANTS.remove("MIN_VERSION")
PREFIXES = {
    "INVALID_": "CUDA_ERROR_", "PEER_": "CUDA_ERROR_", "NOT_": "CUDA_ERROR_", "TOO_": "CUDA_ERROR_",
    "SYSTEM_": "CUDA_ERROR_", "COMPAT_": "CUDA_ERROR_",
}  # fmt: skip
"""Prefix in the header of the names that begin so; that of all others is `CU_`."""

STRUCTURES = {
    "CUipcMemHandle": library.IpcMemHandle,
    "CUmemAccessDesc": library.MemAccessDesc,
    "CUmemLocation": library.MemLocation,
    "CUuuid": library.Uuid,
    "CUmemFabricHandle": library.FabricHandle,
    "CUstream": ctypes.c_void_p,
    "CUdeviceptr": ctypes.c_uint64,
    "CUmemGenericAllocationHandle": ctypes.c_uint64,
}


@pytest.fixture(scope="module")
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.mark.parametrize("name", CONSTANTS)
def test_constant_equals_that_of_the_header(gpu: FakeGpu, name: str) -> None:
    """A constant of the bindings has the header's value."""
    prefix = next((prefix for begin, prefix in PREFIXES.items() if name.startswith(begin)), "CU_")
    assert getattr(library, name) == gpu.constant(OTHER_NAMES.get(name, prefix + name))


@pytest.mark.parametrize(("name", "binding"), STRUCTURES.items())
def test_structure_has_the_size_of_the_header(gpu: FakeGpu, name: str, binding: type[ctypes._CDataType]) -> None:
    """A structure of the bindings has as many bytes as the header's."""
    assert ctypes.sizeof(binding) == gpu.constant(f"sizeof {name}")

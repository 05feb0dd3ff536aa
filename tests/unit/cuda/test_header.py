"""The constants and structures of rfork's CUDA bindings are those of NVIDIA's header."""

from __future__ import annotations

import ctypes

import pytest

from rfork.transport.cuda_ipc import driver as bindings
from tests.fake_libcuda.fake_gpu import FakeGpu

CONSTANTS = {
    "CU_IPC_HANDLE_SIZE": "HANDLE_BYTES",
    "CUDA_SUCCESS": "SUCCESS",
    "CUDA_ERROR_INVALID_VALUE": "INVALID_VALUE",
    "CUDA_ERROR_INVALID_DEVICE": "INVALID_DEVICE",
    "CUDA_ERROR_INVALID_CONTEXT": "INVALID_CONTEXT",
    "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": "PEER_ACCESS_UNSUPPORTED",
    "CUDA_ERROR_NOT_READY": "NOT_READY",
    "CUDA_ERROR_TOO_MANY_PEERS": "TOO_MANY_PEERS",
    "CUDA_ERROR_NOT_PERMITTED": "NOT_PERMITTED",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "SYSTEM_DRIVER_MISMATCH",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE": "COMPAT_NOT_SUPPORTED_ON_DEVICE",
    "CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS": "_IPC_MEM_LAZY_ENABLE_PEER_ACCESS",
    "CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE": "_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE",
    "CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES": "_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES",
    "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR": "_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
    "CU_MEM_HANDLE_TYPE_FABRIC": "_MEM_HANDLE_TYPE_FABRIC",
    "CU_MEM_LOCATION_TYPE_DEVICE": "_MEM_LOCATION_TYPE_DEVICE",
    "CU_MEM_ACCESS_FLAGS_PROT_READ": "_MEM_ACCESS_FLAGS_PROT_READ",
    "CU_MEM_ACCESS_FLAGS_PROT_READWRITE": "_MEM_ACCESS_FLAGS_PROT_READWRITE",
    "CU_STREAM_NON_BLOCKING": "_STREAM_NON_BLOCKING",
    "CU_STREAM_CAPTURE_MODE_RELAXED": "_STREAM_CAPTURE_MODE_RELAXED",
}
"""Constant of cuda.h, and its name in the bindings."""

STRUCTURES = {
    "CUipcMemHandle": "IpcMemHandle",
    "CUmemAccessDesc": "MemAccessDesc",
    "CUmemLocation": "MemLocation",
    "CUuuid": "Uuid",
    "CUmemFabricHandle": "FabricHandle",
}
"""Structure of cuda.h, and its name in the bindings."""

DOCUMENTED = {
    "CU_POINTER_ATTRIBUTE_MAPPING_SIZE": 18,
    "CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR": 19,
    "CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED": 124,
    "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS": 117,
    "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING": 118,
    "CU_EVENT_BLOCKING_SYNC": 1,
    "CU_EVENT_DISABLE_TIMING": 2,
    "CU_MEMHOSTALLOC_PORTABLE": 1,
    "CU_MEMHOSTREGISTER_PORTABLE": 1,
    "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX": 0,
    "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER": 100,
    "CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES": 200,
    "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED": 900,
    "sizeof CUstream": ctypes.sizeof(ctypes.c_void_p),
    "sizeof CUdeviceptr": ctypes.sizeof(ctypes.c_uint64),
    "sizeof CUmemGenericAllocationHandle": ctypes.sizeof(ctypes.c_uint64),
}
"""Further constants of cuda.h, and their values."""


@pytest.fixture(scope="module")
def gpu() -> FakeGpu:
    return FakeGpu()


@pytest.mark.parametrize(("name", "binding"), CONSTANTS.items())
def test_constant_equals_that_of_the_header(gpu: FakeGpu, name: str, binding: str) -> None:
    """A constant of the bindings has the header's value."""
    assert getattr(bindings, binding) == gpu.constant(name)


@pytest.mark.parametrize(("name", "binding"), STRUCTURES.items())
def test_structure_has_the_size_of_the_header(gpu: FakeGpu, name: str, binding: str) -> None:
    """A structure of the bindings has as many bytes as the header's."""
    assert ctypes.sizeof(getattr(bindings, binding)) == gpu.constant(f"sizeof {name}")


@pytest.mark.parametrize(("name", "value"), DOCUMENTED.items())
def test_header_has_the_documented_value(gpu: FakeGpu, name: str, value: int) -> None:
    """The header defines this value."""
    assert value == gpu.constant(name)

"""Processes between which cuda_ipc works, and who is at fault if it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rfork.errors import NotSameHost, PeerAccessUnavailable, TargetError, TransportUnavailable
from rfork.transport.base import Endpoint
from rfork.transport.cuda_ipc import CudaIpcTransport
from tests.fake_cuda import INVALID_CONTEXT, FakeDriver, FakeMemory, fake_device_image
from tests.integration.cuda_ipc.harness import SETTINGS, SIZES, CudaIpcTarget, expected
from tests.integration.cuda_ipc_node import FencedGate
from tests.transport_contract import FakeGate, content, soon


def test_another_host(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A source under another kernel is on another host."""
    _, endpoint, _ = seed
    elsewhere = replace(endpoint, parameters={**endpoint.parameters, "boot": "another"})
    with pytest.raises(NotSameHost):
        CudaIpcTarget(SIZES).connect(elsewhere)


def test_another_process_namespace(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """If a handle is refused between two PID namespaces, the error names the cause and what to share."""
    _, endpoint, _ = seed
    side = CudaIpcTarget(SIZES)
    side.driver.open_error_code = INVALID_CONTEXT
    other_namespace = replace(endpoint, parameters={**endpoint.parameters, "processes": "pid:[1]"})
    with pytest.raises(NotSameHost, match="another PID namespace") as caught:
        side.connect(other_namespace)
    other_namespace = replace(endpoint, parameters={**endpoint.parameters, "ipc": "ipc:[1]"})
    with pytest.raises(NotSameHost, match="another IPC namespace"):
        side.connect(other_namespace)
    assert all(word in caught.value.hint for word in ("hostPID", "--pid", "expandable_segments"))


def test_no_peer_access(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """GPUs without peer access are detected before any handle is requested."""
    _, endpoint, driver = seed
    side = CudaIpcTarget(SIZES)
    side.driver.uuids, side.driver.has_peer_access = ("gpu-1", "gpu-0"), False
    with pytest.raises(PeerAccessUnavailable, match="gpu-0"):
        side.connect(endpoint)
    assert [] == driver.exports


def test_a_hidden_gpu_can_still_be_read(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A GPU that CUDA_VISIBLE_DEVICES hides is tried: its memory may still be accessible."""
    _, endpoint, _ = seed
    side = CudaIpcTarget(SIZES)
    side.driver.uuids = ("gpu-1",)
    reader = side.connect(endpoint)
    reader.read(0, side.image_bytes, soon())
    reader.close()
    assert expected(SIZES) == content(side.image)


def test_a_gpu_not_available_in_the_container(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """If a hidden GPU's memory cannot be opened, the hint names the variables that hide it."""
    _, endpoint, _ = seed
    side = CudaIpcTarget(SIZES)
    side.driver.uuids, side.driver.open_error_code = ("gpu-1",), 101
    with pytest.raises(TransportUnavailable) as caught:
        side.connect(endpoint)
    assert "NVIDIA_VISIBLE_DEVICES" in caught.value.hint


def test_an_image_of_host_memory_is_not_exported() -> None:
    """An image without bytes on a GPU is left to other transports."""
    memory = FakeMemory()
    image = fake_device_image(memory, [100, 200], on_host=[0, 1])
    with pytest.raises(TransportUnavailable, match="no bytes on a GPU"):
        CudaIpcTransport(SETTINGS, lambda: FakeDriver(memory)).export(image, FakeGate())


def test_private_memory_is_not_exported() -> None:
    """Memory that its allocator keeps private to the process is left to other transports, with a hint."""
    memory = FakeMemory()
    image = fake_device_image(memory, [100, 200], handle_type="none")
    with pytest.raises(TransportUnavailable, match="not shareable") as caught:
        CudaIpcTransport(SETTINGS, lambda: FakeDriver(memory)).export(image, FakeGate())
    assert "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC" in caught.value.hint


def test_a_target_in_host_memory(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A target without a GPU uses another transport."""
    _, endpoint, _ = seed
    with pytest.raises(TransportUnavailable, match="no bytes on a GPU"):
        CudaIpcTarget([*SIZES], on_host=range(len(SIZES))).connect(endpoint)  # type: ignore[arg-type]


def test_a_device_that_fails(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A copy that the device refuses is the target's failure and blames no source."""
    _, endpoint, _ = seed
    side = CudaIpcTarget(SIZES)
    reader = side.connect(endpoint)
    side.driver.copies_fail = True
    with pytest.raises(TargetError, match="illegal memory access"):
        reader.read(0, side.image_bytes, soon())
    reader.close()

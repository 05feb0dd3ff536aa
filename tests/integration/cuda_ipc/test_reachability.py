"""Between which processes cuda_ipc works, and whose fault it is where it does not."""

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
    """A source that another kernel runs is on no shared host."""
    _, endpoint, _ = seed
    elsewhere = replace(endpoint, parameters={**endpoint.parameters, "boot": "another"})
    with pytest.raises(NotSameHost):
        CudaIpcTarget(SIZES).connect(elsewhere)


def test_another_process_namespace(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A handle that is refused between two PID namespaces says so, and what to share."""
    _, endpoint, _ = seed
    side = CudaIpcTarget(SIZES)
    side.driver.open_error_code = INVALID_CONTEXT
    apart = replace(endpoint, parameters={**endpoint.parameters, "processes": "pid:[1]"})
    with pytest.raises(NotSameHost, match="another PID namespace") as caught:
        side.connect(apart)
    apart = replace(endpoint, parameters={**endpoint.parameters, "ipc": "ipc:[1]"})
    with pytest.raises(NotSameHost, match="another IPC namespace"):
        side.connect(apart)
    assert all(word in caught.value.hint for word in ("hostPID", "--pid", "expandable_segments"))


def test_no_peer_access(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """Two GPUs that cannot address one another are told apart before any handle is asked for."""
    _, endpoint, driver = seed
    side = CudaIpcTarget(SIZES)
    side.driver.uuids, side.driver.has_peer_access = ("gpu-1", "gpu-0"), False
    with pytest.raises(PeerAccessUnavailable, match="gpu-0"):
        side.connect(endpoint)
    assert [] == driver.exports


def test_a_hidden_gpu_may_still_be_read(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A GPU that CUDA_VISIBLE_DEVICES hides is tried: its memory can be opened all the same."""
    _, endpoint, _ = seed
    side = CudaIpcTarget(SIZES)
    side.driver.uuids = ("gpu-1",)
    reader = side.connect(endpoint)
    reader.read(0, side.image_bytes, soon())
    reader.close()
    assert expected(SIZES) == content(side.image)


def test_a_gpu_that_the_container_was_not_given(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """Where a hidden GPU's memory cannot be opened, the hint names the variables that hide it."""
    _, endpoint, _ = seed
    side = CudaIpcTarget(SIZES)
    side.driver.uuids, side.driver.open_error_code = ("gpu-1",), 101
    with pytest.raises(TransportUnavailable) as caught:
        side.connect(endpoint)
    assert "NVIDIA_VISIBLE_DEVICES" in caught.value.hint


def test_an_image_of_host_memory_is_not_exported() -> None:
    """An image without a byte on a GPU is left to other transports."""
    memory = FakeMemory()
    image = fake_device_image(memory, [100, 200], on_host=[0, 1])
    with pytest.raises(TransportUnavailable, match="no bytes on a GPU"):
        CudaIpcTransport(SETTINGS, lambda: FakeDriver(memory)).export(image, FakeGate())


def test_memory_that_cannot_be_shown_is_not_exported() -> None:
    """Memory that its allocator keeps to the process is left to other transports, with what to do."""
    memory = FakeMemory()
    image = fake_device_image(memory, [100, 200], handle_type="none")
    with pytest.raises(TransportUnavailable, match="not shareable") as caught:
        CudaIpcTransport(SETTINGS, lambda: FakeDriver(memory)).export(image, FakeGate())
    assert "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC" in caught.value.hint


def test_a_target_in_host_memory(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A target without a GPU takes another transport."""
    _, endpoint, _ = seed
    with pytest.raises(TransportUnavailable, match="no bytes on a GPU"):
        CudaIpcTarget([*SIZES], on_host=range(len(SIZES))).connect(endpoint)  # type: ignore[arg-type]


def test_a_device_that_fails(seed: tuple[FencedGate, Endpoint, FakeDriver]) -> None:
    """A copy that the device refuses is this side's failure, and blames no source."""
    _, endpoint, _ = seed
    side = CudaIpcTarget(SIZES)
    reader = side.connect(endpoint)
    side.driver.copies_fail = True
    with pytest.raises(TargetError, match="illegal memory access"):
        reader.read(0, side.image_bytes, soon())
    reader.close()

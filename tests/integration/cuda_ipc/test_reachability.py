"""Processes between which cuda_ipc works, and who is at fault if it does not."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest

from rfork.cuda.library import INVALID_CONTEXT
from rfork.errors import NotSameHost, PeerAccessUnavailable, TargetError, TransportUnavailable
from rfork.transport.cuda_ipc import CudaIpcTransport
from tests.fake_libcuda.fake_gpu import CopyFailure, FakeGpu, OpenFailure
from tests.fake_libcuda.images import device_image, patterns
from tests.integration.cuda_ipc.harness import (
    ONE_TENSOR,
    SETTINGS,
    SIZES,
    CudaIpcTarget,
    LocalSource,
    MakeRemoteSource,
    local_source,
)
from tests.integration.cuda_ipc_node import FencedGate
from tests.transport_contract import FakeGate, soon


def test_another_host(fake_gpu: FakeGpu, seed: LocalSource) -> None:
    """A source under another kernel is on another host."""
    elsewhere = replace(seed[1], parameters={**seed[1].parameters, "boot": "another"})
    with pytest.raises(NotSameHost):
        CudaIpcTarget(fake_gpu, SIZES).connect(elsewhere)


@pytest.mark.parametrize(("parameter", "name"), [("processes", "PID"), ("ipc", "IPC")])
def test_another_namespace(fake_gpu: FakeGpu, remote_source: MakeRemoteSource, parameter: str, name: str) -> None:
    """If a handle is refused between two namespaces, the error names the cause and what to share."""
    endpoint = remote_source(ONE_TENSOR)
    elsewhere = replace(endpoint, parameters={**endpoint.parameters, parameter: "another"})
    with (
        fake_gpu.failing_open(INVALID_CONTEXT),
        pytest.raises(NotSameHost, match=f"another {name} namespace") as caught,
    ):
        CudaIpcTarget(fake_gpu, ONE_TENSOR).connect(elsewhere)
    assert all(word in caught.value.hint for word in ("hostPID", "--pid", "expandable_segments"))


def test_no_peer_access(fake_gpu: FakeGpu) -> None:
    """GPUs without peer access are detected before any handle is requested."""
    fake_gpu.set_peer_access(False)
    with (
        local_source(fake_gpu, ONE_TENSOR, FencedGate(), device=1) as endpoint,
        pytest.raises(PeerAccessUnavailable, match=r"GPU 0 .* cannot address the source's GPU 1"),
    ):
        CudaIpcTarget(fake_gpu, ONE_TENSOR).connect(endpoint)
    assert 0 == fake_gpu.exports


@pytest.mark.parametrize("kind", ["legacy", "expandable"])
def test_a_hidden_gpu_can_still_be_read(fake_gpu: FakeGpu, remote_source: MakeRemoteSource, kind: str) -> None:
    """A GPU that CUDA_VISIBLE_DEVICES hides is tried: its memory may still be accessible."""
    hide_source_gpu(fake_gpu)
    fake_gpu.set_hidden_access(True)
    side = CudaIpcTarget(fake_gpu, ONE_TENSOR)
    assert patterns(ONE_TENSOR) == side.read(remote_source(ONE_TENSOR, kind=kind))


@pytest.mark.parametrize("kind", ["legacy", "expandable"])
def test_a_gpu_not_available_in_the_container(fake_gpu: FakeGpu, remote_source: MakeRemoteSource, kind: str) -> None:
    """If a hidden GPU's memory cannot be opened, the hint names the variables that hide it."""
    hide_source_gpu(fake_gpu)
    with pytest.raises(TransportUnavailable) as caught:
        CudaIpcTarget(fake_gpu, ONE_TENSOR).connect(remote_source(ONE_TENSOR, kind=kind))
    assert "NVIDIA_VISIBLE_DEVICES" in caught.value.hint


def hide_source_gpu(gpu: FakeGpu) -> None:
    """Let this process see only a GPU that the processes with sources do not see."""
    gpu.set_devices(1)
    gpu.set_uuid(0, b"another-fake-gpu")


def test_an_image_of_host_memory_is_not_exported(fake_gpu: FakeGpu) -> None:
    """An image without bytes on a GPU is left to other transports."""
    image = device_image(fake_gpu, [100, 200], on_host=[0, 1])
    with pytest.raises(TransportUnavailable, match="no bytes on a GPU"):
        CudaIpcTransport(SETTINGS).export(image, FakeGate())


def test_private_memory_is_not_exported(fake_gpu: FakeGpu) -> None:
    """Memory that its allocator keeps private to the process is left to other transports, with a hint."""
    fake_gpu.set_handle_types(OpenFailure(0))
    image = device_image(fake_gpu, [100, 200], kind="expandable")
    with pytest.raises(TransportUnavailable, match="not shareable") as caught:
        CudaIpcTransport(SETTINGS).export(image, FakeGate())
    assert "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC" in caught.value.hint


def test_a_target_in_host_memory(fake_gpu: FakeGpu, seed: LocalSource) -> None:
    """A target without a GPU uses another transport."""
    with pytest.raises(TransportUnavailable, match="no bytes on a GPU"):
        CudaIpcTarget(fake_gpu, SIZES, on_host=range(len(SIZES))).connect(seed[1])


@pytest.mark.parametrize("when", [CopyFailure.AT_QUEUE, CopyFailure.AT_QUERY])
def test_a_device_that_fails(fake_gpu: FakeGpu, seed: LocalSource, when: CopyFailure) -> None:
    """A copy that fails on the device is the target's failure and blames no source."""
    side = CudaIpcTarget(fake_gpu, SIZES)
    with (
        closing(side.connect(seed[1])) as reader,
        fake_gpu.failing_copies(when),
        pytest.raises(TargetError, match="illegal memory access"),
    ):
        reader.read(0, side.image_bytes, soon())

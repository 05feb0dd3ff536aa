"""NCCL groups on one GPU. Two ranks need two GPUs, because NCCL refuses two on one."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from rfork.errors import RforkError, TransportUnavailable, VersionMismatch
from rfork.image.capture import image_from_tensors
from rfork.peer.control_stream import serve_control_stream
from rfork.settings import InstanceSettings
from rfork.testing.peers import stream_pair
from rfork.transport.base import ControlStream, Endpoint
from rfork.transport.collective import nccl_transport
from rfork.transport.collective.block_tensors import BlockTensors
from rfork.transport.collective.key_store import Rendezvous
from tests.transport_contract import TOKEN, FakeGate, soon

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not nccl_transport(InstanceSettings()).availability().usable,
        reason="torch has no NCCL or finds no CUDA device",
    ),
]


def test_a_group_of_one_forms_and_broadcasts() -> None:
    """The communicator is created through rfork's store, and torch's environment is unchanged."""
    from rfork.transport.collective.nccl import NcclBackend

    before = dict(os.environ)
    backend, device = NcclBackend(), torch.device("cuda:0")
    with backend.transfer_context(device):
        group = backend.form(Rendezvous(), 0, 1, "127.0.0.1", device, soon())
        block = torch.arange(1000, device=device).to(torch.uint8)
        group.broadcast(block, soon())
        group.close()
    assert before == dict(os.environ)


def test_an_absent_rank_does_not_block() -> None:
    """The group is abandoned at its deadline, and the process survives."""
    from rfork.transport.collective.nccl import NcclBackend

    backend, device = NcclBackend(), torch.device("cuda:0")
    began = time.monotonic()
    with pytest.raises(RforkError), backend.transfer_context(device):
        backend.form(Rendezvous(), 0, 2, "127.0.0.1", device, began + 2.0)
    assert time.monotonic() - began < 30.0


def test_small_tensors_are_packed_on_the_gpu() -> None:
    """Small tensors gathered from one image and scattered into another are equal, also through host memory."""
    device = torch.device("cuda:0")
    tensors = {f"t{index}": torch.randn(1 + index % 50, device=device) for index in range(2000)}
    tensors["host"] = torch.randn(77)
    source = image_from_tensors(tensors)
    target = image_from_tensors({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    size = source.layout.image_bytes
    sending, receiving = BlockTensors(source, size, device), BlockTensors(target, size, device)
    destination = receiving.destination(0, size)
    destination.copy_(sending.gather(0, size))
    receiving.scatter(destination, 0, size)
    assert source.manifest() == target.manifest()


def test_host_memory_is_not_exported_over_nccl() -> None:
    """An image in host memory is exported by the other transports only."""
    with pytest.raises(TransportUnavailable, match="GPU"):
        nccl_transport(InstanceSettings()).export(image_from_tensors({"a": torch.zeros(10)}), FakeGate())


def test_a_different_nccl_release_is_detected_first() -> None:
    """A different release of NCCL is detected before a group is formed."""
    image = image_from_tensors({"a": torch.zeros(10, device="cuda")})
    endpoint = Endpoint("nccl", {"version": "1.0.0", "block": "1024"})
    with pytest.raises(VersionMismatch, match=r"1\.0\.0"):
        nccl_transport(InstanceSettings()).connect(endpoint, image, lambda: TOKEN, soon())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL NEEDS TWO GPUs: sending is NOT tested")
def test_the_right_bytes_between_two_gpus() -> None:
    """A complete image, small tensors included, is sent from one GPU to the other."""
    tensors = {f"t{index}": torch.randn(1 + index % 50, device="cuda:0") for index in range(2000)}
    tensors["large"] = torch.randn(20 << 20, device="cuda:0")
    source = image_from_tensors(tensors)
    target = image_from_tensors({name: torch.zeros_like(tensor, device="cuda:1") for name, tensor in tensors.items()})
    transport = nccl_transport(InstanceSettings())
    exporter = transport.export(source, FakeGate())
    exporter.authorize_peer("channel", "127.0.0.1")

    class NcclStreamBackend:
        def has_channel(self, channel_id: str, fork_id: str) -> bool:
            return True

        def control_stream(self, channel_id: str, line: ControlStream) -> None:
            exporter.run_control_stream(channel_id, line)

    def talk() -> ControlStream:
        near, far = stream_pair()
        threading.Thread(target=serve_control_stream, args=(NcclStreamBackend(), "channel", far), daemon=True).start()
        return near

    reader = transport.connect(exporter.endpoint(), target, lambda: TOKEN, soon(), talk)
    reader.read(0, source.layout.image_bytes, soon())
    reader.close()
    exporter.close()
    assert source.manifest() == target.manifest()

"""NCCL groups on one GPU. Two ranks need two GPUs, because NCCL refuses two on one. What may hang runs in a process
with a time limit.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest
import torch

from rfork.errors import RforkError, TransportUnavailable, VersionMismatch
from rfork.image.capture import image_from_tensors
from rfork.peer.control_stream import serve_control_stream
from rfork.settings import InstanceSettings
from rfork.testing.peers import stream_pair
from rfork.transport.base import ControlStream, Endpoint
from rfork.transport.collective import nccl_transport
from rfork.transport.collective.backend import CollectiveGroup
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


ROOT: Final = Path(__file__).parents[2]
SCENARIO_TIMEOUT_S: Final = 45.0
"""For a process that imports torch, starts CUDA and loads NCCL."""
DEVICE: Final = torch.device("cuda:0")


def run_scenario(scenario: Callable[[], None], **environment: str) -> str:
    """Run a function of this module in a process of its own, which must end by itself, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.gpu.test_nccl import {scenario.__name__} as run; run()"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=SCENARIO_TIMEOUT_S,
    )
    assert 0 == done.returncode, done.stderr[-4000:]
    return done.stdout


def form(keys: Rendezvous, rank: int, size: int, deadline: float) -> CollectiveGroup:
    """Form a group on the first GPU."""
    from rfork.transport.collective.nccl import NcclBackend

    return NcclBackend().form(keys, rank, size, "127.0.0.1", DEVICE, deadline)


def own_threads() -> list[threading.Thread]:
    """Return the threads of this process that form or abort NCCL groups."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("rfork-nccl")]


def stuck_threads() -> list[threading.Thread]:
    """Return those of `own_threads` that do not end."""
    deadline = soon()
    for thread in own_threads():
        thread.join(max(0.0, deadline - time.monotonic()))
    return own_threads()


def watchdogs() -> list[str]:
    """Return the names of torch's threads that watch process groups."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return [name for name in names if name.startswith(("pt_nccl_watchdg", "pt_nccl_heartbt"))]


def group_of_one() -> None:
    """Form a group of one rank, and transfer in it."""
    from rfork.transport.collective.nccl import NcclBackend

    before = dict(os.environ)
    with NcclBackend().transfer_context(DEVICE):
        group = form(Rendezvous(), 0, 1, soon())
        block = torch.arange(1000, device=DEVICE).to(torch.uint8)
        group.broadcast(block, soon())
        deadline = soon(10.0)
        while watchdogs() and time.monotonic() < deadline:
            threading.Event().wait(0.1)
        print("watchdogs", watchdogs(), "environment", before == dict(os.environ))
        group.close()
    print("threads", stuck_threads())


def test_a_group_of_one_forms_and_broadcasts() -> None:
    """The communicator is created through rfork's store, without a watchdog, and the environment is unchanged."""
    assert "watchdogs [] environment True\nthreads []\n" == run_scenario(group_of_one)


def two_ranks() -> None:
    """Form a group of two ranks on one GPU."""
    keys, deadline = Rendezvous(), soon()

    def run(rank: int) -> str:
        try:
            form(keys, rank, 2, deadline)
        except RforkError as error:
            return f"{error.kind} {error}"
        return "formed"

    with ThreadPoolExecutor(2) as pool:
        for outcome in pool.map(run, range(2)):
            print(" ".join(outcome.split()))
    print("threads", stuck_threads())


def test_two_ranks_on_one_gpu_are_refused() -> None:
    """Both ranks raise NCCL's error before the deadline, no thread stays, and the process survives."""
    first, second, threads = run_scenario(two_ranks).splitlines()
    for outcome in (first, second):
        assert outcome.startswith("SourceUnavailable")
        assert "invalid usage" in outcome
    assert "threads []" == threads


def absent_rank() -> None:
    """Form a group whose second rank is never ready."""
    try:
        form(Rendezvous(), 0, 2, soon(2.0))
    except RforkError as error:
        print(error.kind)
    print("threads", stuck_threads())


def test_an_absent_rank_does_not_block() -> None:
    """The group is given up at its deadline, before NCCL starts: no thread stays."""
    assert "SourceTimeout\nthreads []\n" == run_scenario(absent_rank)


def dead_rank() -> None:
    """Form a group whose second rank dies after it was ready."""
    keys = Rendezvous()
    keys.put("ready/1", b"ready")
    try:
        form(keys, 0, 2, soon(5.0))
    except RforkError as error:
        print(error.kind)
    print("abandoned", len(own_threads()))
    if "TORCH_NCCL_NONBLOCKING_TIMEOUT" in os.environ:
        print("threads", stuck_threads())


def test_a_rank_that_dies_while_nccl_connects_does_not_block() -> None:
    """Forming ends at its deadline although NCCL waits for the rank, and so does the process."""
    assert "SourceTimeout\nabandoned 1\n" == run_scenario(dead_rank)


def test_the_timeout_of_torch_ends_an_abandoned_group() -> None:
    """The thread of an abandoned group ends when torch gives up, and aborts the communicator."""
    output = run_scenario(dead_rank, TORCH_NCCL_NONBLOCKING_TIMEOUT="10")
    assert "SourceTimeout\nabandoned 1\nthreads []\n" == output


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

"""Calls of `rfork.cuda.device` on the strict fake driver."""

from __future__ import annotations

import pytest
import torch

from rfork.cuda.device import flush_rdma_writes, must_flush_rdma_writes
from rfork.errors import GpuDirectUnavailable
from tests.fake_libcuda.fake_gpu import FakeGpu

GPU = torch.device("cuda", 0)
NONE, OWNER, ALL_DEVICES = 0, 100, 200
HOST, MEMOPS = 1, 2


@pytest.mark.parametrize(
    ("ordering", "options", "expected"),
    [(NONE, HOST, True), (NONE, HOST | MEMOPS, True), (OWNER, HOST, False), (OWNER, 0, False), (ALL_DEVICES, 0, False)],
)
def test_network_writes_are_flushed_where_the_gpu_does_not_order_them(
    fake_gpu: FakeGpu, ordering: int, options: int, expected: bool
) -> None:
    """The driver's attributes decide it, without a context on the GPU."""
    fake_gpu.set_attribute(0, "GPU_DIRECT_RDMA_WRITES_ORDERING", ordering)
    fake_gpu.set_attribute(0, "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS", options)
    assert expected == must_flush_rdma_writes(GPU)
    assert set() == fake_gpu.contexts


@pytest.mark.parametrize("options", [0, MEMOPS])
def test_a_gpu_that_can_do_neither_is_refused(fake_gpu: FakeGpu, options: int) -> None:
    """Its kernels could read bytes from before the transfer."""
    fake_gpu.set_attribute(0, "GPU_DIRECT_RDMA_WRITES_ORDERING", NONE)
    fake_gpu.set_attribute(0, "GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS", options)
    with pytest.raises(GpuDirectUnavailable, match="cuda:0"):
        must_flush_rdma_writes(GPU)


def test_a_flush_reaches_the_gpu(fake_gpu: FakeGpu) -> None:
    """It is one call in the context of that GPU, also while another thread captures."""
    fake_gpu.allocate(4096)
    with fake_gpu.capturing():
        flush_rdma_writes(GPU)
    assert 1 == fake_gpu.flushes[0]

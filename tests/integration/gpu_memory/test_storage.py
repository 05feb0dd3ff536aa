"""Snapshots and checkpoints of modules in device memory, on the strict fake driver."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from safetensors.torch import save_file

from rfork.image.capture import capture
from rfork.image.memory import compute_manifest, image_sha256
from rfork.storage.module_io.load import load
from rfork.storage.snapshots.snapshot import Snapshot
from rfork.storage.snapshots.writer import write_snapshot
from tests.fake_libcuda.fake_gpu import FakeGpu
from tests.fake_libcuda.images import Kind, move_to_device
from tests.integration.gpu_memory.model import Model


@pytest.fixture(params=[False, True], ids=["", "captured"])
def gpu(request: pytest.FixtureRequest, fake_gpu: FakeGpu) -> FakeGpu:
    """The fake driver, also while another thread captures a CUDA graph in global mode."""
    fake_gpu.library.fake_set_capturing(request.param)
    return fake_gpu


@pytest.mark.parametrize("kind", ["legacy", "expandable"])
def test_a_snapshot_of_device_memory_fills_device_memory(gpu: FakeGpu, kind: Kind, tmp_path: Path) -> None:
    """Every byte of a module on one GPU is in its snapshot, and then in a module on another GPU."""
    source = capture(move_to_device(gpu, Model(), kind=kind))
    write_snapshot(source, compute_manifest(source), tmp_path / "weights.safetensors")
    target = capture(move_to_device(gpu, Model(seed=4), device=1, kind=kind))
    with closing(Snapshot.open(str(tmp_path / "weights.safetensors"), target.layout)) as snapshot:
        snapshot.fill(target)
    assert image_sha256(capture(Model())) == image_sha256(target)


def test_a_checkpoint_fills_device_memory(gpu: FakeGpu, tmp_path: Path) -> None:
    """The tensors of a checkpoint arrive in the parameters that a module already has on a GPU."""
    state = Model().state_dict()
    state.pop("two.weight")  # tied
    save_file(state, tmp_path / "model.safetensors")
    module = move_to_device(gpu, Model(seed=4))
    load(module, tmp_path, strict=False)
    expected = Model()
    image, on_host = capture(module), capture(expected)
    assert on_host.layout.layout_id == image.layout.layout_id
    with image.readable(0, image.layout.image_bytes) as views, on_host.readable(0, image.layout.image_bytes) as same:
        found, wanted = b"".join(views), b"".join(same)
    table = next(spec for spec in image.layout.tensors if spec.name == "table")
    assert wanted[: table.offset] == found[: table.offset]

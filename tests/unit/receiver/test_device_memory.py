"""Forks into device memory on the strict fake driver: spools, resumed chunks, and updates at the source."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from rfork.errors import AllSourcesFailed
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.receiver import machine
from rfork.schema import ChunkAssignment, Plan, SourceFault
from rfork.testing.transport import FaultInjection
from tests.fake_libcuda.fake_gpu import FakeGpu
from tests.fake_libcuda.images import device_bytes, device_image, move_to_device, patterns
from tests.unit.receiver.fleet import NEVER_S, Fleet, Target, plan, route, settings
from tests.unit.receiver.sessions import scripted_planner
from tests.unit.receiver.spools import (
    ALL,
    CHUNKS,
    Model,
    count_records,
    run_fork,
    settings_with_resume_dir,
    write_spool,
)


@pytest.fixture(params=[False, True], ids=["", "captured"])
def gpu(request: pytest.FixtureRequest, fake_gpu: FakeGpu) -> FakeGpu:
    """The fake driver, also while another thread captures a CUDA graph in global mode."""
    fake_gpu.library.fake_set_capturing(request.param)
    return fake_gpu


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the comparison of disk and source speed, which varies on a busy machine."""
    monkeypatch.setattr(machine, "SPOOL_WARMUP_S", NEVER_S)


@contextmanager
def device_fleet() -> Iterator[Fleet]:
    """A fleet whose threads have released the image at the end. No fixture: pytest would refer to it for longer."""
    with closing(Fleet()) as fleet:
        yield fleet
    for thread in threading.enumerate():
        if thread.name.startswith("rfork-spool"):
            thread.join(NEVER_S)


def on_device(gpu: FakeGpu, model: Model, device: int = 0) -> Model:
    """Return the model after its weights were moved to a device."""
    move_to_device(gpu, model, device)
    return model


def weights(gpu: FakeGpu, model: Model) -> bytes:
    """Return the model's bytes without the driver."""
    return gpu.read(model.get_buffer("weights"))


@pytest.mark.parametrize("spooled_chunks", [[1, 4], list(range(CHUNKS))], ids=str)
def test_a_fork_resumes_into_device_memory(gpu: FakeGpu, tmp_path: Path, spooled_chunks: list[int]) -> None:
    """Spooled chunks are copied to the device and verified there; only the others come from the source."""
    with device_fleet() as fleet:
        module = on_device(gpu, Model())
        source = capture(on_device(gpu, Model(1), device=1))
        write_spool(tmp_path, source, spooled_chunks)
        seed = fleet.source("a", source)
        report = run_fork(
            fleet, module, scripted_planner(lambda: plan(route(seed, ALL))), settings_with_resume_dir(tmp_path)
        )
        assert Model(1).bytes == weights(gpu, module)
        assert len(spooled_chunks) * MIB == report.resumed_bytes
        assert (CHUNKS - len(spooled_chunks)) * MIB == report.bytes_read
        assert [] == os.listdir(tmp_path)


def test_a_fork_into_device_memory_leaves_its_spool(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verified chunks are copied from the device into the spool, from which the next process resumes."""
    with device_fleet() as fleet:
        first, second = on_device(gpu, Model()), on_device(gpu, Model())
        source = capture(on_device(gpu, Model(1), device=1))
        dying, healthy = fleet.source("a", source, FaultInjection(dies_after_bytes=3 * MIB)), fleet.source("b", source)
        count = count_records(monkeypatch)

        def no_source_plan() -> Plan:
            for _ in range(3):
                count.acquire(timeout=NEVER_S)
            return plan(reason="no source left")

        with pytest.raises(AllSourcesFailed):
            run_fork(
                fleet,
                first,
                scripted_planner(lambda: plan(route(dying, ALL)), no_source_plan),
                settings_with_resume_dir(tmp_path, max_inflight_chunks=1),
            )
        report = run_fork(
            fleet, second, scripted_planner(lambda: plan(route(healthy, ALL))), settings_with_resume_dir(tmp_path)
        )
        assert Model(1).bytes == weights(gpu, second)
        assert 3 * MIB == report.resumed_bytes


def test_an_update_at_the_source_restarts_a_fork(gpu: FakeGpu) -> None:
    """The target ends with the bytes of the new version only, all of them verified on its device."""
    with device_fleet() as fleet:
        sizes = [3 * MIB, 2 * MIB]
        source, target_image = device_image(gpu, sizes, filled=True), device_image(gpu, sizes, device=1)
        new, seed = bytes(reversed(patterns(sizes))), fleet.source("seed", source)

        def replan(faults: tuple[SourceFault, ...], current: tuple[ChunkAssignment, ...]) -> Plan:
            current_manifest = target.serving_state.manifests[-1] if len(target.chunk_state) else None
            can_serve = seed.manifest is not None and current_manifest in (None, seed.manifest)
            return plan(route(seed, (0, 5))) if can_serve else plan(reason="it serves other weights")

        def update() -> None:
            if seed.generation or len(target.chunk_state) < 2:
                return
            with seed.updating():
                at = 0
                for tensor in source.tensor_slices(0, source.layout.image_bytes):
                    gpu.write(tensor, new[at : at + tensor.nbytes])
                    at += tensor.nbytes

        target = Target(fleet, replan, settings(max_inflight_chunks=1), target_image=target_image)
        target.chunk_state.subscribe(update)
        target.run()
        assert new == device_bytes(gpu, target_image)
        assert {"SourceWeightsChanged"} == {*target.reasons}

"""Transfers into device memory on the strict fake driver, also while another thread captures a CUDA graph."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

import rfork
from rfork.cuda.library import DriverError
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.image.memory import image_sha256
from rfork.settings import InstanceSettings, StorageSettings
from rfork.storage.io.reader import Extent, fill
from rfork.storage.local import LocalStore
from rfork.storage.location import Location
from rfork.transport.http import HttpTransport
from tests.conftest import StartRfork
from tests.fake_libcuda.fake_gpu import CopyFailure, FakeGpu
from tests.fake_libcuda.images import Kind, device_image, move_to_device, patterns
from tests.fork_server import PythonProcess
from tests.integration.gpu_memory.model import MODEL, VERSION, Model
from tests.integration.test_fork_end_to_end import READY, event
from tests.transport_contract import CONTRACT, FakeGate, TransportPair

ROOT = Path(__file__).resolve().parents[3]
SIZES = (3 * MIB + 17, 5, 4096, *(1000 + index for index in range(150)), MIB)


@pytest.fixture(params=[False, True], ids=["", "captured"])
def gpu(request: pytest.FixtureRequest, fake_gpu: FakeGpu) -> FakeGpu:
    """The fake driver, also while another thread captures a CUDA graph in global mode."""
    fake_gpu.library.fake_set_capturing(request.param)
    return fake_gpu


@pytest.mark.parametrize("check", CONTRACT, ids=[check.__name__ for check in CONTRACT])
def test_http_keeps_the_contract_between_gpus(fake_gpu: FakeGpu, check: Callable[[TransportPair], None]) -> None:
    """Every check of the contract holds if source and target are in device memory."""
    transport, gate = HttpTransport(InstanceSettings()), FakeGate()
    source, target = device_image(fake_gpu, SIZES, filled=True), device_image(fake_gpu, SIZES, device=1)
    with closing(TransportPair(transport, gate, source, target, transport.export(source, gate))) as pair:
        check(pair)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "data").write_bytes(patterns(SIZES))
    return tmp_path / "data"


def read_file(file: Path, into: torch.Tensor) -> None:
    """Read a file into device memory in blocks."""
    settings = StorageSettings(concurrency=3, staging_bytes=16 * MIB)
    with closing(LocalStore(Location.parse(file.parent), settings)) as store, closing(store.open(file.name)) as blob:
        middle = into.numel() // 3
        fill([Extent(blob, 0, into[:middle]), Extent(blob, middle, into[middle:])], settings)


def test_storage_fills_device_memory(gpu: FakeGpu, file: Path) -> None:
    """Blocks of a file arrive in device memory through pinned buffers."""
    into = gpu.allocate(file.stat().st_size)
    read_file(file, into)
    assert file.read_bytes() == gpu.read(into)


@pytest.mark.parametrize("when", [CopyFailure.AT_QUEUE, CopyFailure.AT_QUERY])
def test_a_device_that_fails_ends_a_read(fake_gpu: FakeGpu, file: Path, when: CopyFailure) -> None:
    """The driver's error is raised after all copies have ended."""
    into = fake_gpu.allocate(file.stat().st_size)
    with fake_gpu.failing_copies(when), pytest.raises(DriverError, match="illegal memory access"):
        read_file(file, into)
    assert 0 == fake_gpu.queued_copies


@pytest.fixture
def planner(rfork_process: StartRfork) -> str:
    """URL of a planner."""
    return event(rfork_process("planner", "--port", "0", "--json", until=READY))["url"]


@pytest.fixture
def seed_process(request: pytest.FixtureRequest, planner: str, tmp_path: Path) -> Iterator[None]:
    """A process that serves the model from another fake GPU's memory, of the kind and over the transport named."""
    transport, kind, capturing = request.param
    environment = {
        "RFORK_PLANNER": planner, "RFORK_TRANSPORTS": transport, "PYTHONPATH": str(ROOT),
        "FAKE_CUDA_CAPTURING": str(int(capturing)), "FAKE_CUDA_LOG": str(tmp_path / "driver.log"),
    }  # fmt: skip
    process: PythonProcess[str] = PythonProcess(
        [sys.executable, "-m", "tests.integration.gpu_memory.model", kind],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ, **environment},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    assert "ready\n" == process.stdout.readline()
    yield
    process.stdin.close()
    assert "released\n" == process.stdout.readline()
    assert 0 == process.wait()
    process.stdout.close()
    assert not (tmp_path / "driver.log").exists()


FORKS: list[tuple[str, Kind, bool]] = [
    ("cuda_ipc", "legacy", True),
    ("cuda_ipc", "expandable", True),
    ("http", "legacy", False),
    ("http", "expandable", True),
]


@pytest.mark.parametrize("seed_process", FORKS, indirect=True, ids=str)
@pytest.mark.usefixtures("seed_process")
def test_a_fork_between_processes_fills_the_gpu(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, fake_gpu: FakeGpu, planner: str
) -> None:
    """A module in device memory receives every byte of one in another process's device memory."""
    transport, kind, capturing = request.node.callspec.params["seed_process"]
    monkeypatch.setenv("RFORK_TRANSPORTS", transport)
    fake_gpu.library.fake_set_capturing(capturing)
    module = move_to_device(fake_gpu, Model(seed=4), kind=kind)
    report = rfork.fork(module, model=MODEL, version=VERSION, planner=planner)
    image = capture(module)
    assert "forked" == report.outcome
    assert [transport] == [source.transport for source in report.sources]
    assert image_sha256(capture(Model())) == image_sha256(image)
    if report.seed is not None:
        report.seed.close()

"""Files into CUDA tensors: through pinned staging, and by GPUDirect Storage if the machine supports it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rfork.image.staging import BufferPool, CudaCopier
from rfork.settings import StorageSettings
from rfork.storage.io.gds import DirectStorage
from rfork.storage.io.reader import Extent, fill
from rfork.storage.local import LocalStore
from rfork.storage.location import Location

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device here"),
]

MIB = 1 << 20
SIZE = 70 * MIB + 4321


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with one file of more than 70 MiB."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "data").write_bytes(os.urandom(SIZE))
    return folder


def drop_page_cache(path: Path) -> None:
    """Drop the file's bytes from the page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("direct", ["auto", "always", "never"])
@pytest.mark.parametrize("memory", [16 * MIB, 128 * MIB])
@pytest.mark.parametrize(
    "sizes", [[SIZE - 77], [50_000] * 1000, [1, 33 * MIB + 5, 7, 20 * MIB]], ids=["one", "small", "mixed"]
)
def test_every_byte_is_on_the_device(folder: Path, direct: str, memory: int, sizes: list[int]) -> None:
    """The tensors contain the file's bytes for all sizes, staging limits and read modes."""
    settings = StorageSettings.model_validate({"direct_io": direct, "staging_bytes": memory})
    data = torch.frombuffer(bytearray((folder / "data").read_bytes()), dtype=torch.uint8)
    drop_page_cache(folder / "data")
    store = LocalStore(Location.parse(folder), settings)
    blob = store.open("data")
    line, extents, filled, at = torch.zeros(SIZE, dtype=torch.uint8, device="cuda"), [], list[int](), 0
    for size in sizes:
        extents.append(Extent(blob, 77 + at, line[at : at + size]))
        at += size
    fill(extents, settings, on_filled=filled.append)
    blob.close()
    assert torch.equal(data[77 : 77 + at], line[:at].cpu())
    assert list(range(len(sizes))) == sorted(filled)
    assert 0 == int(line[at:].sum())


def test_copies_follow_earlier_work_of_the_device(folder: Path) -> None:
    """Memory that a kernel of the caller still writes is filled after that kernel."""
    settings = StorageSettings()
    store = LocalStore(Location.parse(folder), settings)
    blob = store.open("data")
    line = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    busy = torch.ones(4096, 4096, device="cuda")
    for _ in range(50):
        busy = busy @ busy / 4096
    line.fill_(0)
    fill([Extent(blob, 0, line)], settings)
    blob.close()
    assert (folder / "data").read_bytes() == line.cpu().numpy().tobytes()


def test_pinned_memory_is_unlocked_when_it_is_released() -> None:
    """Buffers are page-locked, and their memory can be locked again after the pool was closed."""
    copier = CudaCopier([torch.device("cuda", torch.cuda.current_device())])
    staging = BufferPool(32 * MIB, 16 * MIB, copier.pinned)
    for _ in range(2):
        with staging.lease() as buffer:
            assert buffer.is_pinned()
        del buffer
        staging.close()


def test_a_copier_uses_its_own_stream() -> None:
    """A copy does not wait for kernels queued after the copier was created."""
    device = torch.device("cuda", torch.cuda.current_device())
    into, copier = torch.zeros(MIB, dtype=torch.uint8, device=device), CudaCopier([device])
    torch.cuda._sleep(1 << 32)
    busy = torch.cuda.Event()
    busy.record()
    buffer = copier.pinned(MIB).fill_(7)
    copier.host_to_device([into], [buffer]).wait()
    still_busy = not busy.query()
    assert 7 * MIB == int(into.sum())
    assert still_busy


def test_gpudirect_storage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kvikio and a supported machine, cold blocks bypass staging."""
    pytest.importorskip("kvikio")
    settings = StorageSettings()
    if DirectStorage.find(settings) is None:
        pytest.skip("this machine has no GPUDirect Storage")
    straight: list[bool] = []
    read: Callable[..., bool] = DirectStorage.read

    def noted(self: DirectStorage, *arguments: object) -> bool:
        straight.append(read(self, *arguments))
        return straight[-1]

    monkeypatch.setattr(DirectStorage, "read", noted)
    drop_page_cache(folder / "data")
    store = LocalStore(Location.parse(folder), settings)
    blob = store.open("data")
    line = torch.zeros(SIZE, dtype=torch.uint8, device="cuda")
    fill([Extent(blob, 0, line)], settings)
    blob.close()
    assert (folder / "data").read_bytes() == line.cpu().numpy().tobytes()
    assert {True} == set(straight)

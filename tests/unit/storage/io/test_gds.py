"""GPUDirect Storage: which blocks it reads, with a library that reads into host memory."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rfork.errors import StorageChanged, StorageError
from rfork.image.host_memory import host_view
from rfork.settings import StorageSettings
from rfork.storage.io.extents import ReadBlock, ReadPlan
from rfork.storage.io.gds import DirectStorage
from rfork.storage.io.reader import Extent
from rfork.storage.local import LocalFile
from tests.unit.storage.io.test_reader import PatternBlob

CONTENT = bytes(range(256)) * 64


class FakeGdsFile:
    """File that the library has opened."""

    def __init__(self, library: FakeGdsLibrary, file: str) -> None:
        self._library = library
        self._descriptor = os.open(file, os.O_RDONLY)

    def raw_read(self, buf: torch.Tensor, size: int, file_offset: int) -> int:
        if self._library.error is not None:
            raise self._library.error
        self._library.reads += 1
        return os.preadv(self._descriptor, [host_view(buf.data_ptr(), size)], file_offset)

    def close(self) -> None:
        os.close(self._descriptor)
        self._library.open -= 1


class FakeGdsLibrary:
    """Replacement for kvikio."""

    def __init__(self) -> None:
        self.error: RuntimeError | None = None
        self.open = self.reads = 0

    def CuFile(self, file: str, flags: str) -> FakeGdsFile:
        assert "r" == flags
        self.open += 1
        return FakeGdsFile(self, file)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalFile]:
    """Write a file that is not in the page cache."""
    path = tmp_path / "data"
    path.write_bytes(CONTENT)
    monkeypatch.setattr("rfork.storage.direct_io.resident", lambda *_: 0)
    file = LocalFile(path, StorageSettings())
    yield file
    file.close()


def pieces_of(extents: list[Extent]) -> tuple[ReadBlock, list[tuple[int, torch.Tensor]]]:
    """Return the single block of the extents, and its requested pieces."""
    plan = ReadPlan(extents, 1 << 20)
    (block,) = plan.blocks()
    return block, [
        (block.begin + piece.at, extents[piece.index].into[piece.begin : piece.end]) for piece in plan.pieces(block)
    ]


def test_a_block_is_read_piece_by_piece(file: LocalFile) -> None:
    """Each piece gets its bytes, gaps are not read, and one handle serves all pieces."""
    library = FakeGdsLibrary()
    extents = [Extent(file, at, torch.empty(90, dtype=torch.uint8)) for at in (7, 100, 300)]
    storage = DirectStorage(library)
    done = [storage.read(*pieces_of(extents)), storage.read(*pieces_of(extents))]
    opened = library.open
    storage.close()
    assert [True, True] == done
    assert 1 == opened
    assert 0 == library.open
    assert 6 == library.reads
    assert [CONTENT[at : at + 90] for at in (7, 100, 300)] == [bytes(e.into.tolist()) for e in extents]


@pytest.mark.parametrize("storage_type", ["cached", "remote"])
def test_cached_files_and_objects_are_read_through_host_memory(
    file: LocalFile, storage_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached files are faster through host memory, and objects have no other path."""
    if storage_type == "cached":
        monkeypatch.setattr("rfork.storage.direct_io.resident", lambda _, __, length: length)
    blob = file if storage_type == "cached" else PatternBlob(1000)
    library = FakeGdsLibrary()
    done = DirectStorage(library).read(*pieces_of([Extent(blob, 0, torch.empty(9, dtype=torch.uint8))]))
    assert not done
    assert 0 == library.reads


def test_a_failed_library_is_not_used_again(file: LocalFile) -> None:
    """The failed block is not read, and no later block is requested from the library."""
    library = FakeGdsLibrary()
    storage = DirectStorage(library)
    wanted = pieces_of([Extent(file, 0, torch.empty(9, dtype=torch.uint8))])
    library.error = RuntimeError("cuFile error")
    first = storage.read(*wanted)
    library.error = None
    done = [first, storage.read(*wanted)]
    storage.close()
    assert [False, False] == done
    assert 0 == library.reads


def test_a_modified_file_is_detected(file: LocalFile) -> None:
    """A change during the read is detected on this path too."""
    with file.path.open("ab") as writing:
        writing.write(b"more")
    storage = DirectStorage(FakeGdsLibrary())
    with pytest.raises(StorageChanged):
        storage.read(*pieces_of([Extent(file, 0, torch.empty(9, dtype=torch.uint8))]))
    storage.close()


def test_a_truncated_file_is_an_error(file: LocalFile) -> None:
    """Fewer bytes than requested are an error."""
    storage = DirectStorage(FakeGdsLibrary())
    with pytest.raises(StorageError, match="ends before byte"):
        storage.read(*pieces_of([Extent(file, len(CONTENT) - 5, torch.empty(9, dtype=torch.uint8))]))
    storage.close()


@pytest.mark.parametrize(
    ("direct", "available", "expected"),
    [("auto", True, True), ("auto", False, False), ("always", True, True), ("never", True, False)],
)
def test_it_is_used_only_if_kvikio_and_the_settings_allow_it(
    direct: str, available: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used only if kvikio supports the machine and the settings allow it."""
    kvikio, driver = types.ModuleType("kvikio"), types.ModuleType("kvikio.cufile_driver")
    monkeypatch.setattr(driver, "get", lambda name: available, raising=False)
    monkeypatch.setattr(kvikio, "cufile_driver", driver, raising=False)
    monkeypatch.setitem(sys.modules, "kvikio", kvikio)
    monkeypatch.setitem(sys.modules, "kvikio.cufile_driver", driver)
    found = DirectStorage.find(StorageSettings.model_validate({"direct_io": direct}))
    assert expected == (found is not None)


def test_missing_kvikio_logs_at_debug_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """kvikio is optional: without it, there is only a debug message."""
    monkeypatch.setitem(sys.modules, "kvikio", None)
    assert None is DirectStorage.find(StorageSettings())

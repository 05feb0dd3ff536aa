"""A folder as a store, on real file systems: one that is full, and one in memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rfork.errors import StorageFull
from rfork.settings import StorageSettings
from rfork.storage.blob import read_range
from rfork.storage.local.files import LocalStore
from rfork.storage.location import Location

MIB = 1 << 20


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory with room for 4 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system takes root")
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = subprocess.run(mounting, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full(tiny: Path) -> None:
    """A blob that does not fit is not there, nor a part of it; what fits can be written after."""
    store = LocalStore(Location.parse(tiny), StorageSettings())

    def write(name: str, mebibytes: int) -> None:
        with store.write(name) as writer:
            for _ in range(mebibytes):
                writer.write([memoryview(bytes(MIB))])

    with pytest.raises(StorageFull, match="model: No space left on device"):
        write("model", 5)
    after = os.listdir(tiny)
    write("model", 3)
    assert ([], ["model"]) == (after, os.listdir(tiny))


@pytest.mark.parametrize("direct", ["auto", "always", "never"])
def test_a_file_system_in_memory(tiny: Path, direct: str) -> None:
    """One that has no disk to go to is read like any other."""
    store = LocalStore(Location.parse(tiny), StorageSettings.model_validate({"direct_io": direct}))
    content = os.urandom(3 * MIB + 7)
    with store.write("model") as writer:
        writer.write([memoryview(content)])
    blob = store.open("model")
    got = read_range(blob, 3, 3 * MIB)
    blob.close()
    assert content[3 : 3 * MIB + 3] == got

"""The local store on real file systems: a full one, and one in memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rfork.errors import StorageFull
from rfork.settings import StorageSettings
from rfork.storage.blob import read_range
from rfork.storage.local import LocalStore
from rfork.storage.location import Location

MIB = 1 << 20


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A 4 MiB file system in memory."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system requires root")
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    mounted = subprocess.run(mounting, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a file system: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk(tiny: Path) -> None:
    """A blob that does not fit leaves nothing; a smaller one can be written afterwards."""
    store = LocalStore(Location.parse(tiny), StorageSettings())

    def write(name: str, mebibytes: int) -> None:
        with store.write(name) as writer:
            for _ in range(mebibytes):
                writer.write([memoryview(bytes(MIB))])

    with pytest.raises(StorageFull, match="model: No space left on device"):
        write("model", 5)
    after = os.listdir(tiny)
    write("model", 3)
    assert [] == after
    assert ["model"] == os.listdir(tiny)


@pytest.mark.parametrize("direct", ["auto", "always", "never"])
def test_a_file_system_in_memory(tiny: Path, direct: str) -> None:
    """A file system without a disk is read like any other."""
    store = LocalStore(Location.parse(tiny), StorageSettings.model_validate({"direct_io": direct}))
    content = os.urandom(3 * MIB + 7)
    with store.write("model") as writer:
        writer.write([memoryview(content)])
    blob = store.open("model")
    got = read_range(blob, 3, 3 * MIB)
    blob.close()
    assert content[3 : 3 * MIB + 3] == got

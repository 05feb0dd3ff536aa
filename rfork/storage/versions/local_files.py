"""Weight files in a local folder or at a local path, for fingerprints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from rfork.errors import StorageChanged, StorageCorrupt, StorageNotFound
from rfork.storage.io.parallel_map import parallel_map
from rfork.storage.location import Location
from rfork.storage.os_errors import storage_error
from rfork.storage.versions.weight_files import (
    MAX_INDEX_BYTES,
    FileState,
    WeightFiles,
    digest_of_file,
    missing_shard,
    read_unchanged,
    select_named,
    select_weight_files,
    state_of,
)

THREADS: Final = 32
"""Concurrent reads of small blocks: on a network file system each costs a round trip."""


class LocalFiles:
    """The files at a path as of creation; see `Files`."""

    is_partial = False

    def __init__(self, path: Path) -> None:
        """Raises StorageNotFound if the path does not exist, and other StorageErrors."""
        self._path = path
        try:
            self._name = None if path.is_dir() else path.name
        except OSError as error:
            raise storage_error(path, error) from None
        if "\0" in str(path):
            raise StorageNotFound(f"{str(path)!r}: No such file or directory")
        self._folder = path if self._name is None else path.parent
        self.found = self._find()
        self._states = self._find_states(self.found.all)

    @property
    def folder(self) -> Location:
        """See `Files`."""
        return Location.parse(self._folder).folder

    @property
    def is_listed(self) -> bool:
        """See `Files`."""
        return self._name is None

    def text(self, name: str) -> bytes:
        """See `Files`."""
        path, state = self._folder / name, self._states[name]
        if state.size > MAX_INDEX_BYTES:
            raise StorageCorrupt(f"{path} is too large for an index: {state.size} bytes")
        return read_unchanged(path, state, lambda read: read(0, state.size))

    def digests(self, names: Sequence[str]) -> Sequence[bytes]:
        """See `Files`."""
        self._states |= self._find_states(name for name in names if name not in self._states)

        def digest(name: str) -> bytes:
            return digest_of_file(self._folder / name, self._states[name])

        return parallel_map(str(self._folder), digest, names, THREADS)

    def check_unchanged(self) -> None:
        """Raise StorageChanged if files were added, removed, replaced or modified since creation."""
        if self._find() != self.found or self._find_states(self._states) != self._states:
            raise changed(self._folder)

    def _find(self) -> WeightFiles:
        missing = StorageNotFound(f"{self._path}: No such file or directory")
        try:
            names = frozenset(entry.name for entry in self._folder.iterdir())
        except FileNotFoundError:
            raise missing from None
        except OSError as error:
            raise storage_error(self._folder, error) from None
        if self._name is None:
            return select_weight_files(names)
        found = select_named(self._name, names)
        if names.isdisjoint(found.all):
            raise missing
        return found

    def _find_states(self, names: Iterable[str]) -> dict[str, FileState]:
        return {name: self._state(name) for name in names}

    def _state(self, name: str) -> FileState:
        path = self._folder / name
        try:
            return state_of(path)
        except StorageNotFound:
            if path.is_symlink():
                raise
            if name not in self.found.all:
                raise missing_shard(str(self._folder), name) from None
            raise changed(self._folder) from None


def changed(folder: Path) -> StorageChanged:
    """Return the error for files that another program is writing."""
    return StorageChanged(
        f"the weight files in {folder} changed during the read",
        hint="wait until the checkpoint is complete",
    )

"""`rfork pull --output`: errors of a copy that cannot be written."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from safetensors import SafetensorError

from rfork.cli import pull
from rfork.errors import StorageError, StorageFull

FULL = "Error while serializing: I/O error: No space left on device (os error 28)"


class Module:
    """A model that cannot be written."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def save_pretrained(self, output: Path) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [SafetensorError(FULL), OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EDQUOT, "quota")],
)
def test_a_full_disk_is_reported_as_full(tmp_path: Path, error: Exception) -> None:
    """The error names the folder and has a hint, whichever library wrote the file."""
    with pytest.raises(StorageFull, match=str(tmp_path)) as raised:
        pull._write(Module(error), tmp_path, tmp_path)  # type: ignore[arg-type]
    assert "--output" in raised.value.hint


def test_other_file_system_errors_are_named(tmp_path: Path) -> None:
    """They are storage errors, not bugs of rfork."""
    error = SafetensorError("I/O error: Input/output error (os error 5)")
    with pytest.raises(StorageError, match="os error 5"):
        pull._write(Module(error), tmp_path, tmp_path)  # type: ignore[arg-type]

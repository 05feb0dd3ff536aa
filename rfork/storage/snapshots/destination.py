"""Validates the destination of a snapshot by its name. Runs before weights are fetched or read."""

from __future__ import annotations

from pathlib import Path

from rfork.errors import SettingsError
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.location import Location

OTHER_FORMATS = (".bin", ".ckpt", ".gguf", ".h5", ".npz", ".onnx", ".pt", ".pth")
"""Suffixes of other formats; used as a snapshot's name, one would become a folder."""


def validate_destination(uri: str | Path, settings: StorageSettings | None = None) -> None:
    """Raise SettingsError for read-only storage or the suffix of another format; MissingExtra."""
    location = Location.parse(uri)
    if location.scheme in ("http", "https"):
        raise SettingsError(f"{location.uri} is read-only: it is a web server", hint="write to s3:// or a path")
    if location.name.endswith((*OTHER_FORMATS, ".tensors")):
        raise SettingsError(
            f"{location.uri} is not a valid name for a snapshot", hint="use a .safetensors file, or a folder"
        )
    registry.open_store(location.folder, settings).close()

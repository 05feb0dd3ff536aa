"""Where a snapshot may be written to, as far as its name tells. Runs before weights are fetched or read."""

from __future__ import annotations

from pathlib import Path

from rfork.errors import SettingsError
from rfork.settings import StorageSettings
from rfork.storage import registry
from rfork.storage.location import Location

OTHER_FORMATS = (".bin", ".ckpt", ".gguf", ".h5", ".npz", ".onnx", ".pt", ".pth")
"""What others call their files; as a snapshot's name it would become a folder."""


def validate_destination(uri: str | Path, settings: StorageSettings | None = None) -> None:
    """Raises SettingsError for what can only be read, or is named as another format; MissingExtra."""
    location = Location.parse(uri)
    if location.scheme in ("http", "https"):
        raise SettingsError(f"{location.uri}: web servers can only be read")
    if location.name.endswith((*OTHER_FORMATS, ".tensors")):
        raise SettingsError(
            f"{location.uri}: a snapshot has no such name", hint="name a .safetensors file, or a folder"
        )
    registry.open_store(location.folder, settings).close()

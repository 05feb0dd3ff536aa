"""Packs and unpacks folders of files for tests."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from rfork.artifacts.cache_types import CACHE_TYPES, CacheDir
from rfork.artifacts.key import ArtifactKey
from rfork.artifacts.metadata import MAX_FILES, METADATA_TENSOR, ArtifactMetadata, read_metadata
from rfork.artifacts.pack import Packed, pack
from rfork.artifacts.unpack import Unpacked, unpack
from rfork.image.capture import image_from_tensors
from rfork.image.memory import Image
from rfork.settings import ArtifactSettings, load

KEY = ArtifactKey(gpu="H100", driver="550.54", torch="2.13.0")
SETTINGS = load(ArtifactSettings, quiet_period_s=0)
FOREVER = float("inf")
Tree = dict[str, bytes]


def cache_dir(folder: Path, type_name: str = "triton") -> CacheDir:
    return CacheDir(CACHE_TYPES[type_name], folder)


def write_tree(folder: Path, files: Tree) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)  # independent of the umask: a folder that others can write to is skipped
    return folder


def read_tree(folder: Path) -> Tree:
    """Return the content of every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def pack_tree(
    folder: Path, type_name: str = "triton", settings: ArtifactSettings = SETTINGS, max_files: int = MAX_FILES
) -> Packed:
    packed = pack([cache_dir(folder, type_name)], KEY, settings, max_files)
    if packed is None:
        raise ValueError("nothing to pack")
    return packed


def unpack_tree(image: Image, folder: Path, type_name: str = "triton") -> Unpacked:
    return unpack(image, read_metadata(image), [cache_dir(folder, type_name)], FOREVER)


def image_with(files: Tree, key: ArtifactKey | None = None) -> Image:
    """Return an image that claims to contain these files, as a malicious source could send it."""
    metadata = ArtifactMetadata(
        key=asdict(key) if key else {}, cache_paths={"triton": "/a"}, files=dict.fromkeys(files, (True, 0))
    )
    contents = {**files, METADATA_TENSOR: metadata.model_dump_json().encode()}
    return image_from_tensors(
        {name: torch.frombuffer(bytearray(content), dtype=torch.uint8) for name, content in contents.items()}
    )

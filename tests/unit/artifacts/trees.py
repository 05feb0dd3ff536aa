"""Folders of files, packed and unpacked."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from rfork.artifacts.contents import Told, told_of
from rfork.artifacts.key import ArtifactKey
from rfork.artifacts.kinds import KINDS, Place
from rfork.artifacts.names import META
from rfork.artifacts.packing import Packed, pack
from rfork.artifacts.unpacking import Unpacked, unpack
from rfork.image.capture import image_of
from rfork.image.memory import Image
from rfork.settings import ArtifactSettings, load

KEY = ArtifactKey(gpu="H100", driver="550.54", torch="2.13.0")
SETTINGS = load(ArtifactSettings, settle_s=0)
FOREVER = float("inf")
Tree = dict[str, bytes]


def place(folder: Path, kind: str = "triton") -> Place:
    return Place(KINDS[kind], folder)


def write(folder: Path, files: Tree) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)  # whatever the umask: one that others can write to is passed over
    return folder


def tree(folder: Path) -> Tree:
    """Every file below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def packed(folder: Path, kind: str = "triton", settings: ArtifactSettings = SETTINGS) -> Packed:
    made = pack([place(folder, kind)], KEY, settings)
    if made is None:
        raise ValueError("nothing to pack")
    return made


def unpacked(image: Image, folder: Path, kind: str = "triton") -> Unpacked:
    return unpack(image, told_of(image), [place(folder, kind)], FOREVER)


def image_with(files: Tree, key: ArtifactKey | None = None) -> Image:
    """An image that says it holds these files, as a giver that means harm would make one."""
    told = Told(
        key=asdict(key) if key else {}, places={"triton": "/a"}, files=dict.fromkeys(files, (True, 0))
    )
    contents = {**files, META: told.model_dump_json().encode()}
    return image_of(
        {name: torch.frombuffer(bytearray(content), dtype=torch.uint8) for name, content in contents.items()}
    )

"""What an image of artifacts says of itself, in a tensor beside those of its files.

Each file is a uint8 tensor named ``KIND/relative/path``, of its bytes; ``rfork.artifacts`` is a JSON
document: the key, where each kind lay, and of each file whether it is a program and when it was last changed
(Ninja goes by that). Nothing else of a file travels. Runs on both sides.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rfork.artifacts.cache_types import CACHE_TYPE_NAME, CacheType
from rfork.artifacts.file_names import META, name_problem
from rfork.artifacts.key import ArtifactKey
from rfork.artifacts.triton_groups import is_group, missing_file
from rfork.errors import SourceCorrupt
from rfork.image.layout import Layout
from rfork.image.memory import Image
from rfork.image.tensor_specs import TensorSpec

META_BYTES, META_BYTES_A_FILE = 64 << 10, 1280
"""Most bytes of that document: of the key and the places, and of each file."""
_Mtime = Annotated[int, Field(ge=0, lt=1 << 63)]


class ArtifactMetadata(BaseModel):
    """The JSON document. `files` by name: executable, and nanoseconds since the epoch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["rfork-artifacts-v1"] = "rfork-artifacts-v1"
    key: dict[str, str]
    cache_paths: dict[str, str]
    files: dict[str, tuple[bool, _Mtime]]


def check_layout(layout: Layout, cache_types: Mapping[str, CacheType], max_files: int, max_bytes: int) -> None:
    """Refuse a layout that is no image of artifacts, or holds a file that must not be written.

    Kinds that are not in `cache_types` are checked as well. Raises SourceCorrupt, before any byte is asked for.
    """
    if layout.image_bytes > max_bytes:
        raise SourceCorrupt(
            f"{layout.image_bytes} bytes of artifacts, larger than RFORK_ARTIFACTS_MAX_BYTES ({max_bytes})"
        )
    if len(layout.tensors) > max_files + 1:
        raise SourceCorrupt(f"{len(layout.tensors)} files of artifacts, RFORK_ARTIFACTS_MAX_FILES are {max_files}")
    names: set[str] = set()
    folders: set[str] = set()
    total = 0
    for spec in layout.tensors:
        if spec.dtype != "uint8" or len(spec.shape) != 1 or (spec.shape[0] > 1 and spec.stride != (1,)):
            raise SourceCorrupt(f"artifacts hold {spec.name!r}, which is no file: {spec.describe()}")
        length = spec.shape[0]
        total += length
        if not 0 <= length <= layout.image_bytes or not 0 <= spec.offset <= layout.image_bytes - length:
            raise SourceCorrupt(f"artifacts hold {spec.name!r}, which is not within {layout.image_bytes} bytes")
        if spec.name in names:
            raise SourceCorrupt(f"artifacts hold two files of the name {spec.name!r}")
        names.add(spec.name)
        if spec.name == META:
            if length > META_BYTES + META_BYTES_A_FILE * (len(layout.tensors) - 1):
                raise SourceCorrupt(f"what the artifacts are takes {length} bytes to say")
            continue
        name, slash, path = spec.name.partition("/")
        cache_type = cache_types.get(name) or CacheType(name, lambda artifact_settings: artifact_settings.home)
        why = name_problem(path, cache_type) if slash and CACHE_TYPE_NAME.fullmatch(name) else "it is of no kind"
        if why is not None:
            raise SourceCorrupt(f"artifacts hold a file {spec.name!r} that is not taken: {why}")
        folders.update(_parent_folders(spec.name))
    if total > layout.image_bytes:  # one run of bytes as many files would fill the disk
        raise SourceCorrupt(f"the artifacts are {total} bytes, their image has {layout.image_bytes}")
    if META not in names:
        raise SourceCorrupt("an image without what its files are")
    if both := names & folders:
        raise SourceCorrupt(f"artifacts hold {min(both)!r} as a file and as a folder")


def read_metadata(image: Image) -> ArtifactMetadata:
    """What an image says of itself; its layout was checked. Raises SourceCorrupt."""
    spec = next(spec for spec in image.layout.tensors if spec.name == META)
    try:
        metadata = ArtifactMetadata.model_validate_json(bytes_of(image, spec))
    except ValidationError as error:
        raise SourceCorrupt(f"what the artifacts are cannot be read: {error.errors()[0]['msg']}") from None
    if metadata.files.keys() != {spec.name for spec in image.layout.tensors if spec.name != META}:
        raise SourceCorrupt("the artifacts are not the files that they are said to be")
    return metadata


def check_groups(image: Image) -> None:
    """Refuse a group of Triton that came without one of its files: an engine that finds it does not start.

    Its layout was checked. Raises SourceCorrupt.
    """
    siblings: dict[str, set[str]] = {}
    for spec in image.layout.tensors:
        folder, _, name = spec.name.rpartition("/")
        siblings.setdefault(folder, set()).add(name)
    for spec in image.layout.tensors:
        folder, _, name = spec.name.rpartition("/")
        if is_group(name) and (lacks := missing_file(Path(spec.name), bytes_of(image, spec), siblings[folder])):
            raise SourceCorrupt(f"the group {spec.name!r} lacks {lacks!r}")


def key_of(metadata: ArtifactMetadata) -> ArtifactKey:
    """The key that an image was made for."""
    return ArtifactKey.parse(metadata.key)


def bytes_of(image: Image, spec: TensorSpec) -> bytes:
    """The content of one file."""
    with image.readable(spec.offset, spec.offset + spec.shape[0]) as views:
        return b"".join(views)


def _parent_folders(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]

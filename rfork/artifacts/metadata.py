"""Files of an image of artifacts: their names, which both sides check, and the metadata tensor.

Each file is a uint8 tensor named ``TYPE/relative/path``. The tensor ``rfork.artifacts`` is a JSON document:
the key, the path of each cache, and for each file whether it is executable and its modification time (which
Ninja uses). Other file attributes are not transferred. Runs on the source and on the target.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import ConfigDict, Field, ValidationError

from rfork.artifacts.cache_types import CACHE_TYPE_NAME, CacheType
from rfork.artifacts.triton_groups import is_group, missing_file
from rfork.errors import SourceCorrupt
from rfork.image.layout import Layout, TensorSpec
from rfork.image.memory import Image
from rfork.schema import StrictCopyModel

MAX_PATH_CHARS: Final = 1024
MAX_COMPONENT_BYTES: Final = 255
METADATA_TENSOR: Final = "rfork.artifacts"
"""Name of the metadata tensor. It cannot be the name of a file, because those contain a slash."""


def path_problem(path: str, cache_type: CacheType) -> str | None:
    """Return why a relative path is not allowed for a file of this cache type, or None.

    Both sides apply the same check: the source skips such a file, the target rejects the complete image.
    """
    if not path or len(path) > MAX_PATH_CHARS:
        return "the path is empty or too long"
    if not path.isprintable() or "\\" in path:
        return "the path has characters that no cache uses"
    for component in path.split("/"):
        if component in ("", ".", ".."):
            return "it is not a plain relative path"
        if len(component.encode()) > MAX_COMPONENT_BYTES:
            return "a path component is too long"
        if cache_type.excludes(component):
            return f"{component!r} is a lock, a log or a temporary file"
    return None


MAX_FILES: Final = 200_000
"""Maximum number of files in an image of artifacts."""
MAX_METADATA_BYTES, MAX_METADATA_BYTES_PER_FILE = 64 << 10, 1280
"""Maximum size of the document in bytes: for the key and the cache paths, and for each file."""
_Mtime = Annotated[int, Field(ge=0, lt=1 << 63)]


class ArtifactMetadata(StrictCopyModel):
    """The JSON document. `files` maps names to (executable, modification time in nanoseconds since the epoch)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal["rfork-artifacts-v1"] = "rfork-artifacts-v1"
    key: dict[str, str]
    cache_paths: dict[str, str]
    files: dict[str, tuple[bool, _Mtime]]


def check_layout(layout: Layout, cache_types: Mapping[str, CacheType], max_files: int, max_bytes: int) -> None:
    """Reject a layout that is not an image of artifacts or contains a forbidden file.

    Cache types missing from `cache_types` are checked as well. Raises SourceCorrupt, before any byte is
    requested.
    """
    if layout.image_bytes > max_bytes:
        raise SourceCorrupt(
            f"the artifacts have {layout.image_bytes} bytes, more than RFORK_ARTIFACTS_MAX_BYTES ({max_bytes})"
        )
    if len(layout.tensors) > max_files + 1:
        raise SourceCorrupt(f"the artifacts have {len(layout.tensors) - 1} files, more than {max_files}")
    names: set[str] = set()
    folders: set[str] = set()
    total = 0
    for spec in layout.tensors:
        if spec.dtype != "uint8" or len(spec.shape) != 1 or (spec.shape[0] > 1 and spec.stride != (1,)):
            raise SourceCorrupt(f"artifacts contain {spec.name!r}, which is not a file: {spec.describe()}")
        length = spec.shape[0]
        total += length
        if not 0 <= length <= layout.image_bytes or not 0 <= spec.offset <= layout.image_bytes - length:
            raise SourceCorrupt(
                f"artifacts contain {spec.name!r}, which lies outside the {layout.image_bytes} bytes of the image"
            )
        if spec.name in names:
            raise SourceCorrupt(f"artifacts contain two files named {spec.name!r}")
        names.add(spec.name)
        if spec.name == METADATA_TENSOR:
            if length > MAX_METADATA_BYTES + MAX_METADATA_BYTES_PER_FILE * (len(layout.tensors) - 1):
                raise SourceCorrupt(f"the metadata of the artifacts is too large ({length} bytes)")
            continue
        name, slash, path = spec.name.partition("/")
        cache_type = cache_types.get(name) or CacheType(name, lambda dirs: dirs.home)
        reason = (
            path_problem(path, cache_type)
            if slash and CACHE_TYPE_NAME.fullmatch(name)
            else "it has no valid cache type"
        )
        if reason is not None:
            raise SourceCorrupt(f"artifacts contain the forbidden file {spec.name!r}: {reason}")
        folders.update(_parent_folders(spec.name))
    if total > layout.image_bytes:  # many files that share the same bytes could fill the disk
        raise SourceCorrupt(f"the artifacts have {total} bytes, but their image has {layout.image_bytes}")
    if METADATA_TENSOR not in names:
        raise SourceCorrupt("the artifacts have no metadata")
    if both := names & folders:
        raise SourceCorrupt(f"artifacts contain {min(both)!r} as a file and as a folder")


def read_metadata(image: Image) -> ArtifactMetadata:
    """Return the metadata of an image whose layout was checked. Raises SourceCorrupt."""
    spec = next(spec for spec in image.layout.tensors if spec.name == METADATA_TENSOR)
    try:
        metadata = ArtifactMetadata.model_validate_json(bytes_of(image, spec))
    except ValidationError as error:
        raise SourceCorrupt(f"invalid metadata of artifacts: {error.errors()[0]['msg']}") from None
    if metadata.files.keys() != {spec.name for spec in image.layout.tensors if spec.name != METADATA_TENSOR}:
        raise SourceCorrupt("the metadata does not list the files of the artifacts")
    return metadata


def check_groups(image: Image) -> None:
    """Reject a Triton group that lacks one of its files, because an engine that finds it fails to start.

    The layout was checked before. Raises SourceCorrupt.
    """
    siblings: dict[str, set[str]] = {}
    for spec in image.layout.tensors:
        folder, _, name = spec.name.rpartition("/")
        siblings.setdefault(folder, set()).add(name)
    for spec in image.layout.tensors:
        folder, _, name = spec.name.rpartition("/")
        if is_group(name) and (missing := missing_file(Path(spec.name), bytes_of(image, spec), siblings[folder])):
            raise SourceCorrupt(f"the Triton group {spec.name!r} lacks {missing!r}")


def bytes_of(image: Image, spec: TensorSpec) -> bytes:
    """Return the content of one file."""
    with image.readable(spec.offset, spec.offset + spec.shape[0]) as views:
        return b"".join(views)


def _parent_folders(name: str) -> list[str]:
    parts = name.split("/")
    return ["/".join(parts[:count]) for count in range(1, len(parts))]

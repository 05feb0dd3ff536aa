"""Selects the files in a folder that contain weights, by name only."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from rfork.errors import StorageNotFound

SAFETENSORS: Final = ".safetensors"
TENSORIZER: Final = ".tensors"
FORMATS: Final = (SAFETENSORS, ".gguf", TENSORIZER)
PICKLES: Final = (".bin", ".pt", ".pth")
"""Pickled weights. Engines ignore them in a folder that has weights in another format."""
TRAINING_STATE: Final = frozenset(
    f"{stem}{suffix}"
    for stem in ("training_args", "optimizer", "scheduler", "scaler", "rng_state")
    for suffix in PICKLES
)
INDEX_SUFFIX: Final = ".index.json"
MAX_INDEX_BYTES: Final = 256 << 20
MANIFEST_SUFFIX: Final = ".manifest.json"
DEFAULT_INDEXES: Final = frozenset({"model.safetensors.index.json", "pytorch_model.bin.index.json"})
"""Indexes that engines read by default, so every shard in them must exist."""
SINGLE: Final = "model.safetensors"

_TEMPLATE: Final = re.compile(r"%(?:0\d)?d(?![0-9a-fA-F])")
_GGUF_PART: Final = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<parts>\d{5})\.gguf")
_RANK_SNAPSHOT: Final = re.compile(r"(model|speculative)-rank-\d{3,}(-ep-\d{3,})?\.safetensors(\.manifest\.json)?")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Names of weight files, of their indexes, and of possible manifests of snapshots; each sorted."""

    weights: tuple[str, ...]
    indexes: tuple[str, ...] = ()
    manifests: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        """Every name."""
        return (*self.weights, *self.indexes, *self.manifests)


def select_weight_files(names: Collection[str]) -> WeightFiles:
    """Select among the names of a folder. Hidden files and files in subfolders are ignored.

    Weights are all ``*.safetensors``, ``*.gguf`` and ``*.tensors``, in an index or not, including
    consolidated duplicates: which of them are loaded depends on the engine and its flags. If there are none,
    weights are ``*.bin``, ``*.pt`` and ``*.pth``, without the state of a training run. Snapshots of ranks
    next to a Hugging Face checkpoint are ignored, as in `open_source`.
    """
    visible = sorted(name for name in names if "/" not in name and not name.startswith("."))
    is_checkpoint = not DEFAULT_INDEXES.isdisjoint(visible) or (
        SINGLE in visible and SINGLE + MANIFEST_SUFFIX not in visible
    )
    if is_checkpoint and any(name.endswith(FORMATS) and not _RANK_SNAPSHOT.fullmatch(name) for name in visible):
        visible = [name for name in visible if not _RANK_SNAPSHOT.fullmatch(name)]
    suffixes: tuple[str, ...] = FORMATS
    weights = _ending(visible, suffixes)
    manifests = _ending(visible, (SAFETENSORS + MANIFEST_SUFFIX,))
    if not weights:
        suffixes = PICKLES
        weights = tuple(name for name in _ending(visible, suffixes) if name not in TRAINING_STATE)
    if not weights:  # the shards of an index may be in a folder that cannot be listed
        suffixes = (*FORMATS, *PICKLES)
    indexes = _ending(visible, tuple(suffix + INDEX_SUFFIX for suffix in suffixes))
    return WeightFiles(weights, indexes, manifests)


def select_named(name: str, names: Collection[str]) -> WeightFiles:
    """Select the files for the URI of one file, among the names of its folder.

    These are the file and its manifest, all parts of a split ``.gguf`` or ``.tensors``, all ranks of a
    template such as ``model-rank-%03d.safetensors``, or an index, without its shards.
    """
    if name.endswith(INDEX_SUFFIX):
        return WeightFiles((), (name,))
    if split := _GGUF_PART.fullmatch(name):
        pattern = rf"{re.escape(split['stem'])}-\d{{5}}-of-{split['parts']}\.gguf"
    elif template := _TEMPLATE.search(name):
        head, tail = name[: template.start()], name[template.end() :]
        pattern = rf"{re.escape(head)}\d+(-ep-\d+)?{re.escape(tail)}"
    elif name.endswith(TENSORIZER):
        pattern = rf"{re.escape(name.removesuffix(TENSORIZER))}(-\d{{5}}-of-\d{{5}})?\.tensors"
    else:
        pattern = re.escape(name)
    weights = sorted(each for each in names if re.fullmatch(pattern, each, re.DOTALL))
    manifest = pattern + re.escape(MANIFEST_SUFFIX)
    manifests = sorted(each for each in names if re.fullmatch(manifest, each, re.DOTALL))
    return WeightFiles(tuple(weights), (), tuple(manifests))


def has_weight_suffix(name: str) -> bool:
    """Return True if a name is that of a weight file or an index, rather than of a folder."""
    return name.endswith((*FORMATS, *PICKLES, INDEX_SUFFIX))


def is_set(name: str) -> bool:
    """Return True if the name of one file may refer to several; see `select_named`."""
    return name.endswith(TENSORIZER) or _GGUF_PART.fullmatch(name) is not None or _TEMPLATE.search(name) is not None


def shards_of_index(text: bytes) -> frozenset[str]:
    """Return the shards in an index. Raises ValueError if it is invalid, or refers to a file outside of its
    folder.
    """
    try:
        shards = frozenset(json.loads(text)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("it has no weight_map from tensors to files") from None
    for shard in shards:
        if not isinstance(shard, str) or not shard or shard.startswith("/") or ".." in shard.split("/"):
            raise ValueError(f"it refers to {shard!r}, which is outside of the folder")
    return shards


def missing_shard(folder: str, name: str) -> StorageNotFound:
    """Return the error for a missing shard of an index."""
    return StorageNotFound(
        f"{folder} lacks the shard {name} that its index lists", hint="download the checkpoint again"
    )


def _ending(names: Iterable[str], suffixes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name.endswith(suffixes))

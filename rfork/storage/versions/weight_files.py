"""Selection of the files in a folder that hold weights, by their names alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

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
MANIFEST_SUFFIX: Final = ".safetensors.manifest.json"
DEFAULT_INDEXES: Final = frozenset({"model.safetensors.index.json", "pytorch_model.bin.index.json"})
"""Indexes that engines read by default, so that every shard they name must exist."""

_RANK_PATTERN: Final = re.compile(r"%(?:0\d)?d(?![0-9a-fA-F])")
_PART: Final = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<parts>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """Names of a folder's weight files, of their indexes, and of possible snapshot manifests; all sorted."""

    weights: tuple[str, ...]
    indexes: tuple[str, ...]
    manifests: tuple[str, ...]

    @property
    def all(self) -> tuple[str, ...]:
        """Every name."""
        return (*self.weights, *self.indexes, *self.manifests)


def select_weight_files(names: Iterable[str]) -> WeightFiles:
    """Select among the names of a folder. Names in folders below and hidden files are ignored.

    Weights are all ``*.safetensors``, ``*.gguf`` and ``*.tensors``, whether or not an index names them,
    consolidated duplicates included: which of them is loaded depends on the engine and its flags. Only where
    there are none of these, weights are ``*.bin``, ``*.pt`` and ``*.pth``, without the state of a training run.
    """
    visible = sorted(name for name in names if "/" not in name and not name.startswith("."))
    suffixes: tuple[str, ...] = FORMATS
    weights = [name for name in visible if name.endswith(suffixes)]
    if not weights:
        suffixes = PICKLES
        weights = [name for name in visible if name.endswith(suffixes) and name not in TRAINING_STATE]
    index_suffixes = tuple(f"{suffix}{INDEX_SUFFIX}" for suffix in suffixes)
    indexes = [name for name in visible if name.endswith(index_suffixes)]
    manifests = [name for name in visible if name.endswith(MANIFEST_SUFFIX)]
    return WeightFiles(tuple(weights), tuple(indexes), tuple(manifests))


def select_named(name: str, names: Iterable[str]) -> WeightFiles:
    """Select what a URI of one file means, among the names of its folder.

    That is the file and its manifest, all parts of a split ``.gguf`` or ``.tensors``, all ranks of a pattern
    such as ``model-rank-%03d.safetensors``, or an index; the caller adds the shards that the index names.
    """
    if name.endswith(INDEX_SUFFIX):
        return WeightFiles((), (name,), ())
    if part := _PART.fullmatch(name):
        pattern = rf"{re.escape(part['stem'])}-\d{{5}}-of-{part['parts']}\.gguf"
    elif rank := _RANK_PATTERN.search(name):
        pattern = rf"{re.escape(name[: rank.start()])}\d+(-ep-\d+)?{re.escape(name[rank.end() :])}"
    elif name.endswith(TENSORIZER):
        pattern = rf"{re.escape(name.removesuffix(TENSORIZER))}(-\d{{5}}-of-\d{{5}})?\.tensors"
    else:
        pattern = re.escape(name)
    weights = sorted(each for each in names if re.fullmatch(pattern, each))
    manifests = sorted(each for each in names if re.fullmatch(rf"{pattern}\.manifest\.json", each))
    return WeightFiles(tuple(weights), (), tuple(manifests))


def shards_of_index(text: bytes) -> frozenset[str]:
    """Return the files that an index names. Raises ValueError where it is no index, or names one outside."""
    try:
        shards = frozenset(json.loads(text)["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError("it has no weight_map of tensors to files") from None
    for shard in shards:
        if not isinstance(shard, str) or not shard or shard.startswith("/") or ".." in shard.split("/"):
            raise ValueError(f"it names {shard!r}, which is outside the folder")
    return shards

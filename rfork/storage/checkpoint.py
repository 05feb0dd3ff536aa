"""A Hugging Face folder of safetensors files, loaded into a module that exists.

The last source but the caller's own loader: it needs no peer and no planner. Most checkpoints can also
be read chunk by chunk; see `rfork.storage.pieces`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from rfork.errors import CheckpointError, StorageError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A folder whose shards all exist; `shards` maps each file to the tensor names it must hold."""

    folder: Path
    shards: Mapping[Path, tuple[str, ...]]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Find and check the shards; raises CheckpointError that names what is missing."""
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is not a folder", hint="name the folder of a Hugging Face checkpoint"
            )
        index = folder / INDEX
        if index.is_file():
            shards = _indexed(folder, index)
        elif (folder / SINGLE).is_file():
            shards = {folder / SINGLE: _names(folder / SINGLE)}
        else:
            raise CheckpointError(f"{folder} holds neither {INDEX} nor {SINGLE}")
        for path in shards:
            if not path.is_file():
                raise CheckpointError(
                    f"{folder} lacks the shard {path.name}, which its index names",
                    hint="download the checkpoint again",
                )
        return cls(folder, shards)

    @property
    def names(self) -> frozenset[str]:
        """The tensors it holds."""
        return frozenset(name for names in self.shards.values() for name in names)

    def load_into(self, module: nn.Module, progress: Callable[[int], None] | None = None) -> None:
        """Copy each tensor into the module's parameter or persistent buffer of that name.

        Converts the dtype where it differs. `progress` is told the bytes of each tensor. Raises
        CheckpointError when a tensor is missing, unknown or has another shape, before the first
        one is written where the file's header shows it; StorageError when a file cannot be read.
        """
        wanted = self.check(module)
        with torch.no_grad():
            for path, names in self.shards.items():
                try:
                    with safe_open(path, framework="pt") as shard:
                        self._check_shapes(path, shard, names, wanted)
                        for name in names:
                            tensor = shard.get_tensor(name)
                            wanted[name].copy_(tensor)
                            if progress is not None:
                                progress(tensor.nbytes)
                except SafetensorError as error:
                    raise CheckpointError(f"{path}: {error}", hint="download the checkpoint again") from None
                except OSError as error:
                    raise StorageError(f"{path}: {error.strerror or error}") from None

    def check(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """The module's tensors by name; raises CheckpointError where the folder does not hold them all."""
        state = module.state_dict(keep_vars=False)
        # Not the extra state that a submodule may add, which is anything.
        wanted = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        self._check_names(wanted)
        return wanted

    def _check_names(self, wanted: Mapping[str, torch.Tensor]) -> None:
        unknown = sorted(self.names - wanted.keys())
        if unknown:
            raise CheckpointError(
                f"{self.folder} holds {unknown[0]}, which the model has not ({len(unknown)} such)"
            )
        # A tied tensor is stored once: the model has it under a second name with the same memory.
        loaded = {_memory(wanted[name]) for name in self.names}
        missing = [name for name in wanted if name not in self.names and _memory(wanted[name]) not in loaded]
        if missing:
            raise CheckpointError(
                f"{self.folder} lacks {missing[0]}, which the model needs ({len(missing)} such)"
            )

    def _check_shapes(
        self, path: Path, shard: safe_open, names: tuple[str, ...], wanted: Mapping[str, torch.Tensor]
    ) -> None:
        held = set(shard.keys())  # type: ignore[no-untyped-call]  # safetensors has no types here
        for name in names:
            if name not in held:
                raise CheckpointError(f"{path} lacks {name}, which the index says it holds")
            shape = list(shard.get_slice(name).get_shape())  # type: ignore[no-untyped-call]
            if shape != list(wanted[name].shape):
                raise CheckpointError(
                    f"{path}: {name} has shape {shape}, the model's is {list(wanted[name].shape)}"
                )


def _indexed(folder: Path, index: Path) -> dict[Path, tuple[str, ...]]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = {str(name): str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a safetensors index: {error}") from None
    shards: dict[Path, list[str]] = {}
    for name, file in files.items():
        # By name and not by what it resolves to: a hub's cache holds links to files elsewhere.
        if Path(file).name != file or file == "..":
            raise CheckpointError(f"{index} names {file!r}, which is outside the folder")
        shards.setdefault(folder / file, []).append(name)
    return {path: tuple(names) for path, names in shards.items()}


def _names(path: Path) -> tuple[str, ...]:
    try:
        with safe_open(path, framework="pt") as shard:
            return tuple(shard.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: {error}", hint="download the checkpoint again") from None


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())

"""Whether what is stored and what a module holds are the same tensors, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rfork.errors import CheckpointError
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.tensors import TensorSource

_Memory = tuple[torch.device, int, int]


@dataclass(frozen=True, slots=True)
class Fitting:
    """`names` are on both sides; `missing` are the module's alone, `unexpected` the storage's.

    A tied weight counts as loaded under all its names where it is stored under one.
    """

    uri: str
    names: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def require_all(self) -> None:
        """Raises CheckpointError, naming the first, where one side has what the other lacks."""
        if others := self.unexpected:
            raise CheckpointError(
                f"{self.uri} holds {others[0]}, which the model has not ({len(others)} such)"
            )
        if others := self.missing:
            raise CheckpointError(f"{self.uri} lacks {others[0]}, which the model needs ({len(others)} such)")


def fit(state: Mapping[str, torch.Tensor], source: TensorSource) -> Fitting:
    """Compare a module's tensors with those of a source. Raises CheckpointError where none is in both."""
    stored = source.places if isinstance(source, SafetensorsSource) else source.specs
    names = tuple(name for name in stored if name in state)
    if not names and stored:
        raise CheckpointError(
            f"{source.uri} holds {next(iter(stored))} and {len(stored) - 1} others, none of them the model's"
        )
    missing = state.keys() - stored.keys()
    if missing:
        loaded = {_memory(state[name]) for name in names}
        missing = {name for name in missing if _memory(state[name]) not in loaded}
    unexpected = stored.keys() - state.keys()
    if unexpected and isinstance(source, SafetensorsSource):
        # A second name of bytes that are loaded under the first, or the other way round.
        loaded_bytes = {source.places[name][1:] for name in names}
        unexpected = {name for name in unexpected if source.places[name][1:] not in loaded_bytes}
    return Fitting(source.uri, names, tuple(sorted(missing)), tuple(sorted(unexpected)))


def _memory(tensor: torch.Tensor) -> _Memory:
    """What two names of one tensor agree in; one that has no memory is only itself."""
    if tensor.is_meta:
        return tensor.device, id(tensor), -1
    return tensor.device, tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())

"""Weights of a transformers model as tensors of its checkpoint, for instances with other layouts.

Models of `fork_pretrained` have one tensor for each checkpoint tensor, with its name, dtype and shape. Models of
another form, such as merged experts, are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

import torch
from torch import nn

from rfork import settings as options
from rfork.engines.meta_model import MetaModel, load_shards, stored_tensors
from rfork.engines.relocation import WeightsOf, recorded_weights, tensors_of, unchanged_tensors
from rfork.errors import ALL_TENSORS, CheckpointError, StorageError, UnsupportedTensor
from rfork.logs import logger
from rfork.placement.placement_map import PlacementMap, TensorTable, TensorType
from rfork.placement.recorder import Recorder
from rfork.settings import StorageSettings
from rfork.storage.checkpoint import Checkpoint

log = logger(__name__)


class PretrainedEngine:
    """Builds and loads one transformers model; implements `rfork.engines.relocation.RelocatingEngine`."""

    def __init__(self, blueprint: MetaModel) -> None:
        self._blueprint = blueprint

    def checkpoint_tensors(self) -> TensorTable | None:
        """Return the tensors of the safetensors files next to the config. None without complete files."""
        try:
            checkpoint = Checkpoint.open(self._blueprint.folder, options.load(StorageSettings))
            with closing(checkpoint.source()) as source:
                types = [
                    TensorType(_name_of(each.dtype), each.dtype.itemsize, tuple(each.shape))
                    for each in source.locations.values()
                ]
                return TensorTable(source.locations, types)
        except (CheckpointError, StorageError) as error:
            log.debug("no checkpoint files", reason=str(error))
            return None

    def record(self, checkpoint: TensorTable) -> PlacementMap:
        """Return the placement map.

        Raises UnsupportedTensor with the name of a tensor that transformers does not load as stored, and ModelError.
        """
        twin = self._blueprint.on_meta()
        if not self._blueprint.loads_as_stored(twin):
            model_type = self._blueprint.config.model_type
            raise UnsupportedTensor(ALL_TENSORS, f"transformers converts the weights of {model_type} models")
        own = stored_tensors(twin)
        _require_stored(own, checkpoint)
        with Recorder() as recorder:
            load_shards(twin, recorded_weights(recorder, checkpoint))
        return recorder.placement_map(tensors_of(twin))

    def live_tensors(self, module: nn.Module, placement_map: PlacementMap) -> tuple[dict[str, torch.Tensor], str]:
        """Return the tensors of a loaded model: transformers does not change them after loading."""
        return unchanged_tensors(module, placement_map, lambda layer: None)

    def load_from(self, weights_of: WeightsOf) -> nn.Module:
        """Return a new model with copies of these weights. Tensors that the model does not have are ignored.

        Raises ModelError if one is missing.
        """
        model = self._blueprint.empty()
        load_shards(model, weights_of(model))
        return model


def _require_stored(own: Mapping[str, torch.Tensor], checkpoint: TensorTable) -> None:
    """Raise UnsupportedTensor unless each own tensor is one tensor of the checkpoint, and of its type."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in own.items():
        names_of.setdefault(id(tensor), []).append(name)
    for names in names_of.values():
        stored = [name for name in names if name in checkpoint.positions]
        if not stored:
            raise UnsupportedTensor(names[0], "it is not in the checkpoint")
        if len(stored) > 1:
            # If their values differed, transformers would not tie them.
            raise UnsupportedTensor(stored[1], f"it is tied to {stored[0]}, but the checkpoint has both")
        dtype, _, shape, _ = checkpoint.type_of(checkpoint.positions[stored[0]])
        tensor = own[stored[0]]
        if (dtype, shape) != (_name_of(tensor.dtype), tuple(tensor.shape)):
            raise UnsupportedTensor(
                stored[0],
                f"it is {_name_of(tensor.dtype)} {list(tensor.shape)}, but {dtype} {list(shape)} in the checkpoint",
            )


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

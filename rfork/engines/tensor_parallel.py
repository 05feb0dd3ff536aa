"""Tensor parallelism of transformers: each process of a group has one rank of a model. Runs on the target.

transformers replaces parameters by DTensors before it loads weights, and reads the shard of each one. What creates
process groups needs all ranks, but ranks are forked and loaded independently: so the meshes are created once.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from rfork.errors import ModelError, SettingsError
from rfork.schema import Rank

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """Rank of this process among all processes of torch.distributed's default group. Create it with `join`."""

    size: int
    rank: Rank
    device: torch.device
    """Device that transformers chose for this process."""
    meshes: object
    """transformers' device meshes."""

    @classmethod
    def join(cls, size: int) -> TensorParallel:
        """Create the meshes, and the default group if there is none. All processes call it together.

        Raises ModelError if this version of transformers does not support it, and SettingsError if the processes
        are not `size`.
        """
        try:
            from transformers.distributed import sharding_utils  # noqa: F401
            from transformers.distributed.configuration_utils import DistributedConfig

            mixin = _mixin()
        except ImportError as error:
            raise ModelError(
                f"tp={size} needs a version of transformers that shards models as DTensors ({error})",
                hint="update transformers: 5.23 is tested",
            ) from None
        try:
            device, meshes = mixin.initialize_distributed_mesh(DistributedConfig(tp_size=size))
        except (OSError, RuntimeError, ValueError) as error:
            raise SettingsError(
                f"tp={size} is impossible here: {str(error).strip().splitlines()[0]}",
                hint=f"start {size} processes, for example with torchrun --nproc-per-node {size}",
            ) from None
        return cls(size, Rank(tp=torch.distributed.get_rank(), tp_size=size), device, meshes)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `from_pretrained` for a load inside `same_meshes`."""
        return {"distributed_config": self._config()}

    @contextmanager
    def same_meshes(self) -> Iterator[None]:
        """Context in which `from_pretrained` uses these meshes. To create new ones would wait for all other ranks."""
        mixin = _mixin()
        create = mixin.initialize_distributed_mesh
        mixin.initialize_distributed_mesh = lambda _: (self.device, self.meshes)
        try:
            yield
        finally:
            mixin.initialize_distributed_mesh = create

    def on_meta(
        self, config: PreTrainedConfig, build: Callable[[PreTrainedConfig], PreTrainedModel]
    ) -> PreTrainedModel:
        """Return this rank of a model that `build` creates on the meta device."""
        from transformers.initialization import no_tie_weights

        with no_tie_weights():  # tied weights are sharded one by one
            model = build(copy.deepcopy(config))
        distribute: Any = type(model).maybe_distribute_model
        sharded: PreTrainedModel = distribute(model, self._config(), self.meshes)
        sharded.tie_weights()
        return sharded

    def agreed_reason(self, reason: str | None) -> str | None:
        """Return the reason of the first rank that has one. All processes call it together."""
        reasons: list[str | None] = [None] * self.size
        torch.distributed.all_gather_object(reasons, reason)
        return next((f"rank {rank}: {each}" for rank, each in enumerate(reasons) if each is not None), None)

    def _config(self) -> Any:
        from transformers.distributed.configuration_utils import DistributedConfig

        return DistributedConfig(tp_size=self.size)


def _mixin() -> Any:
    """Return the module through which transformers creates meshes. Raises ImportError."""
    from transformers.distributed import mixin

    return mixin


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the shard of a DTensor that this process has; any other tensor unchanged."""
    return cast(torch.Tensor, tensor._local_tensor) if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return True for a DTensor."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def shard_of(own: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
    """Return the part of a checkpoint tensor that transformers loads into an own tensor of a rank."""
    if not is_sharded(own):
        return stored
    from transformers.distributed.sharding_utils import DtensorShardOperation

    operation: Any = DtensorShardOperation
    return cast(torch.Tensor, operation(own).shard_tensor(stored))

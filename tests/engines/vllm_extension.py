"""Methods that tests add to vLLM's workers (``--worker-extension-cls``); they run in the worker's process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.engines.reference_digests import digest, read_tensors


class WorkerExtension:
    """Called by ``POST /collective_rpc``, once in each worker of a server."""

    def weight_digests(self) -> dict[str, str]:
        """Return the SHA-256 of each parameter of the model, by its name."""
        worker: Any = self
        return {name: digest(tensor) for name, tensor in worker.get_model().named_parameters()}

    def load_tensors(self, folder: str, failing_rank: str = "") -> None:
        """Update the weights in place from tensors in memory: vLLM sees no file. It fails half-way on one rank."""
        worker: Any = self
        tensors = read_tensors(Path(folder))
        worker.reload_weights(weights_iterator=_failing(tensors) if str(worker.rank) == failing_rank else tensors)


def _failing(tensors: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    yield next(tensors)
    raise OSError("this rank lost its connection to the trainer")

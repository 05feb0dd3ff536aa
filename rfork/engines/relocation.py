"""Interface of engines whose weights can come from instances with other layouts, and what all of them share.

An engine records its placement map on a twin of its model: a second model without weights, on the meta device or in
host memory that is never written, whose own loader loads tensors without bytes (`rfork.placement.recorder`).
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from rfork.engines.tensor_parallel import local_tensor
from rfork.errors import ALL_TENSORS, RforkError, UnsupportedTensor
from rfork.logs import logger
from rfork.placement.box_tensors import type_of
from rfork.placement.placement_map import PlacementMap, TensorTable, TensorType
from rfork.placement.recorder import RecordedTensor, Recorder
from rfork.storage.formats.safetensors_file import TORCH_DTYPES
from rfork.storage.versions.version import folder_of

log = logger(__name__)

TWIN_DEVICES: Final = ("meta", "cpu")
"""Devices on which a twin is built: the first one on which the engine's classes work."""
MAX_REASONS: Final = 4
"""Reasons that a message lists."""

Weights = Iterable[tuple[str, torch.Tensor]]
"""Names and tensors of a checkpoint, in the order in which a loader reads them."""


@runtime_checkable
class RelocatingEngine(Protocol):
    """Loads one model from tensors that are not in its files. Called on the engine's thread that loads."""

    def checkpoint_tensors(self) -> TensorTable | None:
        """Return the tensors of the model's own files, from their headers. None without complete local files."""
        ...

    def record(self, checkpoint: TensorTable) -> PlacementMap:
        """Return the placement map of this rank.

        Builds no tensor with memory of its own and leaves the engine's configuration unchanged. Raises
        UnsupportedTensor if the loader cannot be recorded.
        """
        ...

    def live_tensors(self, module: nn.Module, placement_map: PlacementMap) -> tuple[dict[str, torch.Tensor], str]:
        """Return the tensors of a loaded model whose bytes are those that loading wrote, and why others are not.

        Their names, dtypes, shapes and strides are those of the map's own tensors.
        """
        ...

    def load_from(self, weights_of: WeightsOf) -> nn.Module:
        """Return a new model from the engine's own loader, which reads tensors instead of files.

        `weights_of` is called with the model before its weights are loaded. What it raises, also later, is raised.

        Like `EngineAdapter.load`, it requires that other models of this engine object are dropped first.
        """
        ...


WeightsOf = Callable[[nn.Module], Weights]
"""Returns the tensors that a loader reads for a model."""
Result = TypeVar("Result")

LoadTwin = Callable[[torch.device, Recorder, Weights], nn.Module]
"""Builds a twin on a device, and lets the engine's loader load recorded weights while the recorder is active."""


def record(checkpoint: TensorTable, load_twin: LoadTwin) -> PlacementMap:
    """Return the placement map of a twin. Raises UnsupportedTensor for any exception of the engine."""

    def attempt(device: torch.device) -> PlacementMap:
        recorder = Recorder()
        twin = load_twin(device, recorder, recorded_weights(recorder, checkpoint))
        return recorder.placement_map(tensors_of(twin))

    return on_twin_device(attempt)


def on_twin_device(attempt: Callable[[torch.device], Result]) -> Result:
    """Return the result of the first device on which an attempt to build a twin succeeds.

    Raises UnsupportedTensor for any exception of the engine.
    """
    failures: list[str] = []
    for device in TWIN_DEVICES:
        try:
            return attempt(torch.device(device))
        except RforkError:
            raise
        except Exception as error:  # an engine's classes may raise anything on a device that they do not expect
            failures.append(f"{device}: {type(error).__name__}: {error}")
            log.debug("model not recorded", device=device, reason=failures[-1], exc_info=True)
    raise UnsupportedTensor(ALL_TENSORS, f"its loader cannot be recorded ({'; '.join(failures)})")


@contextmanager
def no_trace(rotary_tables: dict[Any, Any], dtype: torch.dtype, logger_name: str) -> Iterator[None]:
    """Context in which to build a twin of a model with this dtype.

    Restores the rotary tables that all models of a process share, torch's default dtype and random state. Silences
    the engine's logger, which would report a second model.
    """
    engine_log, previous = logging.getLogger(logger_name), torch.get_default_dtype()
    level, tables = engine_log.level, dict(rotary_tables)
    rotary_tables.clear()
    torch.set_default_dtype(dtype)
    engine_log.setLevel(logging.ERROR)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        engine_log.setLevel(level)
        torch.set_default_dtype(previous)
        rotary_tables.clear()
        rotary_tables.update(tables)


def recorded_weights(recorder: Recorder, checkpoint: TensorTable) -> Iterator[tuple[str, RecordedTensor]]:
    """Yield tensors without bytes for all tensors of a checkpoint. The recorder is active while they are loaded."""
    for index, name in enumerate(checkpoint.names):
        tensor_type = checkpoint.type_of(index)
        yield name, recorder.tensor(name, getattr(torch, tensor_type.dtype), tensor_type.shape)
    recorder.end_checkpoint()


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers of a model, those with several names under each of them.

    Of a DTensor, it is the shard of this process.
    """
    found = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return {name: local_tensor(tensor) for name, tensor in found.items()}


def checkpoint_tensors(loader: Any, read_all: Callable[[torch.device], None]) -> TensorTable | None:
    """Return the tensors in the safetensors files of an engine's loader. None without complete local files.

    `read_all` lets the loader read all weights for a twin on a device. `loader` has the functions of vLLM's default
    loader, from which SGLang's originates. It reads nothing: each of its sources is only noted.
    """
    sources: list[Any] = []

    def note(source: Any, *_: object, **__: object) -> Iterator[tuple[str, torch.Tensor]]:
        sources.append(source)
        return iter(())

    def attempt(device: torch.device) -> None:
        sources.clear()
        read_all(device)

    files: list[tuple[str, Path]] = []
    loader._get_weights_iterator = note
    try:
        on_twin_device(attempt)
        for source in sources:
            found = _safetensors_files(loader, source)
            if found is None:
                return None
            files += [(source.prefix, path) for path in found]
    except (OSError, RuntimeError, ValueError, UnsupportedTensor) as error:
        log.debug("no checkpoint files", reason=str(error))
        return None
    return header_table(files)


def _safetensors_files(loader: Any, source: Any) -> list[Path] | None:
    """Return the files that a loader reads for a source; None if they are not local or of another format.

    The loader omits files that its index does not list, and fails if one is missing.
    """
    folder = folder_of(source.model_or_path, source.revision)
    if folder is None or not folder.is_dir():
        return None
    values = {
        "model_name_or_path": str(folder),
        "subfolder": getattr(source, "subfolder", None),
        "revision": None,
        "fall_back_to_pt": source.fall_back_to_pt,
        "allow_patterns_overrides": getattr(source, "allow_patterns_overrides", None),
    }
    prepare = loader._prepare_weights
    parameters = inspect.signature(prepare).parameters
    _, files, is_safetensors, *_ = prepare(**{name: value for name, value in values.items() if name in parameters})
    return sorted(map(Path, files)) if is_safetensors else None


def header_table(files: Sequence[tuple[str, Path]]) -> TensorTable | None:
    """Return the tensors in the headers of safetensors files, each file with a prefix of its names.

    None if a file cannot be read, has a dtype without a counterpart in torch, or if two files differ in a tensor's
    type. A tensor in several files is listed once.
    """
    found: dict[str, TensorType] = {}
    for prefix, path in files:
        try:
            with safe_open(path, framework="pt") as opened:
                for key in opened.keys():  # noqa: SIM118  # it is no mapping
                    part = opened.get_slice(key)
                    dtype = TORCH_DTYPES.get(part.get_dtype())
                    if dtype is None:
                        return None
                    tensor_type = TensorType(str(dtype).removeprefix("torch."), dtype.itemsize, tuple(part.get_shape()))
                    if found.setdefault(prefix + key, tensor_type) != tensor_type:
                        return None
        except (OSError, SafetensorError) as error:
            log.debug("checkpoint file not read", path=str(path), reason=str(error))
            return None
    return TensorTable(found.keys(), found.values()) if found else None


Refusal = Callable[[nn.Module], str | None]
"""Returns why post-processing may have changed the tensors of a layer and of its children; None if it has not."""


def unchanged_tensors(
    module: nn.Module, placement_map: PlacementMap, refusal: Refusal
) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors that loading wrote and nothing changed afterwards, and a line about the others."""
    layers, tensors = dict(module.named_modules()), tensors_of(module)
    loaded = {int(own) for own, source in zip(placement_map.owns, placement_map.sources, strict=True) if source >= 0}
    refusals: dict[str, str | None] = {}

    def reason_of(name: str) -> str | None:
        """Return why a layer or one of its ancestors is refused."""
        if name not in refusals:
            above = reason_of(name.rpartition(".")[0]) if name else None
            layer = layers.get(name)
            refusals[name] = above or (refusal(layer) if layer is not None else None)
        return refusals[name]

    unchanged: dict[str, torch.Tensor] = {}
    others: dict[str, list[str]] = {}
    for index in sorted(loaded):
        name, expected = placement_map.own.names[index], placement_map.own.type_of(index)
        tensor = tensors.get(name)
        reason = reason_of(name.rpartition(".")[0])
        if reason is None:
            reason = "removed after loading" if tensor is None else _difference(type_of(tensor), expected)
        if reason is None and tensor is not None:
            unchanged[name] = tensor
        else:
            others.setdefault(reason or "", []).append(name)
    return unchanged, _summary(others)


def _difference(actual: TensorType, expected: TensorType) -> str | None:
    if actual == expected:
        return None
    for field in ("dtype", "shape", "strides"):
        if (now := getattr(actual, field)) != (before := getattr(expected, field)):
            return f"{field} changed after loading from {before} to {now}"
    return None


def _summary(others: Mapping[str, Sequence[str]]) -> str:
    """Return one line: reasons, and the tensors to which they apply."""
    parts = [
        f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {reason}"
        for reason, names in others.items()
    ]
    if len(parts) > MAX_REASONS:
        parts[MAX_REASONS:] = [f"{len(parts) - MAX_REASONS} more reasons"]
    return "; ".join(parts)

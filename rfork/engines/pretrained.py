"""`fork_pretrained`: builds a transformers model like `from_pretrained`, with forked weights. Runs on the target."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from rfork import settings as options
from rfork._api import find_replaced_tensors, fork_with_fallbacks, resolve_settings
from rfork.engines.arguments import canonical_model_name, check_tensor_parallel
from rfork.engines.meta_model import MetaModel, collective_load_reason, overwritten_weight, stores_each_once
from rfork.engines.tensor_parallel import TensorParallel
from rfork.errors import ModelError, RforkError, UnsupportedTensor
from rfork.logs import logger
from rfork.receiver.fallback import Fallback, checkpoint_fallback, engine_fallback
from rfork.receiver.planner_requests import OnProgress
from rfork.receiver.report import ForkReport
from rfork.schema import Rank
from rfork.settings import InstanceSettings, StorageSettings
from rfork.source.seed import Seed
from rfork.storage.versions.version import folder_of, version_of_files

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from rfork.engines.cross_layout import CrossLayout

log = logger(__name__)

ATTRIBUTE = "_rfork"
"""Attribute of a model that records how it got its weights."""


def fork_pretrained(
    source: str | Path,
    *,
    planner: str | None = None,
    name: str | None = None,
    version: str | None = None,
    revision: str | None = None,
    model_class: type | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    tp: int | None = None,
    rank: Rank | None = None,
    deadline: float | None = None,
    snapshot: str | Path | None = None,
    exclude: Sequence[str] = (),
    settings: InstanceSettings | None = None,
    on_progress: OnProgress | None = None,
) -> PreTrainedModel:
    """Return the model that `from_pretrained` would return for a folder or hub id, with forked weights.

    Runs on the target.

    `source` is a folder or a hub id. Only the config is read: the folder needs no weight files, and none are
    downloaded from the hub. The model is in eval mode. From then on this process serves its weights, until
    the model is deleted or the process ends. `fork_report` returns how the model got its weights and its
    seed. Change the weights only inside a `Seed.updating` block; close the seed before moving the model
    (``model.to(…)``).

    `revision`, `model_class`, `dtype`, `attn_implementation` and `trust_remote_code` are those of
    `from_pretrained`; the class defaults to the one named by the config. `device` is the device of the
    weights (CPU, or a CUDA device, for which transformers needs accelerate). Seeds and forks find each other
    by `name` (default: the setting `model`, else the hub id or the folder's name) and `version` (default: the
    commit of the hub model, or a fingerprint of the folder's files). `planner` (URL), `deadline` (seconds),
    `rank`, `snapshot`, `exclude`, `settings` and `on_progress` are those of `rfork.fork`.

    With `tp`, each of `tp` processes (of torchrun, for example) calls this with equal arguments and gets its rank of
    a tensor-parallel model: what `from_pretrained` returns with ``DistributedConfig(tp_size=tp)``. transformers
    chooses the device, shards the parameters as DTensors over the default process group, and creates it if there is
    none; `device` and `rank` must be omitted. Each rank is forked by itself, from the same rank of other instances.

    If there is no source or the fork fails, the fallbacks are the snapshot, the safetensors files next to the
    config, then `from_pretrained`, which builds the model again after the memory of the first one is freed. With
    the setting `cross_layout`, instances with other layouts come before these files: engines, for example. With
    `fail_if_not_forked`, no files but the snapshot are read. Quantised models, and classes with their own
    `from_pretrained`, are not forked: `from_pretrained` loads them and they are not seeds; with
    `fail_if_not_forked` they are rejected.

    Raises AllSourcesFailed if nothing worked, ModelError if the model does not exist or transformers
    cannot load it, and SettingsError if `tp` is not the number of processes.
    """
    check_tensor_parallel(tp, device=device, rank=rank)
    chosen = resolve_settings(settings, planner=planner, deadline_s=deadline, version=version)
    blueprint = MetaModel.of(
        source,
        revision=revision,
        model_class=model_class,
        dtype=dtype,
        device=device,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
    )
    if tp is not None and tp > 1:
        parallel = TensorParallel.join(tp)
        blueprint, rank = blueprint.sharded(parallel), parallel.rank
    try:
        model = _empty(blueprint)
    except ModelError as error:
        return _load_unforked(blueprint, chosen, error)
    named = name or chosen.model or canonical_model_name(source)
    overwritten = overwritten_weight(model)
    cross_layout = _cross_layout(blueprint, named, rank, chosen, overwritten)
    loaded: list[PreTrainedModel] = []
    started: list[Seed] = []

    def replace_with(load: Callable[[], nn.Module]) -> nn.Module:
        loaded.append(cast("PreTrainedModel", load()))
        return loaded[-1]

    fallbacks: list[Fallback] = []
    if cross_layout is not None:
        fallbacks += cross_layout.fallbacks(
            lambda: started[0].version if started else None,
            replace_with,
            # Files of an instance that adopts the version of its sources may contain another one.
            lambda: folder_of(source, revision) if started and not started[0].adopts_version else None,
        )
    if chosen.fork_required_reason is None:
        fallbacks += _fallbacks(blueprint, model, overwritten, lambda: replace_with(blueprint.loaded))
    try:
        report = fork_with_fallbacks(
            model,
            model=named,
            rank=rank,
            snapshot=snapshot,
            later_fallbacks=fallbacks,
            files=partial(version_of_files, source, revision),
            exclude=exclude,
            settings=chosen,
            on_progress=on_progress,
            on_started=started.append,
        )
    except UnsupportedTensor as error:
        del model
        return _load_unforked(blueprint, chosen, error)
    model = loaded[-1] if loaded else model
    if cross_layout is not None and report.seed is not None:
        cross_layout.serve(model, report.seed)
    _attach_seed(model, report, exclude)
    return model


def _empty(blueprint: MetaModel) -> PreTrainedModel:
    """Return the model without weights. All ranks raise ModelError if one of them cannot be forked by itself."""
    parallel = blueprint.parallel
    if parallel is None:
        return blueprint.empty()
    model: PreTrainedModel | None = None
    reason: str | None = None
    try:
        model = blueprint.empty()
        reason = collective_load_reason(blueprint, model)
    except ModelError as error:
        reason = str(error)
    agreed = parallel.agreed_reason(reason)
    if agreed is not None or model is None:
        raise ModelError(agreed or f"{blueprint.source} cannot be forked")
    return model


def _cross_layout(
    blueprint: MetaModel, model: str, rank: Rank | None, settings: InstanceSettings, overwritten: str | None
) -> CrossLayout | None:
    """Return what reads the model from other layouts and serves it to them, if that is set."""
    if not settings.cross_layout:
        return None
    if overwritten is not None:
        log.info("other layouts not supported", reason=f"transformers changes {overwritten} after it was read")
        return None
    from rfork.engines.cross_layout import CrossLayout
    from rfork.engines.pretrained_layout import PretrainedEngine

    return CrossLayout(PretrainedEngine(blueprint), model, rank or Rank(), settings)


def fork_report(model: nn.Module) -> ForkReport | None:
    """Return how a `model` of `fork_pretrained` got its weights, with its seed; None for any other model.

    Runs on the target, at any time. Never raises. A copy of a forked model counts as another model.
    """
    state = vars(model).get(ATTRIBUTE)
    return state.report if isinstance(state, _ForkedState) else None


def _load_unforked(blueprint: MetaModel, settings: InstanceSettings, error: RforkError) -> PreTrainedModel:
    """Load a model that cannot be forked. Raises `error` if a fork is required."""
    if settings.fork_required_reason is not None:
        raise error
    log.warning("fork not supported, loading with transformers", model=blueprint.source, reason=str(error))
    return blueprint.loaded()


def _fallbacks(
    blueprint: MetaModel, model: PreTrainedModel, overwritten: str | None, load: Callable[[], nn.Module]
) -> list[Fallback]:
    if not blueprint.loadable:
        return []
    # What needs no call to the hub was checked before.
    fallbacks = [engine_fallback(load, lambda: None, lambda: blueprint.folder)]
    folder = blueprint.folder
    if (
        blueprint.parallel is None
        and overwritten is None
        and blueprint.has_checkpoint
        and blueprint.loads_as_stored(model)
        and stores_each_once(folder, model)
    ):
        fallbacks.insert(0, checkpoint_fallback(blueprint.folder, options.load(StorageSettings)))
    return fallbacks


class _ForkedState:
    """Fork state attached to a model. A copy of the model was not forked and is not a seed."""

    def __init__(self, report: ForkReport | None = None) -> None:
        self.report = report

    def __reduce__(self) -> tuple[type[_ForkedState], tuple[()]]:
        return _ForkedState, ()


def _attach_seed(model: nn.Module, report: ForkReport, exclude: Sequence[str]) -> None:
    """Let the seed follow updates of the model, and close it when the model is deleted or the process ends."""
    setattr(model, ATTRIBUTE, _ForkedState(report))
    seed = report.seed
    if seed is None:
        return
    find_replaced_tensors(seed, model, exclude)
    atexit.register(seed.close)
    weakref.finalize(model, _close_seed_async, seed).atexit = False


def _close_seed_async(seed: Seed) -> None:
    """Close the seed of a deleted model on another thread: finalizers may run on any thread, within any call."""
    atexit.unregister(seed.close)
    threading.Thread(target=seed.close, name="rfork-close", daemon=True).start()

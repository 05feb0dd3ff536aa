"""`fork_pretrained`: a transformers model as of `from_pretrained`, its weights forked. Runs on the target."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from rfork import settings as options
from rfork._api import fork_with_fallbacks, resolve_settings
from rfork.engines.meta_model import MetaModel
from rfork.engines.model_name import canonical_model_name
from rfork.engines.pretrained_config import SAFETENSORS
from rfork.engines.version_selection import version_of_files
from rfork.errors import ModelError, RforkError, UnsupportedTensor
from rfork.logs import logger
from rfork.receiver.fallback import Fallback, checkpoint_fallback, engine_fallback
from rfork.receiver.progress import OnProgress
from rfork.receiver.report import ForkReport
from rfork.schema import Rank
from rfork.settings import InstanceSettings, StorageSettings
from rfork.source.seed import Seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logger(__name__)

ATTRIBUTE = "_rfork"
"""Of a model: how it got its weights."""


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
    rank: Rank | None = None,
    deadline: float | None = None,
    snapshot: str | Path | None = None,
    exclude: Sequence[str] = (),
    settings: InstanceSettings | None = None,
    on_progress: OnProgress | None = None,
) -> PreTrainedModel:
    """The model of a folder, or of the hub, as `from_pretrained` would give it, forked. Runs on the target.

    `source` is the folder, or the hub's name of the model. Only the config is read: the folder needs no
    weights, and of the hub none are fetched. The model is in eval mode, and from then on this process gives
    its weights onwards, until the model is gone or the process ends; `fork_report` tells how it got them, and
    holds the seed. Whoever changes the weights does it in a block of `Seed.updating`; whoever moves them
    (``model.to(…)``) closes the seed before.

    `revision`, `model_class`, `dtype`, `attn_implementation` and `trust_remote_code` are as for
    `from_pretrained`; without a class it is that which the config names. `device` is where the weights lie
    (CPU, or a CUDA device, for which transformers wants accelerate).
    Seeds and forks meet under `name`; without it the setting `model`, else the hub's name or that of the
    folder; and under `version`, without it the commit of the hub's model, or a fingerprint of the folder's
    files. `planner` (URL), `deadline` (seconds), `rank`, `snapshot`,
    `exclude`, `settings` and `on_progress` are as for `rfork.fork`.

    Where nobody holds the weights, or no fork works: the snapshot, the safetensors files beside the config,
    then `from_pretrained`, which builds the model again once the memory of the first is given back. With the
    setting `required` only the snapshot. Quantised models are not forked: `from_pretrained` loads them, they
    are no seeds, and with `required` they are refused.

    Raises AllSourcesFailed when nothing worked, ModelError where there is no such model or transformers cannot
    load it.
    """
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
    try:
        model = blueprint.empty()
    except ModelError as error:
        return _load_unforked(blueprint, chosen, error)
    last = _TransformersLoader(blueprint)
    try:
        report = fork_with_fallbacks(
            model,
            model=name or chosen.model or canonical_model_name(source),
            rank=rank,
            snapshot=snapshot,
            later_fallbacks=[] if chosen.fail_if_not_forked else _fallbacks(blueprint, model, last),
            files=partial(version_of_files, source, revision),
            exclude=exclude,
            settings=chosen,
            on_progress=on_progress,
        )
    except UnsupportedTensor as error:
        del model
        return _load_unforked(blueprint, chosen, error)
    model = last.model or model
    _attach_seed(model, report)
    return model


def fork_report(model: nn.Module) -> ForkReport | None:
    """How a `model` of `fork_pretrained` got its weights, and the seed that gives them; None of any other.

    Runs on the target, at any time. Never raises: also a copy of such a model is another one.
    """
    state = vars(model).get(ATTRIBUTE)
    return state.report if isinstance(state, _ForkedState) else None


def _load_unforked(blueprint: MetaModel, settings: InstanceSettings, error: RforkError) -> PreTrainedModel:
    """What cannot be forked is loaded, unless it must not be."""
    if settings.fail_if_not_forked:
        raise error
    log.warning("not forked: transformers loads it", model=blueprint.source, because=str(error))
    return blueprint.loaded()


class _TransformersLoader:
    """The last way: `from_pretrained`, and the model that it built."""

    def __init__(self, blueprint: MetaModel) -> None:
        self.model: PreTrainedModel | None = None
        self._blueprint = blueprint

    def load(self) -> nn.Module:
        """Build and load it."""
        self.model = self._blueprint.loaded()
        return self.model

    def check(self) -> None:
        """What can be known of it without a call to the hub was looked at before."""


def _fallbacks(blueprint: MetaModel, model: PreTrainedModel, last: _TransformersLoader) -> list[Fallback]:
    if not blueprint.loadable:
        return []
    fallbacks = [engine_fallback(last.load, last.check)]
    if any(blueprint.folder.glob(SAFETENSORS)) and blueprint.loads_as_stored(model):
        fallbacks.insert(0, checkpoint_fallback(blueprint.folder, options.load(StorageSettings)))
    return fallbacks


class _ForkedState:
    """What hangs on a model. A copy of the model was not forked, and is no seed."""

    def __init__(self, report: ForkReport | None = None) -> None:
        self.report = report

    def __reduce__(self) -> tuple[type[_ForkedState], tuple[()]]:
        return _ForkedState, ()


def _attach_seed(model: nn.Module, report: ForkReport) -> None:
    """Have the seed end with the model, and with the process."""
    setattr(model, ATTRIBUTE, _ForkedState(report))
    seed = report.seed
    if seed is None:
        return
    atexit.register(seed.close)
    weakref.finalize(model, _close_seed_async, seed).atexit = False


def _close_seed_async(seed: Seed) -> None:
    """The model is gone. This may run on any thread, within any call: another one closes the seed."""
    atexit.unregister(seed.close)
    threading.Thread(target=seed.close, name="rfork-close", daemon=True).start()

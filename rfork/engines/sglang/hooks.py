"""Scheduler hooks that notify the served model when SGLang decodes, changes or releases weights, or exits.

Runs on the source, in a scheduler process that uses load format ``rfork``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn

from rfork.engines.monkeypatch import call_after, call_before
from rfork.engines.served_model import served_model
from rfork.engines.sglang import hook_targets
from rfork.engines.sglang.weight_updates import WeightUpdateHooks
from rfork.errors import EngineMismatch, RforkError
from rfork.logs import logger

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

log = logger(__name__)

EXIT_TIMEOUT_S = 10.0
"""Maximum seconds that readers have to finish once the server stops its schedulers. It kills them
after 15.
"""
STARTED_ATTR = "rfork_began"


@cache
def install() -> None:
    """Install the hooks in this process. Idempotent. Raises EngineMismatch if this SGLang is incompatible."""
    if incompatible := hook_targets.find_incompatible(hook_targets.SCHEDULING):
        raise EngineMismatch(
            hook_targets.format_incompatibility(incompatible), hint="install a tested version of SGLang"
        )
    updates = WeightUpdateHooks()
    for request in hook_targets.REQUESTS:
        hook_targets.hook(request, updates.request)
    for path, wrapper in (
        (hook_targets.FROM_DISK, updates.from_disk),
        (hook_targets.FROM_IPC, updates.from_ipc),
        (hook_targets.FROM_TENSOR, updates.within),
        (hook_targets.FROM_DISTRIBUTED, updates.within),
        (hook_targets.BEGIN_UPDATE, updates.begin),
        (hook_targets.END_UPDATE, updates.end),
        (hook_targets.RELEASE_MEMORY, updates.release),
        (hook_targets.RESUME_MEMORY, call_after(updates.resume)),
        (hook_targets.RUN_BATCH, _run_batch),
        (hook_targets.PROCESS_RESULT, call_before(_process_result)),
        (hook_targets.RUN_LOOP, call_before(_on_ready)),
        (hook_targets.RELEASE_HOST, call_before(_on_exit)),
    ):
        hook_targets.hook(path, wrapper)


def _run_batch(run: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
    """Measure decode steps, which are comparable units of work.

    In overlap mode a step ends when its result is processed.
    """
    served = served_model(scheduler.tp_worker.model_runner.model)
    if served is None or not (batch.forward_mode.is_decode() or _never_decodes(scheduler)):
        return run(scheduler, batch, *args, **kwargs)
    if not scheduler.enable_overlap:
        with served.serving():
            return run(scheduler, batch, *args, **kwargs)
    began = time.monotonic()
    result = run(scheduler, batch, *args, **kwargs)
    setattr(result, STARTED_ATTR, began)
    return result


def _process_result(scheduler: Scheduler, batch: ScheduleBatch, result: Any) -> None:
    began = getattr(result, STARTED_ATTR, None)
    if began is None:
        return
    event = getattr(result, "copy_done", None)
    if event is not None:
        event.synchronize()  # SGLang does this next; it marks the end of the step
    served = served_model(scheduler.tp_worker.model_runner.model)
    if served is not None:
        served.seed.record_step_latency(time.monotonic() - began)


def _on_ready(scheduler: Scheduler) -> None:
    """Serve tensors that SGLang has replaced since the model was loaded. Called when SGLang is ready to serve."""
    for _, model in _runners(scheduler):
        if (served := served_model(model)) is None:
            continue
        try:
            image = served.recapture()
        except RforkError as error:
            log.info("serving the loaded tensors: the engine's changed model cannot be captured", reason=str(error))
            continue
        served_image = served.seed.image
        if difference := served_image.layout.first_difference(image.layout):
            # For example LoRA layers, which wrap the loaded weights.
            log.info("serving the loaded tensors: the engine changed the layout of the model", difference=difference)
        elif not served_image.shares_memory_with(image):
            log.info("the engine replaced tensors of the model, serving the new ones")
            served.renew()


def _on_exit(scheduler: Scheduler) -> None:
    """Close the served models. The server has finished its requests and exits."""
    for _, model in _runners(scheduler):
        served = served_model(model)
        if served is not None:
            served.close(min(served.seed.settings.drain_timeout_s, EXIT_TIMEOUT_S))


def _never_decodes(scheduler: Scheduler) -> bool:
    return not scheduler.is_generation or scheduler.disaggregation_mode.value == "prefill"


def _runners(scheduler: Scheduler) -> Iterator[tuple[str, nn.Module]]:
    for worker in (scheduler.tp_worker, scheduler.draft_worker):
        if worker is not None:
            yield from ((role, runner.model) for role, runner in worker.weight_update_runners())

"""Where a scheduler serves, changes its weights, puts them away, or ends: the instance is told.

Runs on the source: in a scheduler process that loads its models by load format ``rfork``.
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
"""Most seconds that readers have to finish, once the server has asked its schedulers to end: it kills them
after 15."""
STARTED_ATTR = "rfork_began"


@cache
def install() -> None:
    """Hook this process's SGLang. Again is harmless. Raises EngineMismatch where it is not as known."""
    if moved := hook_targets.find_incompatible(hook_targets.SCHEDULING):
        raise EngineMismatch(
            hook_targets.format_incompatibility(moved), hint="install a version of SGLang that was tested"
        )
    updates = WeightUpdateHooks()
    for request in hook_targets.REQUESTS:
        hook_targets.hook(request, updates.request)
    for point, wrapper in (
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
        hook_targets.hook(point, wrapper)


def _run_batch(run: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch, *more: Any, **named: Any) -> Any:
    """Decode steps are units of work that are alike. In overlap mode they end when their result is taken."""
    instance = served_model(scheduler.tp_worker.model_runner.model)
    if instance is None or not (batch.forward_mode.is_decode() or _never_decodes(scheduler)):
        return run(scheduler, batch, *more, **named)
    if not scheduler.enable_overlap:
        with instance.serving():
            return run(scheduler, batch, *more, **named)
    began = time.monotonic()
    result = run(scheduler, batch, *more, **named)
    setattr(result, STARTED_ATTR, began)
    return result


def _process_result(scheduler: Scheduler, batch: ScheduleBatch, result: Any) -> None:
    began = getattr(result, STARTED_ATTR, None)
    if began is None:
        return
    event = getattr(result, "copy_done", None)
    if event is not None:
        event.synchronize()  # as SGLang does next: it is what tells that the step has ended
    instance = served_model(scheduler.tp_worker.model_runner.model)
    if instance is not None:
        instance.seed.record_step_latency(time.monotonic() - began)


def _on_ready(scheduler: Scheduler) -> None:
    """SGLang is ready to serve. Where it has put other tensors into a model since, those are given now."""
    for _, model in _runners(scheduler):
        if (instance := served_model(model)) is None:
            continue
        try:
            image = instance.recapture()
        except RforkError as error:
            log.info("what was loaded is given; what the engine made of it cannot be", because=str(error))
            continue
        served_image = instance.seed.image
        if difference := served_image.layout.first_difference(image.layout):
            # LoRA's layers and the like, around the very weights that were loaded.
            log.info("what was loaded is given, not what the engine made of it", difference=difference)
        elif not served_image.shares_memory_with(image):
            log.info("the engine put other tensors into the model: those are given from now on")
            instance.renew()


def _on_exit(scheduler: Scheduler) -> None:
    """The server drains no more requests, and ends."""
    for _, model in _runners(scheduler):
        instance = served_model(model)
        if instance is not None:
            instance.close(min(instance.seed.settings.drain_timeout_s, EXIT_TIMEOUT_S))


def _never_decodes(scheduler: Scheduler) -> bool:
    return not scheduler.is_generation or scheduler.disaggregation_mode.value == "prefill"


def _runners(scheduler: Scheduler) -> Iterator[tuple[str, nn.Module]]:
    for worker in (scheduler.tp_worker, scheduler.draft_worker):
        if worker is not None:
            yield from ((role, runner.model) for role, runner in worker.weight_update_runners())

"""Where a scheduler serves, changes its weights, puts them away, or ends: the instance is told.

Runs on the source: in a scheduler process that loads its models by load format ``rfork``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import nn

from rfork.engines.instance import instance_of
from rfork.engines.sglang import points
from rfork.engines.sglang.updating import Updates
from rfork.engines.wrapping import after, before
from rfork.errors import EngineMismatch, RforkError
from rfork.logs import logger

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler

log = logger(__name__)

LEAVE_S = 10.0
"""Most seconds that readers have to finish, once the server has asked its schedulers to end: it kills them
after 15."""
BEGAN = "rfork_began"


@cache
def install() -> None:
    """Hook this process's SGLang. Again is harmless. Raises EngineMismatch where it is not as known."""
    if moved := points.moved(points.SCHEDULING):
        raise EngineMismatch(points.told(moved), hint="install a version of SGLang that was tested")
    updates = Updates()
    for request in points.REQUESTS:
        points.hook(request, updates.request)
    for point, wrapper in (
        (points.FROM_DISK, updates.from_disk),
        (points.FROM_IPC, updates.from_ipc),
        (points.FROM_TENSOR, updates.within),
        (points.FROM_DISTRIBUTED, updates.within),
        (points.BEGIN_UPDATE, updates.begin),
        (points.END_UPDATE, updates.end),
        (points.RELEASE_MEMORY, updates.release),
        (points.RESUME_MEMORY, after(updates.resume)),
        (points.RUN_BATCH, _run_batch),
        (points.PROCESS_RESULT, before(_process_result)),
        (points.RUN_LOOP, before(_settle)),
        (points.RELEASE_HOST, before(_leave)),
    ):
        points.hook(point, wrapper)


def _run_batch(
    run: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch, *more: Any, **named: Any
) -> Any:
    """Decode steps are units of work that are alike. In overlap mode they end when their result is taken."""
    instance = instance_of(scheduler.tp_worker.model_runner.model)
    if instance is None or not (batch.forward_mode.is_decode() or _never_decodes(scheduler)):
        return run(scheduler, batch, *more, **named)
    if not scheduler.enable_overlap:
        with instance.serving():
            return run(scheduler, batch, *more, **named)
    began = time.monotonic()
    result = run(scheduler, batch, *more, **named)
    setattr(result, BEGAN, began)
    return result


def _process_result(scheduler: Scheduler, batch: ScheduleBatch, result: Any) -> None:
    began = getattr(result, BEGAN, None)
    if began is None:
        return
    event = getattr(result, "copy_done", None)
    if event is not None:
        event.synchronize()  # as SGLang does next: it is what tells that the step has ended
    instance = instance_of(scheduler.tp_worker.model_runner.model)
    if instance is not None:
        instance.seed.observe(time.monotonic() - began)


def _settle(scheduler: Scheduler) -> None:
    """SGLang is ready to serve. Where it has put other tensors into a model since, those are given now."""
    for _, model in _runners(scheduler):
        if (instance := instance_of(model)) is None:
            continue
        try:
            image = instance.captured()
        except RforkError as error:
            log.info("what was loaded is given; what the engine made of it cannot be", because=str(error))
            continue
        given = instance.seed.image
        if difference := given.layout.first_difference(image.layout):
            # LoRA's layers and the like, around the very weights that were loaded.
            log.info("what was loaded is given, not what the engine made of it", difference=difference)
        elif not given.same_memory(image):
            log.info("the engine put other tensors into the model: those are given from now on")
            instance.renew()


def _leave(scheduler: Scheduler) -> None:
    """The server drains no more requests, and ends."""
    for _, model in _runners(scheduler):
        instance = instance_of(model)
        if instance is not None:
            instance.close(min(instance.seed.settings.drain_s, LEAVE_S))


def _never_decodes(scheduler: Scheduler) -> bool:
    return not scheduler.is_generation or scheduler.disaggregation_mode.value == "prefill"


def _runners(scheduler: Scheduler) -> Iterator[tuple[str, nn.Module]]:
    for worker in (scheduler.tp_worker, scheduler.draft_worker):
        if worker is not None:
            yield from ((role, runner.model) for role, runner in worker.weight_update_runners())

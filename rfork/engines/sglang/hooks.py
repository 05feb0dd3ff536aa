"""Where a scheduler serves, and where it changes its weights, puts them away, or ends: the instance is told.

Runs on the source: in a scheduler process that loads its models by load format ``rfork``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from torch import nn

from rfork.engines.instance import Instance, instance_of
from rfork.engines.sglang import points
from rfork.engines.sglang.plugin import LOAD_FORMAT, SOURCE, TESTED
from rfork.errors import RforkError, SettingsError
from rfork.image.capture import capture
from rfork.logs import logger

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

log = logger(__name__)

WRITTEN = "Failed to update weights"
"""How SGLang begins to tell that an update from disk failed once weights were written."""
LEAVE_S = 10.0
"""Most seconds that readers have to finish, once the server has asked its schedulers to end: it kills them
after 15."""
BEGAN = "rfork_began"

Updated = tuple[bool, str]
Tag = str


@cache
def install() -> None:
    """Hook this process's SGLang. Again is harmless. Raises SettingsError where it is not as it should be."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookSource, HookType

    if moved := points.moved(points.SCHEDULING):
        raise SettingsError(points.told(moved, TESTED), hint="install a version of SGLang that was tested")
    updates = Updates()
    for point, hook, kind in (
        (points.FROM_DISK, updates.from_disk, HookType.AROUND),
        (points.FROM_IPC, updates.from_ipc, HookType.AROUND),
        (points.FROM_TENSOR, updates.within, HookType.AROUND),
        (points.FROM_DISTRIBUTED, updates.within, HookType.AROUND),
        (points.BEGIN_UPDATE, updates.begin, HookType.BEFORE),
        (points.END_UPDATE, updates.end, HookType.AROUND),
        (points.RELEASE_MEMORY, _release, HookType.AROUND),
        (points.RESUME_MEMORY, _resume, HookType.AFTER),
        (points.RUN_BATCH, _run_batch, HookType.AROUND),
        (points.PROCESS_RESULT, _process_result, HookType.BEFORE),
        (points.RUN_LOOP, _settle, HookType.BEFORE),
        (points.RELEASE_HOST, _leave, HookType.BEFORE),
    ):
        HookRegistry.register(point, hook, kind, source=HookSource(*SOURCE))
    HookRegistry.apply_hooks()


class Updates:
    """The ways by which one runner's weights are changed in place."""

    def __init__(self) -> None:
        self._broken: WeakSet[Instance] = WeakSet()
        """Those whose update failed half way, until the next one."""

    def from_disk(
        self,
        update: Callable[..., Updated],
        runner: WeightUpdater,
        model_path: str,
        load_format: str,
        *more: object,
        **named: object,
    ) -> Updated:
        """SGLang names its own load format where the caller names none; files are read by ``auto``."""
        given = "auto" if load_format == LOAD_FORMAT else load_format
        return self._whole(runner, lambda: update(runner, model_path, given, *more, **named))

    def from_ipc(self, update: Callable[..., Updated], runner: WeightUpdater, recv_req: object) -> Updated:
        """All weights at once, by another process of the host; told to fail, some may be written."""
        return self._whole(runner, lambda: update(runner, recv_req), untouched=False)

    def begin(self, runner: WeightUpdater) -> None:
        """From here to `end`, weights are written in any number of steps."""
        if (instance := instance_of(runner.get_model())) is not None:
            self._broken.discard(instance)
            instance.fence()

    def within(
        self, update: Callable[..., Updated], runner: WeightUpdater, *more: object, **named: object
    ) -> Updated:
        """One of the steps."""
        instance = instance_of(runner.get_model())
        try:
            done = update(runner, *more, **named)
        except BaseException:
            self._break(instance)
            raise
        if not done[0]:
            self._break(instance)
        return done

    def end(self, end: Callable[..., None], runner: WeightUpdater, **named: object) -> None:
        """The weights are whole, unless a step failed."""
        instance = instance_of(runner.get_model())
        try:
            end(runner, **named)
        except BaseException:
            self._break(instance)
            raise
        if instance is not None and instance not in self._broken:
            instance.renew()

    def _whole(
        self, runner: WeightUpdater, update: Callable[[], Updated], *, untouched: bool = True
    ) -> Updated:
        """One update that is whole in itself; `untouched`: what fails mostly fails before it writes."""
        self.begin(runner)
        instance = instance_of(runner.get_model())
        try:
            done = update()
        except BaseException:
            self._break(instance)
            raise
        if instance is not None:
            if done[0] or (untouched and not done[1].startswith(WRITTEN)):
                instance.renew()
            else:
                self._break(instance)
        return done

    def _break(self, instance: Instance | None) -> None:
        if instance is not None and instance not in self._broken:
            self._broken.add(instance)
            log.error("not a seed until the next update of the weights: one failed half way")


def _release(release: Callable[..., Any], manager: SchedulerWeightUpdaterManager, recv_req: Any) -> Any:
    """The memory is about to go; it has to be let go of first."""
    instances = [instance for _, instance in _instances(manager)] if _of_weights(recv_req.tags) else []
    for instance in instances:
        instance.suspend()
    try:
        return release(manager, recv_req)
    except BaseException:
        for instance in instances:
            instance.renew()
        raise


def _resume(_: object, manager: SchedulerWeightUpdaterManager, recv_req: Any) -> None:
    """The memory is back; what lay in it is, too, only where SGLang kept a copy: else an update brings it."""
    if not _of_weights(recv_req.tags):
        return
    from sglang.srt.runtime_context import get_exec

    told = get_exec().features
    kept = told.enable_weights_cpu_backup or not told.enable_memory_saver
    for role, instance in _instances(manager):
        if kept or (role != "target" and told.enable_draft_weights_cpu_backup):
            instance.renew()
        else:
            log.info("not a seed until the next update of the weights: they were released without a copy")


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
            image = capture(model, exclude=instance.exclude)
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


def _of_weights(tags: list[Tag] | None) -> bool:
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    return not tags or GPU_MEMORY_TYPE_WEIGHTS in tags


def _instances(manager: SchedulerWeightUpdaterManager) -> Iterator[tuple[str, Instance]]:
    for role, runner in manager._select_runners():
        if (instance := instance_of(runner.model)) is not None:
            yield role, instance


def _runners(scheduler: Scheduler) -> Iterator[tuple[str, nn.Module]]:
    for worker in (scheduler.tp_worker, scheduler.draft_worker):
        if worker is not None:
            yield from ((role, runner.model) for role, runner in worker.weight_update_runners())

"""Scheduler hooks that notify the served model when SGLang decodes, changes or releases weights, or exits.

Runs on the source, in a scheduler process that uses load format ``rfork``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import nn

from rfork.engine_command import LOAD_FORMAT
from rfork.engines import weight_cache
from rfork.engines.hook_targets import Compatibility, call_after, call_before
from rfork.engines.identity import CurrentVersion, version_of_reload
from rfork.engines.served_model import served_model
from rfork.engines.sglang import compat
from rfork.engines.shared_tensors import main_model
from rfork.engines.weight_lifecycle import WeightLifecycle, lifecycle_of, stop_seeding
from rfork.errors import RforkError, SettingsError
from rfork.logs import logger
from rfork.storage.versions.version import checked_version

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater


log = logger(__name__)

PARTIAL_UPDATE_PREFIX = "Failed to update weights"
"""Start of SGLang's message for an update from disk that failed after weights were written."""

NO_VERSION = "default"
"""SGLang's weight version if the user set none."""
RESET = "reset_tensors"
"""SGLang's check of weights that overwrites them."""
DUMMY = "dummy"
"""SGLang's load format that reads no files."""

Updated = tuple[bool, str]
Tag = str


class WeightUpdateHooks:
    """Wraps the methods that change a process's weights in place."""

    def __init__(self) -> None:
        self._requested: str | None = None
        """Version of the weights in the current request."""
        self._adopted: str | None = None
        """Version of the last successful request: before 0.5.19, SGLang's schedulers do not record it."""
        self._step_versions: WeakKeyDictionary[WeightLifecycle, str] = WeakKeyDictionary()
        """Versions that the steps of an update requested."""
        self._begun: set[WeightLifecycle] = set()
        """Models that the current request has begun to update."""

    def request(
        self,
        update: Callable[..., Any],
        manager: SchedulerWeightUpdaterManager,
        recv_req: Any,
        *args: object,
        **kwargs: object,
    ) -> Any:
        """Wrap an SGLang request to update weights. All ranks of the server receive it."""
        self._requested = _new_version(recv_req, self._adopted)
        try:
            result = update(manager, recv_req, *args, **kwargs)
        finally:
            requested, self._requested = self._requested, None
        if requested is not None and getattr(result, "success", False):
            self._adopted = requested
        return result

    def full_request(
        self,
        update: Callable[..., Any],
        manager: SchedulerWeightUpdaterManager,
        recv_req: Any,
        *args: object,
        **kwargs: object,
    ) -> Any:
        """Wrap a request that is an update by itself. It counts for each model of this rank.

        If it fails for one model, SGLang skips those that follow: on this rank, but perhaps not on the others.
        """
        self._begun.clear()
        try:
            return self.request(update, manager, recv_req, *args, **kwargs)
        finally:
            for _, lifecycle in _lifecycles(manager):
                if lifecycle not in self._begun:
                    lifecycle.served.count_update()

    def _requested_version(self) -> str | None:
        return self._requested

    def from_disk(
        self,
        update: Callable[..., Updated],
        runner: WeightUpdater,
        model_path: str,
        load_format: str,
        *args: object,
        **kwargs: object,
    ) -> Updated:
        """Wrap an update from files.

        If the caller sets no load format, SGLang passes its own; files are then read as ``auto``.
        """
        load_format_used = "auto" if load_format == LOAD_FORMAT else load_format
        filtered = bool(args) or kwargs.get("weight_name_filter") is not None
        version: CurrentVersion = self._requested_version
        if self._requested is None and load_format_used != DUMMY and not filtered:
            version = version_of_reload(model_path, _revision(runner))
        return self._full_update(
            runner, lambda: update(runner, model_path, load_format_used, *args, **kwargs), version=version
        )

    def from_ipc(
        self,
        update: Callable[..., Updated],
        runner: WeightUpdater,
        recv_req: object,
        *args: object,
        **kwargs: object,
    ) -> Updated:
        """Wrap an update of all weights by another process of the host. Some may be written if it fails."""
        return self._full_update(
            runner,
            lambda: update(runner, recv_req, *args, **kwargs),
            version=self._requested_version,
            fails_before_writing=False,
        )

    def begin(self, begin: Callable[..., Any], runner: WeightUpdater, *args: object, **kwargs: object) -> Any:
        """Wrap the start of an update: until `end`, weights are written in any number of steps."""
        lifecycle = _changed_by(runner)
        if lifecycle is None:
            return begin(runner, *args, **kwargs)
        lifecycle.abandon_updates()
        lifecycle.begin_update()
        self._step_versions.pop(lifecycle, None)
        try:
            return begin(runner, *args, **kwargs)
        except BaseException:
            lifecycle.fail_update()
            raise

    def within(self, update: Callable[..., Updated], runner: WeightUpdater, *args: object, **kwargs: object) -> Updated:
        """Wrap one step of an update.

        Before 0.5.21, SGLang's updates have neither a begin nor an end. So it is unknown whether the weights are
        complete, and they are served again after the next update from disk.
        """
        lifecycle = _changed_by(runner)
        if lifecycle is None:
            return update(runner, *args, **kwargs)
        try:
            with lifecycle.loading():
                done = update(runner, *args, **kwargs)
        except BaseException:
            lifecycle.fail_step()
            raise
        if not done[0]:
            lifecycle.fail_step()
        elif self._requested is not None:
            self._step_versions[lifecycle] = self._requested
        return done

    def end(self, end: Callable[..., Any], runner: WeightUpdater, *args: object, **kwargs: object) -> Any:
        """Wrap the end of an update. The weights are complete unless a step failed."""
        lifecycle = _changed_by(runner)
        if lifecycle is None:
            return end(runner, *args, **kwargs)
        try:
            result = end(runner, *args, **kwargs)
        except BaseException:
            lifecycle.fail_update()
            raise
        lifecycle.end_update(self._step_versions.pop(lifecycle, None))
        return result

    def check(self, manager: SchedulerWeightUpdaterManager, recv_req: Any, *args: object, **kwargs: object) -> None:
        """Stop serving before a check of the weights that overwrites them."""
        if recv_req.action == RESET:
            for _, lifecycle in _lifecycles(manager):
                lifecycle.mark_lost()

    def release(
        self,
        release: Callable[..., Any],
        manager: SchedulerWeightUpdaterManager,
        recv_req: Any,
        *args: object,
        **kwargs: object,
    ) -> Any:
        """Wrap a release of memory: stop serving the weights first."""
        lifecycles = [lifecycle for _, lifecycle in _lifecycles(manager)] if _of_weights(recv_req.tags) else []
        for lifecycle in lifecycles:
            lifecycle.sleep(kept=True)  # `resume` checks whether SGLang has kept a copy
        try:
            return release(manager, recv_req, *args, **kwargs)
        except BaseException:
            for lifecycle in lifecycles:
                lifecycle.wake()
            raise

    def resume(
        self, _: object, manager: SchedulerWeightUpdaterManager, recv_req: Any, *args: object, **kwargs: object
    ) -> None:
        """Handle the return of released memory. Its content is restored only if SGLang kept a copy."""
        if not _of_weights(recv_req.tags):
            return
        kept = compat.option("enable_weights_cpu_backup") or not compat.option("enable_memory_saver")
        for role, lifecycle in _lifecycles(manager):
            if lifecycle.asleep:
                lifecycle.wake(kept or (role != compat.TARGET and compat.option("enable_draft_weights_cpu_backup")))

    def _full_update(
        self,
        runner: WeightUpdater,
        update: Callable[[], Updated],
        *,
        version: CurrentVersion,
        fails_before_writing: bool = True,
    ) -> Updated:
        """Run one self-contained update, after which the weights have `version`.

        `fails_before_writing`: a failed update normally fails before it writes anything.
        """
        lifecycle = _changed_by(runner)
        if lifecycle is None:
            return update()
        self._begun.add(lifecycle)
        lifecycle.begin_update()
        try:
            done = update()
        except BaseException:
            lifecycle.fail_update()
            raise
        if done[0]:
            lifecycle.end_update(version())
        elif fails_before_writing and not done[1].startswith(PARTIAL_UPDATE_PREFIX):
            lifecycle.cancel_update()
        else:
            lifecycle.fail_update()
        return done


def _changed_by(runner: WeightUpdater) -> WeightLifecycle | None:
    """Return the lifecycle of a runner's model. A draft that is not served may share tensors with its main model."""
    return lifecycle_of(runner.get_model()) or lifecycle_of(main_model())


def _new_version(recv_req: Any, adopted: str | None) -> str | None:
    """Return the weight version of a request; None if it has none or an unchanged one."""
    version: str | None = getattr(recv_req, "weight_version", None)
    if version in (None, NO_VERSION, adopted, compat.option("weight_version", None)):
        return None
    try:
        return checked_version(str(version))
    except SettingsError as error:
        log.warning("weight_version of the update ignored: it is not a valid version", reason=str(error))
        return None


def _revision(runner: WeightUpdater) -> str | None:
    """Return the hub revision that SGLang uses, also for a hub id that it was not started with."""
    revision: str | None = getattr(getattr(runner, "model_config", None), "revision", None)
    return revision


def _of_weights(tags: list[Tag] | None) -> bool:
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    return not tags or GPU_MEMORY_TYPE_WEIGHTS in tags


def _lifecycles(manager: SchedulerWeightUpdaterManager) -> Iterator[tuple[str, WeightLifecycle]]:
    for role, runner in compat.runners(manager.tp_worker, manager.draft_worker):
        if (lifecycle := lifecycle_of(runner.model)) is not None:
            yield role, lifecycle


EXIT_TIMEOUT_S = 10.0
"""Maximum seconds that readers have to finish once the server stops its schedulers. It kills them
after 15.
"""
STEP_ATTRIBUTE = "rfork_step"
"""Attribute of a batch and of its result: the number of its step."""


@cache
def install() -> Compatibility:
    """Install the hooks that this SGLang has in this process, unless it cannot be forked at all. Idempotent.

    A weight cache daemon needs none: it has no scheduler and never changes its weights.
    """
    if weight_cache.holder_id() is not None:
        return Compatibility.of([hook_target for hook_target in compat.scheduling() if hook_target.tier == "core"])
    compatibility = compat.find_compatibility()
    if compatibility.core:
        return compatibility
    updates = WeightUpdateHooks()
    for request in compat.FULL_REQUESTS:
        compat.hook(request, updates.full_request, stop_seeding)
    for request in compat.STEP_REQUESTS:
        compat.hook(request, updates.request, stop_seeding)
    for path, wrapper in (
        (compat.FROM_DISK, updates.from_disk),
        (compat.FROM_IPC, updates.from_ipc),
        (compat.FROM_TENSOR, updates.within),
        (compat.first_of(*compat.FROM_DISTRIBUTED), updates.within),
        (compat.BEGIN_UPDATE, updates.begin),
        (compat.END_UPDATE, updates.end),
        (compat.CHECK_WEIGHTS, call_before(updates.check)),
        (compat.RELEASE_MEMORY, updates.release),
        (compat.RESUME_MEMORY, call_after(updates.resume)),
        (compat.RUN_LOOP, call_before(_on_ready)),
        (compat.RELEASE_HOST, call_before(_on_exit)),
    ):
        compat.hook(path, wrapper, stop_seeding)
    # These two only measure: without them the weights may still be served.
    compat.hook(compat.RUN_BATCH, _run_batch)
    compat.hook(compat.PROCESS_RESULT, _process_result)
    return compatibility


def _run_batch(run: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
    """Begin the step of a batch. SGLang launches its kernels here and waits for them when it processes the result.

    The last of several launches of a split prefill is processed, concurrently with decode steps, and a prebuilt
    batch launches nothing: neither is a step.
    """
    served = served_model(scheduler.tp_worker.model_runner.model)
    if served is None or batch.forward_mode.is_prebuilt() or batch.forward_mode.is_split_prefill():
        return run(scheduler, batch, *args, **kwargs)
    step = served.steps.begin()
    try:
        result = run(scheduler, batch, *args, **kwargs)
    except BaseException:
        served.steps.cancel(step)
        raise
    # In overlap mode the batch is copied, and with pipeline stages the result is replaced: one of them remains.
    setattr(result, STEP_ATTRIBUTE, step)
    setattr(batch, STEP_ATTRIBUTE, step)
    return result


def _process_result(
    process: Callable[..., Any], scheduler: Scheduler, batch: ScheduleBatch, result: Any, *args: Any, **kwargs: Any
) -> Any:
    """End the step of a batch. Only decode steps count, because they are comparable units of work.

    The other steps end too, because a decode step that follows begins when they have ended.
    """
    step = getattr(result, STEP_ATTRIBUTE, getattr(batch, STEP_ATTRIBUTE, None))
    served = served_model(scheduler.tp_worker.model_runner.model)
    if served is None or step is None:
        return process(scheduler, batch, result, *args, **kwargs)
    counted = batch.forward_mode.is_decode() or _never_decodes(scheduler)
    event = getattr(result, "copy_done", None)
    if event is not None:
        # SGLang does this first. No graph is captured meanwhile: this thread captures them.
        event.synchronize()
        served.steps.end(step, counted=counted)
        return process(scheduler, batch, result, *args, **kwargs)
    try:
        return process(scheduler, batch, result, *args, **kwargs)  # waits for the device
    finally:
        served.steps.end(step, counted=counted)


def _on_ready(scheduler: Scheduler, *args: object, **kwargs: object) -> None:
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


def _on_exit(scheduler: Scheduler, *args: object, **kwargs: object) -> None:
    """Close the served models. The server has finished its requests and exits."""
    for _, model in _runners(scheduler):
        served = served_model(model)
        if served is not None:
            served.close(min(served.seed.settings.drain_timeout_s, EXIT_TIMEOUT_S))


def _never_decodes(scheduler: Scheduler) -> bool:
    return not scheduler.is_generation or scheduler.disaggregation_mode.value == "prefill"


def _runners(scheduler: Scheduler) -> Iterator[tuple[str, nn.Module]]:
    found = compat.runners(scheduler.tp_worker, scheduler.draft_worker)
    yield from ((role, runner.model) for role, runner in found)

"""Where one of SGLang's schedulers changes weights, or puts them away: when the instance may be given again.

Runs on the source: in a scheduler process that loads its models by load format ``rfork``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from rfork.engine_command import LOAD_FORMAT
from rfork.engines.served_model import ServedModel, served_model
from rfork.engines.version_selection import CurrentVersion, version_of_reload
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.storage.versions.version import checked_version

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
    from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

log = logger(__name__)

WRITTEN = "Failed to update weights"
"""How SGLang begins to tell that an update from disk failed once weights were written."""

NO_VERSION = "default"
"""SGLang's weight version where nobody named one."""
DUMMY = "dummy"
"""SGLang's load format that reads no files."""

Updated = tuple[bool, str]
Tag = str


class WeightUpdateHooks:
    """The ways by which a process's weights are changed in place, and what became of each instance's."""

    def __init__(self) -> None:
        self._lost: WeakSet[ServedModel] = WeakSet()
        """Their weights may be anything, until an update of theirs succeeds."""
        self._open: WeakSet[ServedModel] = WeakSet()
        """Between `begin` and `end`."""
        self._failed: WeakSet[ServedModel] = WeakSet()
        """A step since `begin` failed."""
        self._released: WeakSet[ServedModel] = WeakSet()
        """Their memory is released."""
        self._changed: WeakKeyDictionary[ServedModel, str | None] = WeakKeyDictionary()
        """Weights that were updated since they were served last, with their version where it is known."""
        self._steps: WeakKeyDictionary[ServedModel, str | None] = WeakKeyDictionary()
        """Between `begin` and `end`: the version that the steps named."""
        self._requested: str | None = None
        """The version that the request under way names its weights by."""

    def request(self, update: Callable[..., Any], manager: SchedulerWeightUpdaterManager, recv_req: Any) -> Any:
        """One of SGLang's requests to update weights; all ranks of the server get it."""
        self._requested = _new_version(recv_req)
        try:
            return update(manager, recv_req)
        finally:
            self._requested = None

    def _requested_version(self) -> str | None:
        return self._requested

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
        load_format_used = "auto" if load_format == LOAD_FORMAT else load_format
        filtered = bool(more) or named.get("weight_name_filter") is not None
        version: CurrentVersion = self._requested_version
        if self._requested is None and load_format_used != DUMMY and not filtered:
            version = version_of_reload(model_path, _revision(runner))
        return self._full_update(
            runner, lambda: update(runner, model_path, load_format_used, *more, **named), version=version
        )

    def from_ipc(self, update: Callable[..., Updated], runner: WeightUpdater, recv_req: object) -> Updated:
        """All weights at once, by another process of the host; told to fail, some may be written."""
        return self._full_update(
            runner, lambda: update(runner, recv_req), version=self._requested_version, untouched=False
        )

    def begin(self, begin: Callable[..., None], runner: WeightUpdater) -> None:
        """From here to `end`, weights are written in any number of steps."""
        instance = served_model(runner.get_model())
        if instance is not None:
            instance.begin_update()
        try:
            begin(runner)
        except BaseException:
            self._mark_lost(instance)
            raise
        if instance is not None:
            self._failed.discard(instance)
            self._open.add(instance)
            self._steps[instance] = None

    def within(self, update: Callable[..., Updated], runner: WeightUpdater, *more: object, **named: object) -> Updated:
        """One of the steps."""
        instance = served_model(runner.get_model())
        try:
            done = update(runner, *more, **named)
        except BaseException:
            self._mark_lost(instance)
            raise
        if not done[0]:
            self._mark_lost(instance)
        elif instance is not None and self._requested is not None:
            self._steps[instance] = self._requested
        return done

    def end(self, end: Callable[..., None], runner: WeightUpdater, **named: object) -> None:
        """The weights are whole, unless a step failed."""
        instance = served_model(runner.get_model())
        if instance is not None:
            self._open.discard(instance)
        try:
            end(runner, **named)
        except BaseException:
            self._mark_lost(instance)
            raise
        if instance is not None and instance not in self._failed:
            self._updated(instance, self._steps.pop(instance, None))

    def release(self, release: Callable[..., Any], manager: SchedulerWeightUpdaterManager, recv_req: Any) -> Any:
        """The memory is about to go; it has to be let go of first."""
        instances = [instance for _, instance in _instances(manager)] if _of_weights(recv_req.tags) else []
        for instance in instances:
            instance.suspend()
            self._released.add(instance)
        try:
            return release(manager, recv_req)
        except BaseException:
            for instance in instances:
                self._released.discard(instance)
                self._publish(instance)
            raise

    def resume(self, _: object, manager: SchedulerWeightUpdaterManager, recv_req: Any) -> None:
        """The memory is back; what lay in it is, too, only where SGLang kept a copy."""
        if not _of_weights(recv_req.tags):
            return
        from sglang.srt.runtime_context import get_exec

        features = get_exec().features
        kept = features.enable_weights_cpu_backup or not features.enable_memory_saver
        for role, instance in _instances(manager):
            if instance not in self._released:
                continue
            self._released.discard(instance)
            if kept or (role != "main" and features.enable_draft_weights_cpu_backup):
                self._publish(instance)
            else:
                self._lost.add(instance)
                log.info("not a seed until the next update of the weights: they were released without a copy")

    def _full_update(
        self,
        runner: WeightUpdater,
        update: Callable[[], Updated],
        *,
        version: CurrentVersion,
        untouched: bool = True,
    ) -> Updated:
        """One update that is complete in itself; `untouched`: what fails mostly fails before it writes.

        `version` names the weights that come of it.
        """
        instance = served_model(runner.get_model())
        if instance is not None:
            instance.begin_update()
        try:
            done = update()
        except BaseException:
            self._mark_lost(instance)
            raise
        if instance is None:
            return done
        if done[0]:
            self._updated(instance, version())
        elif untouched and not done[1].startswith(WRITTEN):
            self._publish(instance)  # what was given before, if it was
        else:
            self._mark_lost(instance)
        return done

    def _updated(self, instance: ServedModel, version: str | None = None) -> None:
        """All of its weights are there, and others than before."""
        self._lost.discard(instance)
        self._changed[instance] = version
        self._publish(instance)

    def _publish(self, instance: ServedModel) -> None:
        """Serve the weights, unless something speaks against it until a later call."""
        if any(instance in against for against in (self._lost, self._open, self._released)):
            return
        updated = instance in self._changed
        instance.renew(updated=updated, version=self._changed.pop(instance, None))

    def _mark_lost(self, instance: ServedModel | None) -> None:
        if instance is None:
            return
        self._failed.add(instance)
        if instance not in self._lost:
            self._lost.add(instance)
            log.error("not a seed until the next update of the weights: one failed half way")


def _new_version(recv_req: Any) -> str | None:
    """Return the weight version that a request brings; None where it brings none, or that of before."""
    from sglang.srt.runtime_context import get_serving

    version: str | None = getattr(recv_req, "weight_version", None)
    if version in (None, NO_VERSION, get_serving().weight_version):
        return None
    try:
        return checked_version(str(version))
    except SettingsError as error:
        log.warning("the weight version cannot name the new weights", because=str(error))
        return None


def _revision(runner: WeightUpdater) -> str | None:
    """Return the revision that SGLang takes of a hub id, also of one that it was not started with."""
    revision: str | None = getattr(getattr(runner, "model_config", None), "revision", None)
    return revision


def _of_weights(tags: list[Tag] | None) -> bool:
    from sglang.srt.constants import GPU_MEMORY_TYPE_WEIGHTS

    return not tags or GPU_MEMORY_TYPE_WEIGHTS in tags


def _instances(manager: SchedulerWeightUpdaterManager) -> Iterator[tuple[str, ServedModel]]:
    for role, runner in manager._select_runners():
        if (instance := served_model(runner.model)) is not None:
            yield role, instance

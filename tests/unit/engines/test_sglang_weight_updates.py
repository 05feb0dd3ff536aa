"""Calls of served models during weight updates of an SGLang server, with fakes in place of SGLang."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import save_file

from rfork.engines.served_model import ServedModel
from rfork.engines.sglang import compat, hooks
from rfork.engines.sglang.hooks import WeightUpdateHooks
from rfork.engines.weight_lifecycle import WeightLifecycle
from rfork.storage.versions.version import version_of


@dataclass(eq=False)
class RecordingInstance:
    """Records the calls made on a served model."""

    calls: list[str] = field(default_factory=list)

    def suspend(self) -> None:
        """Record the call."""
        self.calls.append("suspend")

    def fence(self) -> None:
        """Record the call."""
        self.calls.append("fence")

    def begin_update(self) -> None:
        """Record the call."""
        self.calls.append("update")

    def count_update(self) -> None:
        """Record the call."""
        self.calls.append("count")

    def renew(self, *, updated: bool, version: str | None) -> None:
        """Record the call."""
        self.calls.append("renew" if not updated else f"renew {version or 'updated'}")

    @property
    def renewals(self) -> int:
        """Return the number of renewals."""
        return sum(call.startswith("renew") for call in self.calls)


@dataclass(frozen=True)
class Runner:
    """The part of SGLang's weight updater that is used here."""

    model: RecordingInstance | None

    def get_model(self) -> RecordingInstance | None:
        """Return the model, which is its own served model here."""
        return self.model


def manager_of(instance: RecordingInstance) -> SimpleNamespace:
    """Return SGLang's manager of weight updates, as since 0.5.21."""
    runners = [("target", SimpleNamespace(model=instance))]
    return SimpleNamespace(tp_worker=SimpleNamespace(weight_update_runners=lambda: runners), draft_worker=None)


@pytest.fixture
def instance(monkeypatch: pytest.MonkeyPatch) -> RecordingInstance:
    """The served model of the runner."""
    served = RecordingInstance()
    lifecycle = WeightLifecycle(cast(ServedModel, served))
    monkeypatch.setattr(hooks, "lifecycle_of", lambda model: lifecycle if model is not None else None)
    return served


def update_returning(done: bool, message: str = "") -> Callable[..., tuple[bool, str]]:
    """Return an SGLang update with this result."""
    return lambda *_, **__: (done, message)


def successful_step(*_: object, **__: object) -> None:
    """Return a successful step."""


def failing_update(*_: object, **__: object) -> tuple[bool, str]:
    """Return an update that raises."""
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (update_returning(True), ["update", "renew updated"]),
        (update_returning(False, "Failed to get weights iterator: no such folder."), ["update", "renew"]),
        (
            update_returning(False, "Failed to update weights: shape. Rolling back to original weights."),
            ["update"],
        ),
    ],
)
def test_only_a_partial_update_from_disk_stops_serving(
    update: Callable[..., tuple[bool, str]], expected: list[str], instance: RecordingInstance
) -> None:
    """Weights are served again after an update and after a failure that wrote nothing, but not after a partial one."""
    WeightUpdateHooks().from_disk(update, Runner(instance), "folder", "auto")
    assert expected == instance.calls


def test_the_rfork_load_format_reads_files_as_auto(instance: RecordingInstance) -> None:
    """If SGLang passes the server's own load format, files are read as ``auto``; other formats are kept."""
    formats: list[str] = []

    def update(runner: Runner, path: str, load_format: str, **more: bool) -> tuple[bool, str]:
        formats.append(load_format)
        return True, ""

    for requested_format in ("rfork", "safetensors"):
        WeightUpdateHooks().from_disk(update, Runner(instance), "folder", requested_format, recapture_cuda_graph=True)
    assert ["auto", "safetensors"] == formats


def test_a_failed_step_invalidates_the_complete_update(instance: RecordingInstance) -> None:
    """A failed step leaves partial weights; the next complete update makes them valid again."""
    updates, runner = WeightUpdateHooks(), Runner(instance)
    updates.begin(successful_step, runner)
    assert (True, "") == updates.within(update_returning(True), runner)
    assert (False, "half") == updates.within(update_returning(False, "half"), runner)
    updates.end(successful_step, runner, run_post_load=False)
    assert ["update"] == instance.calls
    updates.begin(successful_step, runner)
    updates.within(update_returning(True), runner)
    updates.end(successful_step, runner, run_post_load=False)
    assert ["update", "update", "renew updated"] == instance.calls


@pytest.mark.parametrize(
    "update",
    [
        lambda updates, runner: updates.within(failing_update, runner),
        lambda updates, runner: updates.end(failing_update, runner),
        lambda updates, runner: updates.from_ipc(failing_update, runner, "request"),
    ],
    ids=["a step", "end of the update", "ipc"],
)
def test_exceptions_invalidate_the_update(
    update: Callable[[WeightUpdateHooks, Runner], None], instance: RecordingInstance
) -> None:
    """Exceptions of SGLang reach its caller, and the weights are not served."""
    updates, runner = WeightUpdateHooks(), Runner(instance)
    updates.begin(successful_step, runner)
    with pytest.raises(RuntimeError, match="out of memory"):
        update(updates, runner)
    assert 0 == instance.renewals


def test_an_unserved_model_is_not_affected(instance: RecordingInstance) -> None:
    """Updates of a model that rfork did not load run unchanged."""
    runner = Runner(None)
    assert (True, "") == WeightUpdateHooks().from_disk(update_returning(True), runner, "folder", "auto")
    assert (False, "x") == WeightUpdateHooks().within(update_returning(False, "x"), runner)
    assert [] == instance.calls


def test_a_step_outside_an_update_ends_serving_until_a_complete_update(instance: RecordingInstance) -> None:
    """Before 0.5.21, updates from tensors have no end, so the weights may be a mix of versions."""
    updates, runner = WeightUpdateHooks(), Runner(instance)
    assert (True, "") == updates.within(update_returning(True), runner)
    assert ["fence"] == instance.calls
    updates.from_disk(EARLY_FAILURE, runner, "folder", "auto")
    assert 0 == instance.renewals
    updates.from_disk(update_returning(True), runner, "folder", "auto")
    assert 1 == instance.renewals


@pytest.mark.parametrize(("action", "expected"), [("reset_tensors", ["fence"]), ("checksum", []), ("snapshot", [])])
def test_a_check_that_overwrites_the_weights_ends_serving(
    action: str, expected: list[str], instance: RecordingInstance
) -> None:
    """SGLang's weight checker can fill the weights with random values; its other actions only read them."""
    WeightUpdateHooks().check(manager_of(instance), SimpleNamespace(action=action))
    assert expected == instance.calls


def test_hooks_pass_arguments_that_they_do_not_know(instance: RecordingInstance) -> None:
    """A later SGLang may call its methods with more arguments."""
    received: list[tuple[object, ...]] = []

    def record(*args: object, **kwargs: object) -> tuple[bool, str]:
        received.append((*args[1:], *kwargs.items()))
        return True, ""

    updates, runner = WeightUpdateHooks(), Runner(instance)
    updates.from_ipc(record, runner, "request", "new", flag=1)
    updates.begin(record, runner, "new", flag=1)
    updates.within(record, runner, "tensors", "new", flag=1)
    updates.end(record, runner, "new", flag=1)
    assert [
        ("request", "new", ("flag", 1)),
        ("new", ("flag", 1)),
        ("tensors", "new", ("flag", 1)),
        ("new", ("flag", 1)),
    ] == received


PARTIAL_FAILURE = update_returning(False, "Failed to update weights: shape. Rolling back to original weights.")
EARLY_FAILURE = update_returning(False, "Failed to get weights iterator: no such folder.")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (PARTIAL_FAILURE, EARLY_FAILURE, ["update", "update", "update", "renew updated"]),
        (EARLY_FAILURE, PARTIAL_FAILURE, ["update", "renew", "update", "update", "renew updated"]),
        (EARLY_FAILURE, EARLY_FAILURE, ["update", "renew", "update", "renew", "update", "renew updated"]),
    ],
)
def test_weights_are_invalid_until_an_update_succeeds(
    first: Callable[..., tuple[bool, str]],
    second: Callable[..., tuple[bool, str]],
    expected: list[str],
    instance: RecordingInstance,
) -> None:
    """After a partial update, weights stay invalid until an update succeeds."""
    updates, runner = WeightUpdateHooks(), Runner(instance)
    for update in (first, second, update_returning(True)):
        updates.from_disk(update, runner, "folder", "auto")
    assert expected == instance.calls


def test_an_incomplete_update_does_not_make_weights_valid(instance: RecordingInstance) -> None:
    """Neither an update that fails before writing nor one that has only begun makes them valid."""
    updates, runner = WeightUpdateHooks(), Runner(instance)
    updates.begin(successful_step, runner)
    updates.within(update_returning(False, "half"), runner)
    updates.end(successful_step, runner)
    updates.begin(successful_step, runner)
    updates.from_disk(EARLY_FAILURE, runner, "folder", "auto")
    assert 0 == instance.renewals


def test_a_failed_update_between_steps_does_not_resume_serving(instance: RecordingInstance) -> None:
    """While steps are written, an update that fails early does not make the weights served."""
    updates, runner = WeightUpdateHooks(), Runner(instance)
    updates.begin(successful_step, runner)
    updates.within(update_returning(True), runner)
    updates.from_disk(EARLY_FAILURE, runner, "folder", "auto")
    assert 0 == instance.renewals
    updates.end(successful_step, runner)
    assert 1 == instance.renewals


def release_and_resume(
    updates: WeightUpdateHooks,
    instance: RecordingInstance,
    monkeypatch: pytest.MonkeyPatch,
    *,
    copy: bool,
    update: Callable[..., tuple[bool, str]] = EARLY_FAILURE,
) -> None:
    """Release the memory of the weights and resume it, optionally with an update in between."""
    options = {
        "enable_memory_saver": True,
        "enable_weights_cpu_backup": copy,
        "enable_draft_weights_cpu_backup": False,
    }
    monkeypatch.setattr(compat, "option", options.__getitem__)
    module = ModuleType("sglang.srt.constants")
    module.__dict__["GPU_MEMORY_TYPE_WEIGHTS"] = "weights"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    manager = manager_of(instance)
    request = SimpleNamespace(tags=None)
    updates.release(successful_step, manager, request)
    updates.from_disk(update, Runner(instance), "folder", "auto")
    updates.resume(None, manager, request)


@pytest.mark.parametrize(("copy", "expected"), [(False, 0), (True, 2)])
def test_memory_without_a_backup_is_lost(
    copy: bool, expected: int, instance: RecordingInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uninitialised memory is served only after a complete update, not after one that failed early."""
    updates = WeightUpdateHooks()
    release_and_resume(updates, instance, monkeypatch, copy=copy)
    updates.from_disk(EARLY_FAILURE, Runner(instance), "folder", "auto")
    assert expected == instance.renewals
    updates.from_disk(update_returning(True), Runner(instance), "folder", "auto")
    assert expected + 1 == instance.renewals


def test_an_update_while_memory_is_released_names_the_weights_after_the_resume(
    instance: RecordingInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights served after the resume are those of the update."""
    updates = WeightUpdateHooks()
    release_and_resume(updates, instance, monkeypatch, copy=True, update=update_returning(True))
    assert ["suspend", "update", "renew updated"] == instance.calls


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The scheduler's own settings: ``serving.weight_version`` is the previous version."""
    serving_args = SimpleNamespace(weight_version="default")
    monkeypatch.setattr(compat, "option", lambda name, default: getattr(serving_args, name))
    return serving_args


def request(updates: WeightUpdateHooks, weight_version: str | None, work: Callable[[], object]) -> None:
    """Let SGLang handle a request that names the new weights."""

    def update(*_: object) -> SimpleNamespace:
        work()
        return SimpleNamespace(success=True)

    updates.request(update, None, SimpleNamespace(weight_version=weight_version))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint folder."""
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    save_file({"weight": torch.zeros(4)}, model_dir / "model.safetensors")
    return model_dir


def test_an_update_from_disk_has_the_version_of_its_files(
    instance: RecordingInstance, folder: Path, serving: SimpleNamespace
) -> None:
    """It equals the version of a server started on that folder."""
    updates, runner = WeightUpdateHooks(), Runner(instance)
    request(updates, None, lambda: updates.from_disk(update_returning(True), runner, str(folder), "auto"))
    assert ["update", f"renew {version_of(folder)}"] == instance.calls


@pytest.mark.parametrize(("load_format", "named"), [("dummy", {}), ("auto", {"weight_name_filter": str.isupper})])
def test_an_update_not_read_from_complete_files_has_no_file_version(
    load_format: str, named: dict[str, object], instance: RecordingInstance, folder: Path
) -> None:
    """SGLang reads no files, or only some tensors."""
    WeightUpdateHooks().from_disk(update_returning(True), Runner(instance), str(folder), load_format, **named)
    assert ["update", "renew updated"] == instance.calls


def test_an_update_from_changing_files_has_no_file_version(instance: RecordingInstance, folder: Path) -> None:
    """It is unknown which files were read."""

    def update(*_: object, **__: object) -> tuple[bool, str]:
        save_file({"weight": torch.ones(4)}, folder / "model.safetensors")
        return True, ""

    WeightUpdateHooks().from_disk(update, Runner(instance), str(folder), "auto")
    assert ["update", "renew updated"] == instance.calls


def test_the_weight_version_of_the_request_names_the_new_weights(
    instance: RecordingInstance, folder: Path, serving: SimpleNamespace
) -> None:
    """It takes precedence over the version of the files."""
    updates, runner = WeightUpdateHooks(), Runner(instance)
    request(updates, "step-5", lambda: updates.from_disk(update_returning(True), runner, str(folder), "auto"))
    request(updates, "step-6", lambda: updates.from_ipc(update_returning(True), runner, "request"))
    updates.from_ipc(update_returning(True), runner, "request")
    assert ["update", "renew step-5", "update", "renew step-6", "update", "renew updated"] == instance.calls


@pytest.mark.parametrize(
    ("work", "expected"),
    [(lambda update: None, ["count"]), (lambda update: update(), ["update", "renew updated"])],
    ids=["skipped", "updated"],
)
def test_each_request_counts_once_for_each_model(
    work: Callable[[Callable[[], object]], object],
    expected: list[str],
    instance: RecordingInstance,
    serving: SimpleNamespace,
    folder: Path,
) -> None:
    """SGLang skips a draft model on the ranks where the main model's update failed: its count must not fall behind."""
    updates, runner = WeightUpdateHooks(), Runner(instance)

    def update(*_: object) -> SimpleNamespace:
        work(lambda: updates.from_disk(update_returning(True), runner, str(folder), "dummy"))
        return SimpleNamespace(success=True)

    for _ in range(2):
        updates.full_request(update, manager_of(instance), SimpleNamespace(weight_version=None))
    assert 2 * expected == instance.calls


@pytest.mark.parametrize("version", [None, "default", "step-4", "two\nlines", "x" * 300])
def test_an_uninformative_weight_version_names_nothing(
    version: str | None, instance: RecordingInstance, serving: SimpleNamespace
) -> None:
    """These are none, SGLang's default, the previous version, and invalid text."""
    serving.weight_version = "step-4"
    updates, runner = WeightUpdateHooks(), Runner(instance)
    request(updates, version, lambda: updates.from_ipc(update_returning(True), runner, "request"))
    assert ["update", "renew updated"] == instance.calls


def test_a_repeated_weight_version_names_nothing(instance: RecordingInstance, serving: SimpleNamespace) -> None:
    """Before 0.5.19, SGLang's schedulers do not record the version of an update."""
    updates, runner = WeightUpdateHooks(), Runner(instance)
    for _ in range(2):
        request(updates, "step-5", lambda: updates.from_ipc(update_returning(True), runner, "request"))
    assert ["update", "renew step-5", "update", "renew updated"] == instance.calls


def test_the_weight_version_of_a_step_names_the_update(instance: RecordingInstance, serving: SimpleNamespace) -> None:
    """SGLang has adopted it by the second step; the next update has its own version."""
    updates, runner = WeightUpdateHooks(), Runner(instance)
    updates.begin(successful_step, runner)
    for _ in range(2):
        request(updates, "step-5", lambda: updates.within(update_returning(True), runner))
        serving.weight_version = "step-5"
    updates.end(successful_step, runner)
    updates.begin(successful_step, runner)
    request(updates, "step-5", lambda: updates.within(update_returning(True), runner))
    updates.end(successful_step, runner)
    assert ["update", "renew step-5", "update", "renew updated"] == instance.calls

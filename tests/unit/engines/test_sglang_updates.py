"""What instances are told of updates of an SGLang server's weights, with fakes in SGLang's place."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from rfork.engines.instance import Instance
from rfork.engines.sglang import updating
from rfork.engines.sglang.updating import Updates
from rfork.wire import Rank


@dataclass(eq=False)
class Told:
    """An instance that writes down what it is told."""

    calls: list[str] = field(default_factory=list)
    rank: Rank = field(default_factory=Rank)

    @property
    def seed(self) -> Told:
        """Itself."""
        return self

    @property
    def identity(self) -> Told:
        """Itself."""
        return self

    def suspend(self) -> None:
        """Told."""
        self.calls.append("suspend")

    def fence(self) -> None:
        """Told."""
        self.calls.append("fence")

    def renew(self) -> None:
        """Told."""
        self.calls.append("renew")


@dataclass(frozen=True)
class Runner:
    """SGLang's weight updater, as far as it is asked."""

    model: Told | None

    def get_model(self) -> Told | None:
        """The model, which is its instance here."""
        return self.model


@pytest.fixture
def instance(monkeypatch: pytest.MonkeyPatch) -> Told:
    """The instance of the runner's model."""
    monkeypatch.setattr(updating, "instance_of", lambda model: cast(Instance, model))
    return Told()


def answering(done: bool, message: str = "") -> Callable[..., tuple[bool, str]]:
    """An update of SGLang's that ends so."""
    return lambda *_, **__: (done, message)


def nothing(*_: object, **__: object) -> None:
    """A step of SGLang's that ends well."""


def failing(*_: object, **__: object) -> tuple[bool, str]:
    """An update of SGLang's that raises."""
    raise RuntimeError("out of memory")


@pytest.mark.parametrize(
    ("update", "expected"),
    [
        (answering(True), ["fence", "renew"]),
        (answering(False, "Failed to get weights iterator: no such folder."), ["fence", "renew"]),
        (answering(False, "Failed to update weights: shape. Rolling back to original weights."), ["fence"]),
    ],
)
def test_weights_from_disk(
    update: Callable[..., tuple[bool, str]], expected: list[str], instance: Told
) -> None:
    """Weights are given again after an update, and after one that wrote none; not after one half way."""
    Updates().from_disk(update, Runner(instance), "folder", "auto")
    assert expected == instance.calls


def test_own_load_format_reads_files(instance: Told) -> None:
    """An update for which SGLang names the server's own load format is read by ``auto``; others as named."""
    formats: list[str] = []

    def update(runner: Runner, path: str, load_format: str, **more: bool) -> tuple[bool, str]:
        formats.append(load_format)
        return True, ""

    for given in ("rfork", "safetensors"):
        Updates().from_disk(update, Runner(instance), "folder", given, recapture_cuda_graph=True)
    assert ["auto", "safetensors"] == formats


def test_a_failed_step_spoils_the_whole_update(instance: Told) -> None:
    """Of an update in steps, one that fails leaves the weights half way; the next update makes them whole."""
    updates, runner = Updates(), Runner(instance)
    updates.begin(nothing, runner)
    assert (True, "") == updates.within(answering(True), runner)
    assert (False, "half") == updates.within(answering(False, "half"), runner)
    updates.end(nothing, runner, run_post_load=False)
    assert ["fence"] == instance.calls
    updates.begin(nothing, runner)
    updates.within(answering(True), runner)
    updates.end(nothing, runner, run_post_load=False)
    assert ["fence", "fence", "renew"] == instance.calls


@pytest.mark.parametrize(
    "update",
    [
        lambda updates, runner: updates.within(failing, runner),
        lambda updates, runner: updates.end(failing, runner),
        lambda updates, runner: updates.from_ipc(failing, runner, "request"),
    ],
    ids=["a step", "the end", "ipc"],
)
def test_what_raises_spoils_it_too(update: Callable[[Updates, Runner], None], instance: Told) -> None:
    """Whatever SGLang raises goes on to who asked, and the weights are not given."""
    updates, runner = Updates(), Runner(instance)
    updates.begin(nothing, runner)
    with pytest.raises(RuntimeError, match="out of memory"):
        update(updates, runner)
    assert "renew" not in instance.calls


def test_a_model_that_is_no_instance_is_left_alone(instance: Told) -> None:
    """Updates of a model that rfork did not load go on as without it."""
    runner = Runner(None)
    assert (True, "") == Updates().from_disk(answering(True), runner, "folder", "auto")
    assert (False, "x") == Updates().within(answering(False, "x"), runner)
    assert [] == instance.calls


HALF_WAY = answering(False, "Failed to update weights: shape. Rolling back to original weights.")
EARLY = answering(False, "Failed to get weights iterator: no such folder.")


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (HALF_WAY, EARLY, ["fence", "fence", "fence", "renew"]),
        (EARLY, HALF_WAY, ["fence", "renew", "fence", "fence", "renew"]),
        (EARLY, EARLY, ["fence", "renew", "fence", "renew", "fence", "renew"]),
    ],
)
def test_two_failures_and_an_update(
    first: Callable[..., tuple[bool, str]],
    second: Callable[..., tuple[bool, str]],
    expected: list[str],
    instance: Told,
) -> None:
    """What one that failed half way has spoilt, one that failed early leaves spoilt; success mends it."""
    updates, runner = Updates(), Runner(instance)
    for update in (first, second, answering(True)):
        updates.from_disk(update, runner, "folder", "auto")
    assert expected == instance.calls


def test_a_failed_step_and_an_update_that_fails_early(instance: Told) -> None:
    """Neither an update that fails before it writes, nor one that is only begun, makes them whole."""
    updates, runner = Updates(), Runner(instance)
    updates.begin(nothing, runner)
    updates.within(answering(False, "half"), runner)
    updates.end(nothing, runner)
    updates.begin(nothing, runner)
    updates.from_disk(EARLY, runner, "folder", "auto")
    assert "renew" not in instance.calls


def test_an_update_from_disk_between_steps(instance: Told) -> None:
    """While steps are written, an update that fails early does not have them given."""
    updates, runner = Updates(), Runner(instance)
    updates.begin(nothing, runner)
    updates.within(answering(True), runner)
    updates.from_disk(EARLY, runner, "folder", "auto")
    assert "renew" not in instance.calls
    updates.end(nothing, runner)
    assert 1 == instance.calls.count("renew")


def put_away(updates: Updates, instance: Told, monkeypatch: pytest.MonkeyPatch, *, copy: bool) -> None:
    """Release the memory of its weights, and take it back."""
    told = SimpleNamespace(
        enable_memory_saver=True, enable_weights_cpu_backup=copy, enable_draft_weights_cpu_backup=False
    )
    for name, content in (
        ("sglang.srt.constants", {"GPU_MEMORY_TYPE_WEIGHTS": "weights"}),
        ("sglang.srt.runtime_context", {"get_exec": lambda: SimpleNamespace(features=told)}),
    ):
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    manager = SimpleNamespace(_select_runners=lambda: [("target", SimpleNamespace(model=instance))])
    request = SimpleNamespace(tags=None)
    updates.release(nothing, manager, request)
    updates.from_disk(EARLY, Runner(instance), "folder", "auto")
    updates.resume(None, manager, request)


@pytest.mark.parametrize(("copy", "expected"), [(False, 0), (True, 2)])
def test_memory_without_a_copy_is_lost(
    copy: bool, expected: int, instance: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What came back uninitialised is not given after an update that failed early, only after a whole one."""
    updates = Updates()
    put_away(updates, instance, monkeypatch, copy=copy)
    updates.from_disk(EARLY, Runner(instance), "folder", "auto")
    assert expected == instance.calls.count("renew")
    updates.from_disk(answering(True), Runner(instance), "folder", "auto")
    assert expected + 1 == instance.calls.count("renew")


def test_a_rank_of_several_is_no_seed_after_an_update(
    instance: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks are forked one by one, and would be of two generations; unchanged ones are given."""
    instance.rank = Rank(tp=1, tp_size=2)
    updates = Updates()
    put_away(updates, instance, monkeypatch, copy=True)
    updates.from_disk(EARLY, Runner(instance), "folder", "auto")
    assert 2 == instance.calls.count("renew")
    updates.from_disk(answering(True), Runner(instance), "folder", "auto")
    put_away(updates, instance, monkeypatch, copy=True)
    assert 2 == instance.calls.count("renew")

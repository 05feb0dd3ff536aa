"""What instances are told of updates of an SGLang server's weights, with fakes in SGLang's place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from rfork.engines.instance import Instance
from rfork.engines.sglang import hooks, ranks
from rfork.engines.sglang.hooks import Updates


@dataclass(eq=False)
class Told:
    """An instance that writes down what it is told."""

    calls: list[str] = field(default_factory=list)

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
    monkeypatch.setattr(hooks, "instance_of", lambda model: cast(Instance, model))
    return Told()


def answering(done: bool, message: str = "") -> Callable[..., tuple[bool, str]]:
    """An update of SGLang's that ends so."""
    return lambda *_, **__: (done, message)


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
    updates.begin(runner)
    assert (True, "") == updates.within(answering(True), runner)
    assert (False, "half") == updates.within(answering(False, "half"), runner)
    updates.end(lambda *_, **__: None, runner, run_post_load=False)
    assert ["fence"] == instance.calls
    updates.begin(runner)
    updates.within(answering(True), runner)
    updates.end(lambda *_, **__: None, runner, run_post_load=False)
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
    updates.begin(runner)
    with pytest.raises(RuntimeError, match="out of memory"):
        update(updates, runner)
    assert "renew" not in instance.calls


def test_a_model_that_is_no_instance_is_left_alone(instance: Told) -> None:
    """Updates of a model that rfork did not load go on as without it."""
    runner = Runner(None)
    assert (True, "") == Updates().from_disk(answering(True), runner, "folder", "auto")
    assert (False, "x") == Updates().within(answering(False, "x"), runner)
    assert [] == instance.calls


@pytest.mark.parametrize(
    ("path", "revision", "expected"),
    [
        ("org/model", None, "org/model"),
        ("org/model", "v2", "org/model@v2"),
        ("/cache/models--org--model/snapshots/0a1b", None, "org/model@0a1b"),
        ("{folder}/tiny", None, "tiny"),
        ("{folder}/tiny/", None, "tiny"),
    ],
)
def test_a_model_is_called_as_its_hub_or_folder(
    path: str, revision: str | None, expected: str, tmp_path: Path
) -> None:
    """Seeds and forks meet under the hub's name and revision, or the last part of a folder's path."""
    (tmp_path / "tiny").mkdir()
    assert expected == ranks.model_name(path.format(folder=tmp_path), revision)

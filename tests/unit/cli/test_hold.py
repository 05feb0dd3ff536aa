"""`rfork hold`: its options, and their errors."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from rfork.cli import hold
from rfork.cli.app import app
from rfork.errors import SettingsError
from rfork.schema import ImageSelector
from rfork.transport.shared_memory import memory_budget

PLANNER = ("--planner", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--one-shot",), "--one-shot requires --models"),
        (("--memory", "lots"), "--memory: 'lots' is not a size"),
        (("--memory", "0%"), "--memory: '0%' is not a part of the memory"),
        (("--memory", "101%"), "--memory: '101%' is not a part of the memory"),
        (("--memory", "x%"), "--memory: 'x%' is not a part of the memory"),
        (("--models", "@v1"), "--models: '@v1' is not a model"),
        (("--models", "m@"), "--models: 'm@' is not a model"),
        (("--device", "gpu"), "--device: 'gpu' is not a device"),
        (("--until-pid", "0"), "cannot observe process 0"),
    ],
)
def test_an_invalid_option_is_named(arguments: tuple[str, ...], message: str) -> None:
    """The command ends with exit code 2, before it reports to the planner."""
    result = CliRunner().invoke(app, ["hold", *PLANNER, "--json", *arguments])
    assert 2 == result.exit_code
    error = json.loads(result.stdout)
    assert message in error["message"]


def test_a_planner_is_required() -> None:
    """Without one there is nothing to keep."""
    result = CliRunner().invoke(app, ["hold", "--json"])
    assert 2 == result.exit_code
    assert "RFORK_PLANNER" in result.stdout


@pytest.mark.parametrize(
    ("text", "model", "version"),
    [("llama", "llama", None), ("org/llama@v2", "org/llama", "v2"), ("a@b@c", "a@b", "c")],
)
def test_models_may_have_a_version(text: str, model: str, version: str | None) -> None:
    """It follows the last @."""
    assert ImageSelector(model=model, version=version) == hold._selector(text)


def test_memory_may_be_a_part_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """A percentage, or a size."""
    monkeypatch.setattr(memory_budget, "available_memory", lambda: 1000)
    assert 250 == hold._memory_bytes("25%", "cpu")
    assert 125 == hold._memory_bytes("12.5 %", "cpu")
    assert 64 * 10**9 == hold._memory_bytes("64GB", "cpu")


def test_a_gpu_that_cannot_be_used_is_named() -> None:
    """The holder keeps nothing in host memory instead."""
    with pytest.raises(SettingsError, match="--device: cuda:0 cannot be used"):
        hold._memory_bytes("50%", "cuda:0")

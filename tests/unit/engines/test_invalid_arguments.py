"""What callers get wrong is one line of rfork's own errors, before anything is opened."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import rfork
from rfork.cli.app import app
from rfork.errors import AllSourcesFailed, PlannerUnreachable, RforkError, SettingsError
from rfork.planner_client.client import PlannerClient
from rfork.settings import InstanceSettings, TlsSettings

UNREACHABLE_PLANNER = "http://127.0.0.1:9"


class BrokenStateDict(nn.Linear):
    """A module whose state dict cannot be made."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def state_dict(self, *args: object, **kwargs: object) -> Any:
        raise ZeroDivisionError("packed\nweights")


COMMON: dict[str, tuple[dict[str, Any], str]] = {
    "a dict": ({"module": {"weight": torch.ones(1)}}, "a module is needed, not a dict"),
    "a class": ({"module": nn.Linear}, "a module is needed, not the class Linear"),
    "None": ({"module": None}, "a module is needed, not None"),
    "an empty name": ({"model": ""}, "the model name '' cannot be used"),
    "a name of two lines": ({"model": "a\nb"}, r"the model name 'a\\nb' cannot be used"),
    "a long name": ({"model": "x" * 600}, "the model name 'xxx"),
    "a name that is none": ({"model": 5}, "the model name 5 cannot be used"),
    "a number as rank": ({"rank": 1}, "rank is a Rank, not a int"),
    "a rank past its size": ({"rank": rfork.Rank(tp=3, tp_size=2)}, "tp=3 is not below tp_size=2"),
    "a stage past its size": ({"rank": rfork.Rank(pp=1)}, "pp=1 is not below pp_size=1"),
    "one pattern": ({"exclude": "*.bias"}, r"pass \['\*.bias'\] instead"),
    "a pattern that is none": ({"exclude": [5]}, "5 is a int"),
    "patterns that are none": ({"exclude": 5}, "exclude is a list of patterns, not a int"),
    "a planner that is none": ({"planner": 5}, "planner is a path or a URI, not a int"),
    "settings that are none": (
        {"settings": {"planner": UNREACHABLE_PLANNER}},
        "settings is an object of rfork.InstanceSettings",
    ),
    "settings that were not checked": (
        {"settings": InstanceSettings().model_copy(update={"drain_s": "long"})},
        "RFORK_DRAIN_TIMEOUT_S: .* number",
    ),
}
OF_FORK: dict[str, tuple[dict[str, Any], str]] = {
    "a number as checkpoint": ({"checkpoint": 5}, "checkpoint is a path or a URI, not a int"),
    "a number as snapshot": ({"snapshot": 5}, "snapshot is a path or a URI, not a int"),
    "a text as deadline": ({"deadline": "5"}, "deadline is a number of seconds, not a str"),
    "a deadline of no time": ({"deadline": -1}, "deadline is a positive number of seconds, not -1"),
    "no deadline at all": ({"deadline": float("nan")}, "deadline is a positive number of seconds, not nan"),
    "a loader that is none": ({"loader": 5}, "loader is a function, not a int"),
    "a callback that is none": ({"on_progress": 5}, "on_progress is a function, not a int"),
    "a state dict that raises": (
        {"module": BrokenStateDict(), "loader": lambda module: None},
        r"the module's state_dict\(\) raised ZeroDivisionError: packed weights",
    ),
}


def arguments(changed: dict[str, Any]) -> dict[str, Any]:
    return {"module": nn.Linear(2, 2), "model": "m", "planner": UNREACHABLE_PLANNER} | changed


def raised_error(call: Callable[[], object]) -> RforkError:
    """The error that a call raises: of one line."""
    with pytest.raises(RforkError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", [*COMMON, *OF_FORK])
def test_a_fork_refuses(name: str) -> None:
    """Every mistake in a call of `rfork.fork` is named, and is the user's."""
    changed, message = (COMMON | OF_FORK)[name]
    error = raised_error(lambda: rfork.fork(**arguments(changed)))
    assert error.fault == "user"
    with pytest.raises(type(error), match=message):
        raise error


@pytest.mark.parametrize("name", COMMON)
def test_a_seed_refuses(name: str) -> None:
    """So is every one in a call of `rfork.seed`, which does not run unregistered."""
    changed, message = COMMON[name]

    def seed() -> None:
        with rfork.seed(**arguments(changed)):
            pass

    error = raised_error(seed)
    assert error.fault == "user"
    with pytest.raises(SettingsError, match=message):
        raise error


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"module": {"weight": torch.ones(1)}}, "not a dict"),
        ({"module": nn.Linear}, "not a type"),
        ({"module": None}, "not a NoneType"),
        ({"uri": 5}, "5 is neither a URI nor a path"),
        ({"uri": ""}, "an empty name is no file"),
        ({"rank": 1}, "rank is a Rank, not a int"),
        ({"dtype": "float32"}, "dtype is a torch.dtype, not a str"),
        ({"device": "nowhere"}, "device 'nowhere' cannot be used"),
        ({"settings": {}}, "settings is an object of rfork.StorageSettings, not a dict"),
    ],
)
def test_a_load_refuses(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    """So is every one in a call of `rfork.load`."""
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    call_arguments: dict[str, Any] = {
        "module": nn.Linear(2, 2),
        "uri": tmp_path / "model.safetensors",
    } | changed
    with pytest.raises(SettingsError, match=message) as caught:
        rfork.load(**call_arguments)
    assert "\n" not in str(caught.value)


def test_overrides_of_settings_are_validated() -> None:
    """A value that overrides settings is looked at as one of the environment is."""
    error = raised_error(lambda: rfork.fork(nn.Linear(2, 2), model="m", settings=InstanceSettings(), deadline=10**400))
    assert isinstance(error, SettingsError)


def test_settings_that_are_given_count_and_not_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not set in them is not read from somewhere else."""
    chosen = InstanceSettings()
    monkeypatch.setenv("RFORK_PLANNER", UNREACHABLE_PLANNER)
    assert rfork_settings(chosen).planner is None


def rfork_settings(chosen: InstanceSettings) -> InstanceSettings:
    from rfork.settings import checked

    return checked(InstanceSettings, chosen)


def test_a_checkpoint_of_another_shape_is_not_mended_by_a_planner(tmp_path: Path) -> None:
    """The advice is about what failed."""
    save_file({"weight": torch.ones(3, 2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    error = raised_error(lambda: rfork.fork(nn.Linear(2, 2), model="m", checkpoint=tmp_path))
    assert isinstance(error, AllSourcesFailed)
    assert "weight has shape [3, 2], the model's is [2, 2]" in str(error)
    assert "RFORK_PLANNER" not in error.hint


def test_required_leaves_no_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With RFORK_FAIL_IF_NOT_FORKED a checkpoint does not fill what no instance or snapshot can."""
    monkeypatch.setenv("RFORK_FAIL_IF_NOT_FORKED", "1")
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    module = nn.Linear(2, 2)
    before = module.weight.tolist()
    error = raised_error(lambda: rfork.fork(module, model="m", checkpoint=tmp_path))
    assert "neither a planner nor a snapshot is set, and RFORK_FAIL_IF_NOT_FORKED is" == str(error)
    assert before == module.weight.tolist()


def test_required_and_no_source_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor where a planner is set that knows of none."""
    monkeypatch.setenv("RFORK_FAIL_IF_NOT_FORKED", "1")
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    error = raised_error(
        lambda: rfork.fork(nn.Linear(2, 2), model="m", planner=UNREACHABLE_PLANNER, checkpoint=tmp_path, deadline=1)
    )
    assert isinstance(error, AllSourcesFailed)


def test_https_to_a_server_without_tls_names_the_scheme() -> None:
    """The hint is the URL that would work, not to start a planner that runs."""

    def without_tls(request: httpx.Request) -> httpx.Response:
        error = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1016)")
        raise httpx.ConnectError(str(error))

    client = PlannerClient("https://127.0.0.1:8700", transport=httpx.MockTransport(without_tls))
    with pytest.raises(PlannerUnreachable) as caught:
        client.models()
    assert "a server without TLS answers there: use http://127.0.0.1:8700" == caught.value.hint


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """With the variable, and both files."""
    tls = TlsSettings(certificate=tmp_path / "own.pem", key=tmp_path / "own.key")
    with pytest.raises(SettingsError, match=r"RFORK_TLS_CERTIFICATE: cannot use .*/own\.pem with"):
        PlannerClient("https://127.0.0.1:8700", tls=tls)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["pull", "FOLDER", "--name", "", "--planner", UNREACHABLE_PLANNER],
            "the model name '' cannot be used",
        ),
        (["pull", "FOLDER", "--name", "x" * 600, "--planner", UNREACHABLE_PLANNER], "the model name 'xxx"),
        (
            ["seed", "FOLDER", "--name", "a\nb", "--planner", UNREACHABLE_PLANNER],
            "the model name 'a\\nb' cannot be used",
        ),
        (["pull", "FOLDER", "--planner", UNREACHABLE_PLANNER, "--deadline", "-1"], "RFORK_DEADLINE_S"),
    ],
)
def test_a_command_refuses(command: list[str], message: str, tmp_path: Path) -> None:
    """In one line, with the exit code of a user's mistake, before a model is built."""
    result = CliRunner().invoke(app, [str(tmp_path) if word == "FOLDER" else word for word in command])
    assert 2 == result.exit_code
    assert message in result.output.replace("\n", "")

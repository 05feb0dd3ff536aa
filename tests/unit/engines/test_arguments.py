"""Invalid arguments of the public functions raise a one-line rfork error before anything is opened."""

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
from rfork.engines.arguments import canonical_model_name
from rfork.errors import AllSourcesFailed, PlannerUnreachable, RforkError, SettingsError
from rfork.planner_client.client import PlannerClient
from rfork.settings import InstanceSettings, TlsSettings


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/model", "org/model"),
        ("/cache/models--org--model/snapshots/0a1b", "org/model"),
        ("/cache/models--org--model/snapshots/0a1b/", "org/model"),
        ("{folder}/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct"),
        ("{folder}/tiny/", "tiny"),
    ],
)
def test_a_model_is_named_after_its_hub_id_or_folder(source: str, expected: str, tmp_path: Path) -> None:
    """A folder in the hub's cache is named after the hub id."""
    for name in ("SmolLM2-135M-Instruct", "tiny"):
        (tmp_path / name).mkdir()
    assert expected == canonical_model_name(source.format(folder=tmp_path))


@pytest.mark.parametrize("last", ["checkpoint-100", "model", "latest", "final", "v2", "0a1b2c3d4e", "7"])
def test_a_generic_folder_is_named_by_its_path(last: str, tmp_path: Path) -> None:
    """Two fine-tunes in folders with the same generic name are different models."""
    folder = tmp_path / last
    folder.mkdir()
    assert str(folder.resolve()) == canonical_model_name(folder)


UNREACHABLE_PLANNER = "http://127.0.0.1:9"


class BrokenStateDict(nn.Linear):
    """A module whose state dict cannot be created."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def state_dict(self, *args: object, **kwargs: object) -> Any:
        raise ZeroDivisionError("packed\nweights")


COMMON: dict[str, tuple[dict[str, Any], str]] = {
    "a dict": ({"module": {"weight": torch.ones(1)}}, "expected a module, got a dict"),
    "a class": ({"module": nn.Linear}, "expected a module, got the class Linear"),
    "None": ({"module": None}, "expected a module, got None"),
    "an empty name": ({"model": ""}, "invalid model name ''"),
    "a name with a line break": ({"model": "a\nb"}, r"invalid model name 'a\\nb'"),
    "a long name": ({"model": "x" * 600}, "invalid model name 'xxx"),
    "a name that is not a string": ({"model": 5}, "invalid model name 5"),
    "a number as rank": ({"rank": 1}, "rank must be a Rank, not a int"),
    "a rank beyond its size": ({"rank": rfork.Rank(tp=3, tp_size=2)}, "tp=3 must be less than tp_size=2"),
    "a stage beyond its size": ({"rank": rfork.Rank(pp=1)}, "pp=1 must be less than pp_size=1"),
    "one pattern": ({"exclude": "*.bias"}, r"pass \['\*.bias'\] instead"),
    "a pattern that is not a string": ({"exclude": [5]}, "5 is a int"),
    "patterns that are not a list": ({"exclude": 5}, "exclude must be a list of patterns, not a int"),
    "a planner that is not a URL": ({"planner": 5}, "planner must be a path or a URI, not a int"),
    "settings of another class": (
        {"settings": {"planner": UNREACHABLE_PLANNER}},
        "settings is an object of rfork.InstanceSettings",
    ),
    "settings that were not validated": (
        {"settings": InstanceSettings().model_copy(update={"drain_timeout_s": "long"})},
        "RFORK_DRAIN_TIMEOUT_S: .* number",
    ),
}
OF_FORK: dict[str, tuple[dict[str, Any], str]] = {
    "a number as checkpoint": ({"checkpoint": 5}, "checkpoint must be a path or a URI, not a int"),
    "a number as snapshot": ({"snapshot": 5}, "snapshot must be a path or a URI, not a int"),
    "a string as deadline": ({"deadline": "5"}, "deadline must be a number of seconds, not a str"),
    "a negative deadline": ({"deadline": -1}, "deadline must be a positive number of seconds, not -1"),
    "a deadline of nan": ({"deadline": float("nan")}, "deadline must be a positive number of seconds, not nan"),
    "a loader that is not callable": ({"loader": 5}, "loader must be a function, not a int"),
    "a callback that is not callable": ({"on_progress": 5}, "on_progress must be a function, not a int"),
    "a state dict that raises": (
        {"module": BrokenStateDict(), "loader": lambda module: None},
        r"the module's state_dict\(\) raised ZeroDivisionError: packed weights",
    ),
}


def arguments(changed: dict[str, Any]) -> dict[str, Any]:
    return {"module": nn.Linear(2, 2), "model": "m", "planner": UNREACHABLE_PLANNER} | changed


def raised_error(call: Callable[[], object]) -> RforkError:
    """Return the error that a call raises, which must be one line."""
    with pytest.raises(RforkError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("name", [*COMMON, *OF_FORK])
def test_fork_rejects_invalid_arguments(name: str) -> None:
    """Every invalid argument of `rfork.fork` is named and counts as the user's error."""
    changed, message = (COMMON | OF_FORK)[name]
    error = raised_error(lambda: rfork.fork(**arguments(changed)))
    assert error.fault == "user"
    with pytest.raises(type(error), match=message):
        raise error


@pytest.mark.parametrize("name", COMMON)
def test_seed_rejects_invalid_arguments(name: str) -> None:
    """Every invalid argument of `rfork.seed` is named, and no seed starts unregistered."""
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
        ({"uri": ""}, "the file name is empty"),
        ({"rank": 1}, "rank must be a Rank, not a int"),
        ({"dtype": "float32"}, "dtype must be a torch.dtype, not a str"),
        ({"device": "nowhere"}, "device 'nowhere' cannot be used"),
        ({"settings": {}}, "settings is an object of rfork.StorageSettings, not a dict"),
    ],
)
def test_load_rejects_invalid_arguments(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Every invalid argument of `rfork.load` is named."""
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    call_arguments: dict[str, Any] = {
        "module": nn.Linear(2, 2),
        "uri": tmp_path / "model.safetensors",
    } | changed
    with pytest.raises(SettingsError, match=message) as caught:
        rfork.load(**call_arguments)
    assert "\n" not in str(caught.value)


def test_overrides_of_settings_are_validated() -> None:
    """A value that overrides a setting is validated like one from the environment."""
    error = raised_error(lambda: rfork.fork(nn.Linear(2, 2), model="m", settings=InstanceSettings(), deadline=10**400))
    assert isinstance(error, SettingsError)


def test_explicit_settings_replace_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values missing from the settings object are not read from the environment."""
    chosen = InstanceSettings()
    monkeypatch.setenv("RFORK_PLANNER", UNREACHABLE_PLANNER)
    assert rfork_settings(chosen).planner is None


def rfork_settings(chosen: InstanceSettings) -> InstanceSettings:
    from rfork.settings import checked

    return checked(InstanceSettings, chosen)


def test_a_checkpoint_of_another_shape_gets_no_hint_about_the_planner(tmp_path: Path) -> None:
    """The hint refers to what failed."""
    save_file({"weight": torch.ones(3, 2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    error = raised_error(lambda: rfork.fork(nn.Linear(2, 2), model="m", checkpoint=tmp_path))
    assert isinstance(error, AllSourcesFailed)
    assert "weight has shape [3, 2], but [2, 2] in the model" in str(error)
    assert "RFORK_PLANNER" not in error.hint


def test_fail_if_not_forked_disables_the_checkpoint_fallback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With RFORK_FAIL_IF_NOT_FORKED, a checkpoint is not used if there is no source and no snapshot."""
    monkeypatch.setenv("RFORK_FAIL_IF_NOT_FORKED", "1")
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    module = nn.Linear(2, 2)
    before = module.weight.tolist()
    error = raised_error(lambda: rfork.fork(module, model="m", checkpoint=tmp_path))
    assert "RFORK_FAIL_IF_NOT_FORKED is set, but neither a planner nor a snapshot is set" == str(error)
    assert before == module.weight.tolist()


def test_fail_if_not_forked_without_a_source_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds if the planner knows no source."""
    monkeypatch.setenv("RFORK_FAIL_IF_NOT_FORKED", "1")
    save_file({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, tmp_path / "model.safetensors")
    error = raised_error(
        lambda: rfork.fork(nn.Linear(2, 2), model="m", planner=UNREACHABLE_PLANNER, checkpoint=tmp_path, deadline=1)
    )
    assert isinstance(error, AllSourcesFailed)


def test_https_to_a_server_without_tls_names_the_correct_scheme() -> None:
    """The hint is the URL that would work."""

    def without_tls(request: httpx.Request) -> httpx.Response:
        error = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1016)")
        raise httpx.ConnectError(str(error))

    client = PlannerClient("https://127.0.0.1:8700", transport=httpx.MockTransport(without_tls))
    with pytest.raises(PlannerUnreachable) as caught:
        client.models()
    assert "a server without TLS responded: use http://127.0.0.1:8700" == caught.value.hint


def test_an_unreadable_certificate_is_named(tmp_path: Path) -> None:
    """The error contains the variable and both files."""
    tls = TlsSettings(certificate=tmp_path / "own.pem", key=tmp_path / "own.key")
    with pytest.raises(SettingsError, match=r"RFORK_TLS_CERTIFICATE: cannot use .*/own\.pem with"):
        PlannerClient("https://127.0.0.1:8700", tls=tls)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["pull", "FOLDER", "--name", "", "--planner", UNREACHABLE_PLANNER],
            "invalid model name ''",
        ),
        (["pull", "FOLDER", "--name", "x" * 600, "--planner", UNREACHABLE_PLANNER], "invalid model name 'xxx"),
        (
            ["seed", "FOLDER", "--name", "a\nb", "--planner", UNREACHABLE_PLANNER],
            "invalid model name 'a\\nb'",
        ),
        (["pull", "FOLDER", "--planner", UNREACHABLE_PLANNER, "--deadline", "-1"], "RFORK_DEADLINE_S"),
    ],
)
def test_commands_reject_invalid_arguments(command: list[str], message: str, tmp_path: Path) -> None:
    """The command prints one line and exits with the code of a user error before it builds a model."""
    result = CliRunner().invoke(app, [str(tmp_path) if word == "FOLDER" else word for word in command])
    assert 2 == result.exit_code
    assert message in result.output.replace("\n", "")

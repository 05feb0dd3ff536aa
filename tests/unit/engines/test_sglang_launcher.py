"""`--rfork-*` flags of SGLang's launcher, with a parser in place of SGLang's."""

from __future__ import annotations

import argparse
import os
import sys
from types import ModuleType

import pytest

from rfork.engines.hook_targets import HookTarget
from rfork.engines.sglang import compat, launcher
from rfork.settings import InstanceSettings


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """A parser like SGLang's. Changes to the environment end with the test."""
    for name in InstanceSettings.model_fields:
        # Set each variable first so that it is restored: the fixture does not know what `apply_flags` sets.
        monkeypatch.setenv(launcher.variable(name), "")
        monkeypatch.delenv(launcher.variable(name))
    common, files, storage = (
        ModuleType(f"sglang.srt.utils.{name}") for name in ("common", "hf_transformers_utils", "runai_utils")
    )
    common.__dict__["is_remote_url"] = lambda model: "://" in model
    files.__dict__["check_gguf_file"] = lambda model: model.endswith(".gguf")
    storage.__dict__["is_runai_obj_uri"] = lambda model: model.startswith("s3://")
    for module in (common, files, storage):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(compat, "LAUNCHING", ())
    monkeypatch.setattr(compat, "scheduling", tuple)
    monkeypatch.setattr(launcher, "install_drain", lambda settings: None)
    parser = argparse.ArgumentParser()
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--model-path", default="org/model")
    parser.add_argument("--cpu-offload-gb", type=int, default=0)
    launcher.add(parser)
    return parser


def parse_flags(parser: argparse.ArgumentParser, *arguments: str) -> argparse.Namespace:
    """Return the arguments that SGLang continues with."""
    namespace = parser.parse_args(arguments)
    launcher.apply_flags(namespace)
    return namespace


def test_flags_are_passed_through_the_environment(parser: argparse.ArgumentParser) -> None:
    """Each flag sets its variable for the server's processes, and the load format is set."""
    namespace = parse_flags(
        parser,
        "--rfork-planner",
        "http://planner:8700",
        "--rfork-fail-if-not-forked",
        "--rfork-max-egress-bytes-per-s",
        "5",
    )
    assert "rfork" == namespace.load_format
    assert {
        "RFORK_PLANNER": "http://planner:8700",
        "RFORK_FAIL_IF_NOT_FORKED": "1",
        "RFORK_MAX_EGRESS_BYTES_PER_S": "5",
    } == {
        name: os.environ[name] for name in ("RFORK_PLANNER", "RFORK_FAIL_IF_NOT_FORKED", "RFORK_MAX_EGRESS_BYTES_PER_S")
    }
    assert os.environ["RFORK_REPLICA"].startswith("sglang-")


def test_the_load_format_alone_is_sufficient(parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other settings come from the environment; the replica's name is kept."""
    monkeypatch.setenv("RFORK_PLANNER", "http://planner:8700")
    monkeypatch.setenv("RFORK_REPLICA", "mine")
    assert "rfork" == parse_flags(parser, "--load-format", "rfork").load_format
    assert "mine" == os.environ["RFORK_REPLICA"]


def test_the_environment_alone_changes_nothing(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A planner in the environment does not change how weights are loaded, but a warning is logged."""
    monkeypatch.setenv("RFORK_PLANNER", "http://planner:8700")
    assert "auto" == parse_flags(parser).load_format
    assert "RFORK_REPLICA" not in os.environ
    assert "RFORK_PLANNER is set, but the load format is auto" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rfork-deadline-s", "0"), "--rfork-deadline-s: Input should be greater than 0 (got '0')"),
        (("--rfork-transports", "pigeon"), "--rfork-transports: Input should be "),
        (("--load-format", "dummy"), "--rfork-* requires --load-format rfork, not dummy"),
        (("--cpu-offload-gb", "2"), "--cpu-offload-gb cannot be used with --load-format rfork"),
        (("--model-path", "s3://bucket/model"), "--model-path: s3://bucket/model is a storage URI: "),
        (("--model-path", "model.gguf"), "--model-path: GGUF files have their own load format"),
    ],
)
def test_invalid_arguments_end_the_launch(
    arguments: tuple[str, ...],
    message: str,
    parser: argparse.ArgumentParser,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An invalid flag is one line that names it, with exit code 2."""
    with pytest.raises(SystemExit) as ended:
        parse_flags(parser, "--rfork-planner", "http://planner:8700", *arguments)
    assert 2 == ended.value.code
    output = capsys.readouterr().err
    assert output.startswith(f"sglang: error: {message}")
    assert 1 == output.count("\n")


@pytest.fixture
def version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A version of SGLang that is not supported."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: "9.9")
    launcher._log_own_loader.cache_clear()


@pytest.mark.usefixtures("version")
def test_without_a_core_target_sglang_loads_by_itself(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server starts with SGLang's own loader, and one line has the reason."""
    monkeypatch.setattr(compat, "scheduling", lambda: (HookTarget("json.paint"),))
    assert "auto" == parse_flags(parser, "--rfork-planner", "http://planner:8700").load_format
    assert 1 == len(caplog.records)
    assert "falling back to SGLang's own loader: SGLang 9.9 is incompatible" in caplog.text
    assert "json.paint does not exist" in caplog.text


@pytest.mark.usefixtures("version")
def test_without_a_core_target_a_required_fork_ends_the_launch(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is one line, before any of the server's processes starts."""
    monkeypatch.setattr(compat, "scheduling", lambda: (HookTarget("json.paint"),))
    with pytest.raises(SystemExit) as ended:
        parse_flags(parser, "--rfork-planner", "http://planner:8700", "--rfork-fail-if-not-forked")
    assert 2 == ended.value.code
    output = capsys.readouterr().err
    assert output.startswith("sglang: error: SGLang 9.9 is incompatible with this rfork")
    assert 1 == output.count("\n")


@pytest.mark.usefixtures("version")
def test_other_missing_targets_do_not_prevent_a_fork(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A comfort that is missing is one line. What ends seeding is logged by the process that would seed."""
    targets = (HookTarget("json.sleep", tier="lifecycle"), HookTarget("json.steps", tier="comfort"))
    monkeypatch.setattr(compat, "scheduling", lambda: targets)
    assert "rfork" == parse_flags(parser, "--rfork-planner", "http://planner:8700").load_format
    assert 1 == len(caplog.records)
    assert "json.steps does not exist" in caplog.text
    assert "json.sleep" not in caplog.text


@pytest.fixture
def ignoring_parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """A parser like that of an SGLang that rfork does not support."""
    monkeypatch.delenv("RFORK_FAIL_IF_NOT_FORKED", raising=False)
    launcher._log_own_loader.cache_clear()
    ignoring = argparse.ArgumentParser()
    ignoring.add_argument("--load-format", default="auto", choices=["auto", "dummy"])
    launcher.add_ignored(ignoring, "SGLang changed by 100%")
    return ignoring


@pytest.mark.parametrize(
    ("arguments", "load_format", "logged"),
    [
        ((), "auto", 0),
        (("--load-format", "dummy"), "dummy", 0),
        (("--load-format", "rfork"), "auto", 1),
        (("--rfork-planner", "http://planner:8700", "--rfork-deadline-s", "9"), "auto", 1),
    ],
)
def test_ignored_flags_are_logged_once(
    arguments: tuple[str, ...],
    load_format: str,
    logged: int,
    ignoring_parser: argparse.ArgumentParser,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A launch with them uses SGLang's own loader; one without them is unaffected."""
    assert argparse.Namespace(load_format=load_format) == ignoring_parser.parse_args(arguments)
    assert logged == caplog.text.count("falling back to SGLang's own loader: SGLang changed by 100%")


@pytest.mark.parametrize(
    ("arguments", "required"),
    [
        (("--rfork-planner", "http://planner:8700", "--rfork-fail-if-not-forked"), False),
        (("--rfork-planner", "http://planner:8700"), True),
        (("--load-format", "rfork"), True),
    ],
)
def test_ignored_flags_end_the_launch_if_a_fork_is_required(
    arguments: tuple[str, ...],
    required: bool,
    ignoring_parser: argparse.ArgumentParser,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It is required by a flag or by the environment."""
    if required:
        monkeypatch.setenv("RFORK_FAIL_IF_NOT_FORKED", "1")
    with pytest.raises(SystemExit) as ended:
        ignoring_parser.parse_args(arguments)
    assert 2 == ended.value.code
    assert "sglang: error: SGLang changed by 100% (RFORK_FAIL_IF_NOT_FORKED is set)\n" == capsys.readouterr().err


def test_help_names_the_variable_of_every_option(parser: argparse.ArgumentParser) -> None:
    """Secrets have no flag."""
    output = " ".join(parser.format_help().split())
    for name in set(InstanceSettings.model_fields) - launcher.NOT_FLAGS:
        assert f"--rfork-{name.replace('_', '-')}" in output
        assert f"[{launcher.variable(name)}]" in output
    assert "--rfork-token " not in output

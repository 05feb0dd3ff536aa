"""`--rfork-*` of SGLang's launcher, with a parser in the place of SGLang's."""

from __future__ import annotations

import argparse
import os
import sys
from types import ModuleType

import pytest

from rfork.engines.hook_targets import HookTarget
from rfork.engines.sglang import drain_on_sigterm, flags, hook_targets
from rfork.settings import InstanceSettings


@pytest.fixture
def parser(monkeypatch: pytest.MonkeyPatch) -> argparse.ArgumentParser:
    """SGLang's, as far as the flags know it; nothing that a test sets in the environment outlives it."""
    for name in InstanceSettings.model_fields:
        # First set, so that it is put back: what `take` sets is not known to the fixture.
        monkeypatch.setenv(flags.variable(name), "")
        monkeypatch.delenv(flags.variable(name))
    common, files, storage = (
        ModuleType(f"sglang.srt.utils.{name}") for name in ("common", "hf_transformers_utils", "runai_utils")
    )
    common.__dict__["is_remote_url"] = lambda model: "://" in model
    files.__dict__["check_gguf_file"] = lambda model: model.endswith(".gguf")
    storage.__dict__["is_runai_obj_uri"] = lambda model: model.startswith("s3://")
    for module in (common, files, storage):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(hook_targets, "find_incompatible", lambda points: [])
    monkeypatch.setattr(drain_on_sigterm, "install", lambda settings: None)
    made = argparse.ArgumentParser()
    made.add_argument("--load-format", default="auto")
    made.add_argument("--model-path", default="org/model")
    made.add_argument("--cpu-offload-gb", type=int, default=0)
    flags.add(made)
    return made


def parse_flags(parser: argparse.ArgumentParser, *arguments: str) -> argparse.Namespace:
    """What SGLang goes on with."""
    namespace = parser.parse_args(arguments)
    flags.apply_flags(namespace)
    return namespace


def test_a_flag_is_carried_by_the_environment(parser: argparse.ArgumentParser) -> None:
    """Each flag sets its variable for the server's processes, and the load format goes with them."""
    namespace = parse_flags(
        parser, "--rfork-planner", "http://planner:8700", "--rfork-required", "--rfork-egress-rate", "5"
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


def test_the_load_format_alone_will_do(parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the load format named, the environment says the rest; the replica's name is kept."""
    monkeypatch.setenv("RFORK_PLANNER", "http://planner:8700")
    monkeypatch.setenv("RFORK_REPLICA", "mine")
    assert "rfork" == parse_flags(parser, "--load-format", "rfork").load_format
    assert "mine" == os.environ["RFORK_REPLICA"]


def test_the_environment_alone_changes_nothing(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A planner in the environment does not change how weights are loaded, but is mentioned."""
    monkeypatch.setenv("RFORK_PLANNER", "http://planner:8700")
    assert "auto" == parse_flags(parser).load_format
    assert "RFORK_REPLICA" not in os.environ
    assert "RFORK_PLANNER is set, but the load format is auto" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rfork-deadline-s", "0"), "--rfork-deadline-s: Input should be greater than 0 (got '0')"),
        (("--rfork-transports", "pigeon"), "--rfork-transports: Input should be "),
        (("--load-format", "dummy"), "--rfork-* goes with --load-format rfork, not with dummy"),
        (("--cpu-offload-gb", "2"), "--cpu-offload-gb does not go with --load-format rfork"),
        (("--model-path", "s3://bucket/model"), "--model-path: s3://bucket/model is storage: "),
        (("--model-path", "model.gguf"), "--model-path: GGUF files have a load format of their own"),
    ],
)
def test_what_cannot_be_ends_the_launch(
    arguments: tuple[str, ...],
    message: str,
    parser: argparse.ArgumentParser,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A wrong flag is one line that names it, and exit code 2."""
    with pytest.raises(SystemExit) as ended:
        parse_flags(parser, "--rfork-planner", "http://planner:8700", *arguments)
    assert 2 == ended.value.code
    output = capsys.readouterr().err
    assert output.startswith(f"sglang: error: {message}")
    assert 1 == output.count("\n")


def test_moved_hook_points_end_the_launch(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An SGLang whose hook points moved is refused before any of its processes starts."""
    missing_target = HookTarget(hook_targets.RUN_BATCH)
    monkeypatch.setattr(hook_targets, "find_incompatible", lambda _: [(missing_target, "is gone")])
    monkeypatch.setattr("importlib.metadata.version", lambda _: "9.9")
    with pytest.raises(SystemExit):
        parse_flags(parser, "--rfork-planner", "http://planner:8700")
    assert (
        f"sglang: error: SGLang 9.9 is not as rfork knows it (tested: 0.5.23): {hook_targets.RUN_BATCH} is gone\n"
        == capsys.readouterr().err
    )


def test_flags_that_cannot_be_used_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Where rfork is off, its flags are known and end the launch; a launch without them is left alone."""
    parser = argparse.ArgumentParser()
    flags.add(parser, why_not="SGLang moved by 100%")
    assert argparse.Namespace() == parser.parse_args([])
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--rfork-planner", "http://planner:8700"])
    assert 2 == ended.value.code
    assert "sglang: error: --rfork-planner: SGLang moved by 100%\n" == capsys.readouterr().err


def test_every_option_says_its_variable(parser: argparse.ArgumentParser) -> None:
    """`--help` names each option's environment variable; secrets have no flag."""
    output = " ".join(parser.format_help().split())
    for name in set(InstanceSettings.model_fields) - flags.NOT_FLAGS:
        assert f"--rfork-{name.replace('_', '-')}" in output
        assert f"[{flags.variable(name)}]" in output
    assert "--rfork-token " not in output

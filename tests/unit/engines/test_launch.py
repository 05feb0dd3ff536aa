"""Commands as `rfork launch` starts them: a table, and each refusal in words."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

import pytest

import rfork
from deploy.docker.files import SHIMS
from rfork.cli.launch import parse_launch_arguments
from rfork.engine_command import ENTRY_POINTS
from rfork.engines.launch import engine_environment, replica_name, rewrite_command, with_plugin_path
from rfork.errors import SettingsError
from rfork.settings import InstanceSettings, load

ADDED = ["--load-format", "rfork"]
V = "vllm.entrypoints.openai.api_server"
S = "sglang.launch_server"


@pytest.mark.parametrize(
    ("command", "engine", "expected"),
    [
        ("vllm serve m --dtype auto", "vllm", "vllm serve m --dtype auto --load-format rfork"),
        ("/opt/bin/vllm serve m", "vllm", "/opt/bin/vllm serve m --load-format rfork"),
        ("python /opt/bin/vllm serve m", "vllm", "python /opt/bin/vllm serve m --load-format rfork"),
        (f"python -m {V} --model m", "vllm", f"python -m {V} --model m --load-format rfork"),
        (f"/usr/bin/python3.12 -u -m {V}", "vllm", f"/usr/bin/python3.12 -u -m {V} --load-format rfork"),
        (f"python3 -X dev -um {S} --tp 2", "sglang", f"python3 -X dev -um {S} --tp 2 --load-format rfork"),
        ("sglang serve --model-path m", "sglang", "sglang serve --model-path m --load-format rfork"),
        (f"numactl --interleave all python -m {S}", "sglang",
         f"numactl --interleave all python -m {S} --load-format rfork"),
        (f"env A=1 B=x=y python -m {S}", "sglang", f"python -m {S} --load-format rfork"),
        ("vllm serve m --load-format rfork", "vllm", "vllm serve m --load-format rfork"),
        ("vllm serve m --load_format=rfork", "vllm", "vllm serve m --load_format=rfork"),
        ("vllm serve m --api-key vllm", "vllm", "vllm serve m --api-key vllm --load-format rfork"),
    ],
)  # fmt: skip
def test_a_command_is_started_with_the_load_format(command: str, engine: str, expected: str) -> None:
    """Each way to start an engine is known, and nothing of it changes but the load format."""
    launch = rewrite_command(command.split(), {})
    assert (engine, expected.split()) == (launch.engine, list(launch.command))


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("", "no command"),
        ("bash -c x", "a shell's (bash)"),
        ("/bin/sh start.sh", "a shell's (/bin/sh)"),
        ("env -i vllm serve m", "`env -i`"),
        ("vllm bench latency", "`vllm bench` is no server"),
        ("vllm", "`vllm` is no server"),
        ("python -m http.server", "python -m http.server is none of the modules"),
        ("python -m", "python -m  is none"),
        ("python -c pass", "`python -c`"),
        (f"python -I -m {V}", "ignores PYTHONPATH"),
        (f"python -sE -m {S}", "ignores PYTHONPATH"),
        ("nginx -g daemon", "neither vLLM nor SGLang"),
        ("python serve.py", "neither vLLM nor SGLang"),
        ("vllm serve m --load-format auto", "--load-format auto"),
        (f"python -m {S} --load-format=dummy", "--load-format dummy"),
    ],
)
def test_what_cannot_be_launched_is_said(command: str, part: str) -> None:
    """One line names what is wrong with the command."""
    with pytest.raises(SettingsError) as caught:
        rewrite_command(command.split(), {})
    assert (True, 1) == (part in str(caught.value), len(str(caught.value).splitlines()))


@pytest.mark.parametrize(
    ("command", "before", "after"),
    [
        ("vllm serve m", {}, {}),
        ("vllm serve m", {"VLLM_PLUGINS": ""}, {"VLLM_PLUGINS": "rfork"}),
        ("vllm serve m", {"VLLM_PLUGINS": "a, b"}, {"VLLM_PLUGINS": "a,b,rfork"}),
        ("vllm serve m", {"VLLM_PLUGINS": "a,rfork"}, {"VLLM_PLUGINS": "a,rfork"}),
        ("env VLLM_PLUGINS=a vllm serve m", {}, {"VLLM_PLUGINS": "a,rfork"}),
        ("sglang serve m", {"VLLM_PLUGINS": "a"}, {"VLLM_PLUGINS": "a"}),
        ("sglang serve m", {"SGLANG_PLUGINS": ""}, {"SGLANG_PLUGINS": ""}),
        ("sglang serve m", {"SGLANG_PLUGINS": "a"}, {"SGLANG_PLUGINS": "a,rfork"}),
    ],
)
def test_an_allowlist_gets_the_plug_in(command: str, before: dict[str, str], after: dict[str, str]) -> None:
    """Where plug-ins are restricted rfork is added; else nothing is set. SGLang's empty list is none."""
    found = dict(rewrite_command(command.split(), {**before, "RFORK_REPLICA": "me"}).environment)
    assert {**after, "RFORK_REPLICA": "me"} == found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),
        ({"RFORK_DRAIN_TIMEOUT_S": "9"}, {"RFORK_DRAIN_TIMEOUT_S": "9"}),
        ({"RFORK_PLANNER": "http://p"}, {"RFORK_PLANNER": "http://p", "RFORK_DRAIN_TIMEOUT_S": "0"}),
        (
            {"RFORK_PLANNER": "http://p", "RFORK_DRAIN_TIMEOUT_S": "9"},
            {"RFORK_PLANNER": "http://p", "RFORK_DRAIN_TIMEOUT_S": "0"},
        ),
    ],
)
def test_the_server_does_not_drain_again(before: dict[str, str], after: dict[str, str]) -> None:
    """Its launcher does, where there is a planner to ask."""
    settings = load(InstanceSettings, planner=before.get("RFORK_PLANNER"))
    assert after == engine_environment(before, settings)


def test_each_start_has_a_name_of_its_own() -> None:
    """A replica without a name gets one that the settings take."""
    one, other = replica_name(), replica_name()
    assert (True, one) == (one != other, load(InstanceSettings, replica=one).replica)


def test_options_come_before_the_command() -> None:
    """By either spelling; the command's own options are its own, with `--` or without."""
    expected = {"RFORK_PLANNER": "http://p", "RFORK_FAIL_IF_NOT_FORKED": "1", "RFORK_TRANSPORTS": "http"}
    options = ["--planner", "http://p", "--rfork-required", "--transports=http"]
    command = ["vllm", "serve", "m", "--planner", "its", "--", "x"]
    assert [(expected, command)] * 2 == [
        parse_launch_arguments([*options, "--", *command]),
        parse_launch_arguments([*options, *command]),
    ]


@pytest.mark.parametrize("arguments", [["--planer", "x", "--", "vllm"], ["--planner"], ["--token", "x"]])
def test_a_wrong_option_is_one_line(arguments: list[str]) -> None:
    """An option that there is not, one without its value, and a secret, which is none."""
    with pytest.raises(SettingsError):
        parse_launch_arguments(arguments)


def test_entry_points_are_those_of_the_package() -> None:
    """What is made on the fly is what an installed rfork has."""
    project = tomllib.loads((Path(rfork.__file__).parents[1] / "pyproject.toml").read_text())
    declared = project["project"]["entry-points"]
    assert ENTRY_POINTS == {group: names["rfork"] for group, names in declared.items()}


def test_the_plug_in_is_found_where_nothing_is_installed() -> None:
    """A folder in front of Python's path has the entry points and the package; it goes afterwards."""
    with with_plugin_path({"PYTHONPATH": "/before"}) as environment:
        folder, rest = environment["PYTHONPATH"].split(":")
        found = {
            point.group: point.value
            for distribution in importlib.metadata.distributions(path=[folder])
            for point in distribution.entry_points
        }
        there = (Path(folder) / "rfork" / "engines" / "launch.py").exists()
    assert (dict(ENTRY_POINTS), "/before", True, False) == (found, rest, there, Path(folder).exists())


def test_rfork_as_files_has_the_entry_points_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that know what to do in an image whose packages are too old."""
    (tmp_path / "_files.py").touch()
    monkeypatch.setattr("rfork.__file__", str(tmp_path / "__init__.py"))
    with with_plugin_path({}) as environment:
        found = {
            point.group: point.value
            for distribution in importlib.metadata.distributions(path=[environment["PYTHONPATH"]])
            for point in distribution.entry_points
        }
    assert SHIMS == found
    assert {"rfork._files:vllm", "rfork._files:sglang"} == set(found.values())

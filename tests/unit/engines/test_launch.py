"""Commands rewritten by `rfork launch`, and rejected commands."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from deploy.docker.files import SHIMS
from deploy.docker.requirements import pyproject_table
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
def test_a_command_gets_the_load_format(command: str, engine: str, expected: str) -> None:
    """Each known way to start an engine is recognised, and only the load format is added."""
    launch = rewrite_command(command.split(), {})
    assert engine == launch.engine
    assert expected.split() == list(launch.command)


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("", "no command"),
        ("bash -c x", "starts a shell (bash)"),
        ("/bin/sh start.sh", "starts a shell (/bin/sh)"),
        ("env -i vllm serve m", "`env -i`"),
        ("vllm bench latency", "`vllm bench` is not a server"),
        ("vllm", "`vllm` is not a server"),
        ("python -m http.server", "python -m http.server does not start a supported engine"),
        ("python -m", "python -m  does not start"),
        ("python -c pass", "`python -c`"),
        (f"python -I -m {V}", "ignores PYTHONPATH"),
        (f"python -sE -m {S}", "ignores PYTHONPATH"),
        ("nginx -g daemon", "neither vLLM nor SGLang"),
        ("python serve.py", "neither vLLM nor SGLang"),
        ("vllm serve m --load-format auto", "--load-format auto"),
        (f"python -m {S} --load-format=dummy", "--load-format dummy"),
    ],
)
def test_an_unsupported_command_is_rejected(command: str, part: str) -> None:
    """One line names what is wrong with the command."""
    with pytest.raises(SettingsError) as caught:
        rewrite_command(command.split(), {})
    assert part in str(caught.value)
    assert 1 == len(str(caught.value).splitlines())


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
    """If plug-ins are restricted, rfork is added to the list. SGLang treats an empty list as none."""
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
    """With a planner, the launcher drains, so the server's own drain is disabled."""
    settings = load(InstanceSettings, planner=before.get("RFORK_PLANNER"))
    assert after == engine_environment(before, settings)


def test_each_start_has_its_own_replica_name() -> None:
    """An unnamed replica gets a unique and valid name."""
    one, other = replica_name(), replica_name()
    assert one != other
    assert one == load(InstanceSettings, replica=one).replica


def test_launch_options_precede_the_command() -> None:
    """Both spellings work; options of the command are not parsed, with and without `--`."""
    expected = {"RFORK_PLANNER": "http://p", "RFORK_FAIL_IF_NOT_FORKED": "1", "RFORK_TRANSPORTS": "http"}
    options = ["--planner", "http://p", "--rfork-fail-if-not-forked", "--transports=http"]
    command = ["vllm", "serve", "m", "--planner", "its", "--", "x"]
    assert [(expected, command)] * 2 == [
        parse_launch_arguments([*options, "--", *command]),
        parse_launch_arguments([*options, *command]),
    ]


@pytest.mark.parametrize("arguments", [["--planer", "x", "--", "vllm"], ["--planner"], ["--token", "x"]])
def test_an_invalid_option_is_a_one_line_error(arguments: list[str]) -> None:
    """An unknown option, one without its value, and a secret, which has no option, are rejected."""
    with pytest.raises(SettingsError):
        parse_launch_arguments(arguments)


def test_entry_points_are_those_of_the_package() -> None:
    """Generated entry points equal those of an installed rfork."""
    project = pyproject_table()
    declared = project["project"]["entry-points"]
    assert ENTRY_POINTS == {group: names["rfork"] for group, names in declared.items()}


def test_the_plug_in_is_found_without_installation() -> None:
    """A folder on PYTHONPATH has the entry points and the package, and is removed afterwards."""
    with with_plugin_path({"PYTHONPATH": "/before"}) as environment:
        folder, previous_path = environment["PYTHONPATH"].split(":")
        found = {
            point.group: point.value
            for distribution in importlib.metadata.distributions(path=[folder])
            for point in distribution.entry_points
        }
        is_linked = (Path(folder) / "rfork" / "engines" / "launch.py").exists()
    assert dict(ENTRY_POINTS) == found
    assert "/before" == previous_path
    assert is_linked
    assert not Path(folder).exists()


def test_a_copied_rfork_has_the_entry_points_of_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They handle images whose packages are too old."""
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

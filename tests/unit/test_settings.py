"""Settings from variables and arguments, and their errors."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from rfork import addresses
from rfork.addresses import redacted
from rfork.engines import flags
from rfork.errors import SettingsError
from rfork.settings import (
    SETTINGS_CLASSES,
    CacheDirs,
    InstanceSettings,
    PlannerSettings,
    StorageSettings,
    is_advanced,
    is_external,
    load,
    node_name,
)

MAX_DOCUMENTED = 65


@pytest.mark.parametrize(
    ("variable", "value", "option", "expected"),
    [
        ("RFORK_TRANSPORTS", "transfer_engine, http", "transports", ("transfer_engine", "http")),
        ("RFORK_PLANNER", "http://p:1", "planner", "http://p:1"),
        ("RFORK_PLANNER", "", "planner", None),
        ("RFORK_MAX_INFLIGHT_CHUNKS", "7", "max_inflight_chunks", 7),
    ],
)
def test_a_variable_sets_its_option(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, option: str, expected: object
) -> None:
    """Lists are comma separated, and an empty variable counts as unset."""
    monkeypatch.setenv(variable, value)
    assert expected == getattr(load(InstanceSettings), option)


def test_an_argument_overrides_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument of None leaves the variable in effect."""
    monkeypatch.setenv("RFORK_PLANNER_PORT", "1")
    assert 1 == load(PlannerSettings, port=None).port
    assert 2 == load(PlannerSettings, port=2).port


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("RFORK_MAX_INFLIGHT_CHUNKS", "many", "RFORK_MAX_INFLIGHT_CHUNKS: Input should be a valid integer"),
        ("RFORK_MAX_INFLIGHT_CHUNKS", "0", "RFORK_MAX_INFLIGHT_CHUNKS: Input should be greater than or equal to 1"),
        ("RFORK_TRANSPORTS", "http,pigeon", "RFORK_TRANSPORTS"),
        ("RFORK_PEER_PORT", "70000", "RFORK_PEER_PORT: Input should be less than or equal to 65535"),
    ],
)
def test_an_invalid_value_is_a_one_line_error_that_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str
) -> None:
    """The text of pydantic follows the variable to correct."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as caught:
        load(InstanceSettings)
    assert str(caught.value).startswith(expected)
    assert "\n" not in str(caught.value)


def test_a_variable_of_another_project_sets_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of several variables that is set counts."""
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert "eu-west-1" == load(StorageSettings).s3_region
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    assert "eu-central-1" == load(StorageSettings).s3_region


def test_an_argument_overrides_a_variable_of_another_project(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both `load` and the constructor accept the field's name."""
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    assert "us-east-2" == load(StorageSettings, s3_region="us-east-2").s3_region
    assert "us-east-2" == StorageSettings(s3_region="us-east-2").s3_region


def test_an_invalid_variable_of_another_project_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error begins with that variable, without rfork's prefix."""
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "perhaps")
    with pytest.raises(SettingsError, match=r"^AWS_SKIP_SIGNATURE: Input should be a valid boolean"):
        load(StorageSettings)


def test_cache_directories_are_those_of_their_projects(monkeypatch: pytest.MonkeyPatch) -> None:
    """rfork has no variables of its own for these directories."""
    monkeypatch.setenv("TRITON_CACHE_DIR", "/cache/triton")
    assert Path("/cache/triton") == load(CacheDirs).triton_cache_dir


def test_a_copy_with_an_unknown_option_is_rejected() -> None:
    """A misspelled option in `model_copy` raises, where pydantic would ignore it."""
    with pytest.raises(TypeError, match="InstanceSettings has no field bindd"):
        InstanceSettings().model_copy(update={"bindd": "0.0.0.0"})


def test_the_number_of_documented_settings_is_bounded() -> None:
    """A new setting must be advanced, a constant or a variable that already exists elsewhere."""
    documented = [
        name
        for settings_class in SETTINGS_CLASSES
        for name, field in settings_class.model_fields.items()
        if not is_advanced(field) and not is_external(settings_class, name)
    ]
    assert len(documented) <= MAX_DOCUMENTED


def test_advanced_settings_are_not_launcher_flags() -> None:
    """They are set by their variables."""
    flag_names = {name for name, _ in flags.fields()}
    assert "planner" in flag_names
    assert set() == {name for name, field in InstanceSettings.model_fields.items() if is_advanced(field)} & flag_names


@pytest.mark.parametrize(
    ("bind", "advertise", "expected"),
    [("127.0.0.1", None, "127.0.0.1"), ("10.0.0.1", "seed-7", "seed-7"), ("10.0.0.1", None, "10.0.0.1")],
)
def test_an_advertised_address_overrides_the_bound_one(bind: str, advertise: str | None, expected: str) -> None:
    """`advertise` has precedence over `bind`."""
    assert expected == InstanceSettings(bind=bind, advertise=advertise).advertised_host


BOOT_ID = "25b1112e-111c-4543-81c4-4fa2ecce3d13"
NODES = [
    pytest.param("uts:[4026531838]", BOOT_ID, "pod-x", id="the node itself"),
    pytest.param("uts:[4026532177]", BOOT_ID, "boot-25b1112e111c4543", id="a container"),
    pytest.param("uts:[4026532177]", "", "pod-x", id="a sandbox without a boot id"),
    pytest.param(None, None, "pod-x", id="not Linux"),
]


@pytest.mark.parametrize(("namespace", "boot_id", "expected"), NODES)
def test_containers_of_a_node_agree_on_its_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    namespace: str | None,
    boot_id: str | None,
    expected: str,
) -> None:
    """The name is the host name, or the boot id in a container, which has its own host name."""
    monkeypatch.setattr("socket.gethostname", lambda: "pod-x")
    if namespace is not None and boot_id is not None:
        (tmp_path / "self/ns").mkdir(parents=True)
        (tmp_path / "self/ns/uts").symlink_to(namespace)
        (tmp_path / "sys/kernel/random").mkdir(parents=True)
        (tmp_path / "sys/kernel/random/boot_id").write_text(f"{boot_id}\n")
    assert expected == node_name(tmp_path)


def test_a_configured_node_name_has_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    """RFORK_NODE_NAME has precedence over the detected name."""
    monkeypatch.setenv("RFORK_NODE_NAME", "gpu-17")
    assert "gpu-17" == load(InstanceSettings).node_name


def set_source_addresses(found: dict[socket.AddressFamily, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let packets on the default routes have these source addresses."""
    monkeypatch.setattr(addresses, "_source_of", lambda family, _: found.get(family))


IPV4, IPV6 = "10.0.0.7", "fd00::7"


@pytest.mark.parametrize(
    ("found", "bind", "expected"),
    [
        ({socket.AF_INET: IPV4, socket.AF_INET6: IPV6}, "0.0.0.0", IPV4),
        ({socket.AF_INET: IPV4, socket.AF_INET6: IPV6}, "::", IPV4),
        ({socket.AF_INET6: IPV6}, "::", IPV6),
        ({}, "::", "127.0.0.1"),
    ],
)
def test_a_wildcard_bind_advertises_an_address_of_this_host(
    found: dict[socket.AddressFamily, str], bind: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IPv4 is preferred; without any address, and with a local planner, it is loopback."""
    set_source_addresses(found, monkeypatch)
    assert expected == InstanceSettings(bind=bind, planner="http://127.0.0.1:8700").advertised_host


@pytest.mark.parametrize(("found", "bind"), [({}, "::"), ({}, "0.0.0.0"), ({socket.AF_INET6: IPV6}, "0.0.0.0")])
def test_loopback_is_not_advertised_to_a_remote_planner(
    found: dict[socket.AddressFamily, str], bind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No target could read from there, so the error names the settings that help."""
    set_source_addresses(found, monkeypatch)
    with pytest.raises(SettingsError, match="RFORK_BIND") as raised:
        _ = InstanceSettings(bind=bind, planner="http://planner.ai:8700").advertised_host
    assert "RFORK_ADVERTISE" in raised.value.hint


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://p:1/x", "http://p:1/x"),
        ("http://u:p@h/x", "http://***@h/x"),
        ("http://u:p/q@r@h", "http://***@h"),
        ("vllm --rfork-planner https://u:p@h -x", "vllm --rfork-planner https://***@h -x"),
    ],
)
def test_passwords_of_urls_are_redacted(text: str, expected: str) -> None:
    """Passwords may contain any characters."""
    assert expected == redacted(text)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, False),
        ({"version": "2026-11-23"}, False),
        ({"version": "files:0123"}, False),
        ({"version": "update:replica-1:3"}, True),
        ({"version": "unnamed:replica-1"}, True),
        ({"fail_if_not_forked": True}, True),
    ],
)
def test_a_version_of_a_running_server_requires_a_fork(settings: dict[str, Any], expected: bool) -> None:
    """No files are known to have it."""
    assert expected == (InstanceSettings(**settings).fork_required_reason is not None)

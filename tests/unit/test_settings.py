"""Options as users give them: by variable, by argument, and wrong."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rfork.errors import SettingsError
from rfork.settings import InstanceSettings, PlannerSettings, addresses, load, node_name, redacted


@pytest.mark.parametrize(
    ("variable", "value", "option", "expected"),
    [
        ("RFORK_TRANSPORTS", "transfer_engine, http", "transports", ("transfer_engine", "http")),
        ("RFORK_PLANNER", "http://p:1", "planner", "http://p:1"),
        ("RFORK_PLANNER", "", "planner", None),
        ("RFORK_MAX_INFLIGHT_CHUNKS", "7", "window", 7),
    ],
)
def test_a_variable_sets_its_option(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, option: str, expected: object
) -> None:
    """Lists are comma separated, and an empty variable is one that is not set."""
    monkeypatch.setenv(variable, value)
    assert expected == getattr(load(InstanceSettings), option)


def test_an_argument_wins_over_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an argument that was not given (None) leaves the variable its say."""
    monkeypatch.setenv("RFORK_PLANNER_PORT", "1")
    assert [1, 2] == [load(PlannerSettings, port=port).port for port in (None, 2)]


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("RFORK_MAX_INFLIGHT_CHUNKS", "many", "RFORK_MAX_INFLIGHT_CHUNKS: Input should be a valid integer"),
        ("RFORK_MAX_INFLIGHT_CHUNKS", "0", "RFORK_MAX_INFLIGHT_CHUNKS: Input should be greater than or equal to 1"),
        ("RFORK_TRANSPORTS", "http,pigeon", "RFORK_TRANSPORTS"),
        ("RFORK_PEER_PORT", "70000", "RFORK_PEER_PORT: Input should be less than or equal to 65535"),
    ],
)
def test_a_value_that_cannot_be_used_is_one_line_that_names_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, expected: str
) -> None:
    """Whatever pydantic found, the user reads which variable to mend."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as caught:
        load(InstanceSettings)
    assert (True, 1) == (str(caught.value).startswith(expected), len(str(caught.value).splitlines()))


@pytest.mark.parametrize(
    ("bind", "advertise", "expected"),
    [("127.0.0.1", None, "127.0.0.1"), ("10.0.0.1", "seed-7", "seed-7"), ("10.0.0.1", None, "10.0.0.1")],
)
def test_others_are_told_an_address_they_can_reach(bind: str, advertise: str | None, expected: str) -> None:
    """What is advertised wins over what is bound."""
    assert expected == InstanceSettings(bind=bind, advertise=advertise).advertised_host


BOOT_ID = "25b1112e-111c-4543-81c4-4fa2ecce3d13"
NODES = [
    ("the node itself", "uts:[4026531838]", BOOT_ID, "pod-x"),
    ("a container", "uts:[4026532177]", BOOT_ID, "boot-25b1112e111c4543"),
    ("a sandbox that tells no boot id", "uts:[4026532177]", "", "pod-x"),
    ("no Linux", None, None, "pod-x"),
]


@pytest.mark.parametrize(("where", "namespace", "boot_id", "expected"), NODES)
def test_containers_of_one_node_call_it_by_one_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    namespace: str | None,
    boot_id: str | None,
    expected: str,
) -> None:
    """The host name where that is the node's own, else what the kernel says to all of them."""
    monkeypatch.setattr("socket.gethostname", lambda: "pod-x")
    if namespace is not None and boot_id is not None:
        (tmp_path / "self/ns").mkdir(parents=True)
        (tmp_path / "self/ns/uts").symlink_to(namespace)
        (tmp_path / "sys/kernel/random").mkdir(parents=True)
        (tmp_path / "sys/kernel/random/boot_id").write_text(f"{boot_id}\n")
    assert expected == node_name(tmp_path)


def test_a_host_that_is_named_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a deployment knows better, it says."""
    monkeypatch.setenv("RFORK_NODE_NAME", "gpu-17")
    assert "gpu-17" == load(InstanceSettings).node_name


def probing(found: dict[socket.AddressFamily, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the host's default routes lead out from these addresses."""
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
def test_a_wildcard_bind_is_reached_at_an_address_of_this_host(
    found: dict[socket.AddressFamily, str], bind: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the family that there is; loopback where there is none, and no planner elsewhere."""
    probing(found, monkeypatch)
    assert expected == InstanceSettings(bind=bind, planner="http://127.0.0.1:8700").advertised_host


@pytest.mark.parametrize(("found", "bind"), [({}, "::"), ({}, "0.0.0.0"), ({socket.AF_INET6: IPV6}, "0.0.0.0")])
def test_loopback_is_not_told_to_a_planner_elsewhere(
    found: dict[socket.AddressFamily, str], bind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No fork could read from there: the settings that help are named."""
    probing(found, monkeypatch)
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
    """Whatever characters they hold."""
    assert expected == redacted(text)

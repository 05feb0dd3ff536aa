"""Messages of errors: they name the party and the setting, and contain no Python internals and no secrets."""

from __future__ import annotations

import ssl

import pytest

from rfork.errors import ALL_TENSORS, SettingsError, SourceTimeout, UnsupportedTensor, reason_of, without_frames
from rfork.settings import InstanceSettings, PlannerSettings, TlsSettings, load


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(111, "Connection refused"), "Connection refused"),
        (OSError(2, "No such file or directory", "/none"), "No such file or directory: '/none'"),
        (OSError(-2, "Name or service not known"), "Name or service not known"),
        (ssl.SSLError(1, "[SSL] PEM lib (_ssl.c:4149)"), "[SSL] PEM lib"),
        (ValueError("two\nlines"), "two lines"),
        (TimeoutError(), "TimeoutError"),
    ],
    ids=["connect", "file", "lookup", "TLS", "lines", "empty"],
)
def test_a_reason_is_one_line_without_error_numbers(error: Exception, expected: str) -> None:
    """The number of an OSError and the line of OpenSSL's wrapper are omitted; an error without a message is named."""
    assert expected == reason_of(error)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("sent nothing", "10.0.0.7:4123: sent nothing"),
        ("10.0.0.7:4999 sent nothing", "10.0.0.7:4999 sent nothing"),
    ],
)
def test_the_party_is_named_once(message: str, expected: str) -> None:
    """An address is added unless the message contains its host."""
    error = SourceTimeout(message)
    error.add_party("10.0.0.7:4123")
    error.add_party("10.0.0.7:4123")
    assert expected == str(error)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("layer.weight", "'layer.weight' cannot be captured: why"), (ALL_TENSORS, "the model cannot be captured: why")],
)
def test_state_that_cannot_be_captured_is_named(name: str, expected: str) -> None:
    """The subject is a tensor, or the model if no single tensor is at fault."""
    assert expected == str(UnsupportedTensor(name, "why"))


@pytest.mark.parametrize("secret", ["short", "long" * 100])
def test_no_message_contains_a_secret(monkeypatch: pytest.MonkeyPatch, secret: str) -> None:
    """The error names the variable and its bounds."""
    monkeypatch.setenv("RFORK_OWNER_SECRET", secret)
    with pytest.raises(SettingsError, match=r"^RFORK_OWNER_SECRET: it must have at (least 32|most 256)") as error:
        load(InstanceSettings)
    assert secret not in str(error.value)


@pytest.mark.parametrize(
    ("settings_class", "variables", "expected"),
    [
        (PlannerSettings, {"RFORK_PLANNER_STORE": "disk"}, "RFORK_PLANNER_STORE must be"),
        (PlannerSettings, {"RFORK_PLANNER_STORE": "redis://r"}, "RFORK_PLANNER_LEASE_KEYS is not set"),
        (TlsSettings, {"RFORK_TLS_KEY": "key.pem"}, "RFORK_TLS_CERTIFICATE and RFORK_TLS_KEY go together"),
        (InstanceSettings, {"RFORK_TOKEN": "t", "RFORK_TOKEN_FILE": "f"}, "RFORK_TOKEN and RFORK_TOKEN_FILE exclude"),
    ],
)
def test_an_invalid_combination_names_its_variables(
    monkeypatch: pytest.MonkeyPatch,
    settings_class: type[PlannerSettings | TlsSettings | InstanceSettings],
    variables: dict[str, str],
    expected: str,
) -> None:
    """The error begins with a variable that is set or missing."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=f"^{expected}"):
        load(settings_class)


def test_an_error_without_frames_has_no_traceback_before_it_either() -> None:
    """Neither its cause nor the error that was handled when it was raised has one, even if it came before itself."""
    first, second = SourceTimeout("first"), SourceTimeout("second")

    def fail() -> None:
        try:
            raise first
        except SourceTimeout:
            raise second from ValueError("cause")

    with pytest.raises(SourceTimeout):
        fail()
    first.__context__ = second
    assert second is without_frames(second)
    assert {None} == {each.__traceback__ for each in (first, second)}

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from rfork.control.client import PlannerClient
from rfork.errors import PlannerRefused, PlannerUnreachable, SettingsError
from rfork.settings import TlsSettings

PROBLEM = {"type": "https://rfork.dev/problems/unknown-fork", "title": "x", "status": 404, "detail": "gone"}


def client_of(answer: Callable[[httpx.Request], httpx.Response], token: str | None = None) -> PlannerClient:
    """A client whose requests all go to `answer`."""
    return PlannerClient("http://p:1/", transport=httpx.MockTransport(answer), token=token)


def raising(error: Exception) -> Callable[[httpx.Request], httpx.Response]:
    """A planner that is never reached."""

    def answer(request: httpx.Request) -> httpx.Response:
        raise error

    return answer


ODD_ANSWERS = [
    (httpx.Response(200, text="<html>"), "not-a-planner"),
    (httpx.Response(200, json={"odd": 1}), "not-a-planner"),
    (httpx.Response(302, headers={"Location": "http://elsewhere"}), "not-a-planner"),
    (httpx.Response(502, text="Bad Gateway"), "not-a-planner"),
    (httpx.Response(404, json=PROBLEM), "unknown-fork"),
]


@pytest.mark.parametrize(("response", "problem"), ODD_ANSWERS)
def test_what_is_no_answer_is_a_refusal(response: httpx.Response, problem: str) -> None:
    """Problem documents by their word; anything else is not a planner's."""
    with pytest.raises(PlannerRefused) as refused:
        client_of(lambda _: response).fork("f")
    assert (response.status_code, problem) == (refused.value.status, refused.value.problem)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (httpx.ConnectError("connection refused"), "connection refused"),
        (httpx.ReadTimeout(""), "no answer within 5 s"),
        (httpx.ReadError(""), "ReadError"),
    ],
)
def test_a_planner_that_is_away_is_named_with_the_reason(error: Exception, reason: str) -> None:
    """One line with URL and reason."""
    with pytest.raises(PlannerUnreachable) as unreachable:
        client_of(raising(error)).models()
    assert f"planner http://p:1 cannot be reached: {reason}" == str(unreachable.value)


def test_a_dead_pooled_connection_is_tried_once_more() -> None:
    """A planner that restarted has closed it; the second attempt makes a fresh one."""
    answers: Iterator[Exception | httpx.Response] = iter(
        [httpx.RemoteProtocolError("closed"), httpx.Response(200, json=[])]
    )

    def answer(request: httpx.Request) -> httpx.Response:
        following = next(answers)
        if isinstance(following, Exception):
            raise following
        return following

    assert [] == client_of(answer).models()


def test_the_token_is_shown_and_identifiers_are_quoted() -> None:
    """The planner sees the bearer token and one path segment for each identifier."""
    seen: list[tuple[str, str | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.raw_path.decode(), request.headers.get("Authorization")))
        return httpx.Response(204)

    client_of(answer, token="t").remove("a/b:1")
    assert [("/v1/instances/a%2Fb:1", "Bearer t")] == seen


@pytest.mark.parametrize("url", ["planner:8700", "ftp://p", "http://", "http://p:port", ""])
def test_a_bad_url_is_a_settings_error(url: str) -> None:
    """Told when the client is made, not at its first call."""
    with pytest.raises(SettingsError, match="planner URL"):
        PlannerClient(url)


def test_a_token_that_no_header_can_carry_is_a_settings_error() -> None:
    """Headers are ASCII."""
    with pytest.raises(SettingsError, match="token"):
        PlannerClient("http://p", token="gehe\N{LATIN SMALL LETTER I WITH DIAERESIS}m")


def test_tls_files_that_are_missing_are_a_settings_error(tmp_path: Path) -> None:
    """The line says that it is about TLS."""
    tls = TlsSettings(ca=tmp_path / "missing.pem")
    with pytest.raises(SettingsError, match="TLS files"):
        PlannerClient("https://p", tls=tls)


def test_a_closed_client_says_so() -> None:
    """No stray error of the HTTP library."""
    with client_of(lambda _: httpx.Response(200, json=[])) as client:
        pass
    with pytest.raises(PlannerUnreachable, match="closed"):
        client.models()

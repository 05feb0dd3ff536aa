"""The planner client: requests, responses, errors and event streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from rfork import __version__
from rfork.errors import PlannerRejected, PlannerUnreachable, SettingsError
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkEvent, ForkInfo, ForkRequest, InstanceInfo, InstanceReport, Placement, Rank
from rfork.settings import TlsSettings

REPORT = InstanceReport(
    instance_id="i", model="m", layout_id="a" * 32, image_bytes=1, chunk_count=1, state="loading",
    address="h:1", placement=Placement(host="h"),
)  # fmt: skip
PROBLEM = {"type": "https://rfork.dev/problems/unknown-fork", "title": "x", "status": 404, "detail": "gone"}


def client_of(handler: Callable[[httpx.Request], httpx.Response], token: str | None = None) -> PlannerClient:
    """Return a client whose requests all go to `handler`."""
    return PlannerClient("http://p:1/", transport=httpx.MockTransport(handler), token=token)


def raising(error: Exception) -> Callable[[httpx.Request], httpx.Response]:
    """Return a client of a planner whose requests all fail with this error."""

    def handler(request: httpx.Request) -> httpx.Response:
        raise error

    return handler


UNEXPECTED_RESPONSES = [
    (httpx.Response(200, text="<html>"), "not-a-planner"),
    (httpx.Response(200, json={"odd": 1}), "not-a-planner"),
    (httpx.Response(302, headers={"Location": "http://elsewhere"}), "not-a-planner"),
    (httpx.Response(502, text="Bad Gateway"), "not-a-planner"),
    (httpx.Response(404, json=PROBLEM), "unknown-fork"),
]


@pytest.mark.parametrize(("response", "problem"), UNEXPECTED_RESPONSES)
def test_unexpected_responses_are_rejected(response: httpx.Response, problem: str) -> None:
    """Problem documents are reported by their type, anything else as not a planner's."""
    with pytest.raises(PlannerRejected) as refused:
        client_of(lambda _: response).fork("f")
    assert response.status_code == refused.value.status
    assert problem == refused.value.problem


TRANSPORT_ERRORS = [
    (httpx.ReadTimeout("no data"), True),
    (httpx.ConnectTimeout("no route"), False),
    (httpx.ConnectError("refused"), False),
    (httpx.ReadError("reset"), False),
]


@pytest.mark.parametrize(("error", "silent"), TRANSPORT_ERRORS)
def test_a_read_timeout_is_reported_as_silence(error: httpx.RequestError, silent: bool) -> None:
    """`silent` distinguishes a planner that does not respond from one that is not reachable."""
    with pytest.raises(PlannerUnreachable) as unreachable:
        client_of(raising(error)).models()
    assert silent == unreachable.value.silent


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (httpx.ConnectError("connection refused"), "connection refused"),
        (httpx.ReadTimeout(""), "no response within 5 s"),
        (httpx.ReadError(""), "ReadError"),
    ],
)
def test_an_unreachable_planner_is_named_with_the_reason(error: Exception, reason: str) -> None:
    """The error is one line with URL and reason."""
    with pytest.raises(PlannerUnreachable) as unreachable:
        client_of(raising(error)).models()
    assert f"planner http://p:1 is unreachable: {reason}" == str(unreachable.value)


def test_a_stale_pooled_connection_is_retried_once() -> None:
    """A restarted planner has closed the connection; the second attempt opens a new one."""
    responses: Iterator[Exception | httpx.Response] = iter(
        [httpx.RemoteProtocolError("closed"), httpx.Response(200, json=[])]
    )

    def handler(request: httpx.Request) -> httpx.Response:
        following = next(responses)
        if isinstance(following, Exception):
            raise following
        return following

    assert [] == client_of(handler).models()


def test_the_token_is_sent_and_identifiers_are_quoted() -> None:
    """The planner receives the bearer token, and one path segment per identifier."""
    seen: list[tuple[str, str | None]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.raw_path.decode(), request.headers.get("Authorization")))
        return httpx.Response(204)

    client_of(handler, token="t").remove("a/b:1")
    assert [("/v1/instances/a%2Fb:1", "Bearer t")] == seen


@pytest.mark.parametrize("url", ["planner:8700", "ftp://p", "http://", "http://p:port", ""])
def test_a_bad_url_is_a_settings_error(url: str) -> None:
    """The error is raised by the constructor, not by the first call."""
    with pytest.raises(SettingsError, match="planner URL"):
        PlannerClient(url)


def test_a_token_that_no_header_can_carry_is_a_settings_error() -> None:
    """Headers allow only ASCII."""
    with pytest.raises(SettingsError, match="token"):
        PlannerClient("http://p", token="gehe\N{LATIN SMALL LETTER I WITH DIAERESIS}m")


def test_tls_files_that_are_missing_are_a_settings_error(tmp_path: Path) -> None:
    """The error names the variable and the file."""
    tls = TlsSettings(ca=tmp_path / "missing.pem")
    with pytest.raises(SettingsError, match=r"RFORK_TLS_CA: cannot use .*missing\.pem"):
        PlannerClient("https://p", tls=tls)


def test_plain_http_does_not_read_tls_files(tmp_path: Path) -> None:
    """Unusable TLS files are not an error of a client that does not use TLS."""
    with PlannerClient("http://p", tls=TlsSettings(ca=tmp_path / "missing.pem")) as client:
        assert "http://p" == client.url


def test_a_closed_client_raises_planner_unreachable() -> None:
    """The error of the HTTP library is converted."""
    with client_of(lambda _: httpx.Response(200, json=[])) as client:
        pass
    with pytest.raises(PlannerUnreachable, match="closed"):
        client.models()


# -- pages ------------------------------------------------------------------------------------------


def view(instance_id: str) -> dict[str, object]:
    """Return a listed instance."""
    report = REPORT.model_copy(update={"instance_id": instance_id})
    return InstanceInfo(report=report, age_s=1.0).model_dump(mode="json")


def test_lists_are_fetched_page_by_page() -> None:
    """The filter and the cursor are sent with each request."""
    pages = {
        None: {"items": [view("a"), view("b")], "next": "b"},
        "b": {"items": [view("c")], "next": "c"},
        "c": {"items": [], "next": None},
    }
    calls: list[tuple[str | None, str | None]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        after = request.url.params.get("after")
        calls.append((request.url.params.get("model"), after))
        return httpx.Response(200, json=pages[after])

    found = [each.report.instance_id for each in client_of(handler).instances(model="m")]
    assert ["a", "b", "c"] == found
    assert [("m", None), ("m", "b"), ("m", "c")] == calls


def test_the_ranks_of_a_replica_are_requested() -> None:
    """Filters that are not set are not sent."""
    seen: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.query.decode())
        return httpx.Response(200, json={"items": [view("pod-main-tp0")], "next": None})

    with client_of(handler) as client:
        found = [each.report.instance_id for each in client.instances(replica="pod")]
    assert ["pod-main-tp0"] == found
    assert ["replica=pod&limit=1000"] == seen


def test_repeating_pages_are_rejected() -> None:
    """They do not cause an endless loop."""
    with pytest.raises(PlannerRejected, match="pages repeat"):
        client_of(lambda _: httpx.Response(200, json={"items": [], "next": "a"})).forks()


def test_an_instance_is_drained_by_force_only_on_request() -> None:
    """By default the planner's own rule applies."""
    seen: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(f"{request.method} {request.url.raw_path.decode()}")
        return httpx.Response(200, json=view("s"))

    with client_of(handler) as client:
        client.drain("s")
        client.drain("s", force=True)
    assert ["POST /v1/instances/s/drain", "POST /v1/instances/s/drain?force=true"] == seen


# -- a busy planner ---------------------------------------------------------------------------------


def busy(status: int, retry_after: str | None) -> httpx.Response:
    """Return the problem of a busy planner."""
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    return httpx.Response(status, headers=headers, json={**PROBLEM, "type": "https://x/busy", "status": status})


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_planner_is_retried_once(status: int) -> None:
    """A report succeeds if the planner is ready again soon."""
    responses = iter([busy(status, "0"), httpx.Response(200, json={"heartbeat_s": 1.0, "lease_keys": ["a2V5"]})])
    assert 1.0 == client_of(lambda _: next(responses)).report(REPORT).heartbeat_s


BUSY = [
    (429, ("0", "0"), 2, "retry in 0 s"),  # only one retry
    (503, ("60",), 1, "retry in 60 s"),  # longer than the timeout
    (503, (None,), 1, ""),
    (503, ("Fri, 31 Dec 1999 23:59:59 GMT",), 1, ""),
    (404, ("0",), 1, ""),
]


@pytest.mark.parametrize(("status", "retry_after_values", "requests", "hint"), BUSY)
def test_a_planner_that_stays_busy_is_an_error(
    status: int, retry_after_values: tuple[str | None, ...], requests: int, hint: str
) -> None:
    """The hint has the retry time, if the planner sent one."""
    responses = [busy(status, each) for each in retry_after_values]
    calls: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(request.method)
        return responses[len(calls) - 1]

    with pytest.raises(PlannerRejected) as refused:
        client_of(handler).request_plan(ForkRequest(fork_id="f", instance=REPORT))
    assert status == refused.value.status
    assert requests == len(calls)
    assert hint == refused.value.hint


def test_only_reports_and_plan_requests_are_retried() -> None:
    """Other calls fail immediately; the caller may retry."""
    with pytest.raises(PlannerRejected) as refused:
        client_of(lambda _: busy(503, "0")).models()
    assert "retry in 0 s" == refused.value.hint


# -- events -----------------------------------------------------------------------------------------

FORK = ForkInfo(
    fork_id="f", instance_id="i", model="m", rank=Rank(), state="running", age_s=1.0, chunk_count=1,
    image_bytes=1,
)  # fmt: skip
PLANNED, ENDED = ForkEvent(kind="planned", fork=FORK), ForkEvent(kind="ended", fork=FORK)


def block(event: ForkEvent) -> str:
    """Return an event in the planner's format."""
    return f"id: 1\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n"


def streaming(*pieces: str, error: Exception | None = None) -> PlannerClient:
    """Return a client whose planner streams these pieces, and then ends or breaks the stream."""

    def body() -> Iterator[bytes]:
        for piece in pieces:
            yield piece.encode()
        if error is not None:
            raise error

    return client_of(lambda _: httpx.Response(200, content=body()))


STREAMS = [
    (("retry: 2000\n\n", ": keep-alive\n\n"), []),
    ((block(PLANNED), ": keep-alive\n\n" + block(ENDED)), [PLANNED, ENDED]),
    ((block(PLANNED)[:50], block(PLANNED)[50:-1], "\n"), [PLANNED]),
    ((block(PLANNED).replace("\n", "\r\n"),), [PLANNED]),
    ((block(PLANNED), block(ENDED)[:-2]), [PLANNED]),  # an incomplete event is ignored
]


@pytest.mark.parametrize(("pieces", "expected"), STREAMS)
def test_events_are_read_as_they_arrive(pieces: tuple[str, ...], expected: list[ForkEvent]) -> None:
    """Comments and other fields are ignored; the end of the stream ends the iteration."""
    with streaming(*pieces).events() as events:
        assert expected == list(events)


def test_a_broken_stream_is_an_error() -> None:
    """It is raised after the events received before."""
    events = streaming(block(PLANNED), error=httpx.ReadTimeout("")).events(silence_s=7.0)
    assert PLANNED == next(events)
    with pytest.raises(PlannerUnreachable, match="no response within 7 s"):
        next(events)


def test_an_invalid_event_is_rejected() -> None:
    """It comes from another program or another release."""
    with pytest.raises(PlannerRejected, match="unexpected response from http://p:1 to GET /v1/events"):
        next(streaming("data: {}\n\n").events())


def test_closing_a_stream_ends_the_iteration() -> None:
    """It also ends for a thread that is waiting for the next event."""
    events = streaming(block(PLANNED), block(ENDED)).events()
    next(events)
    events.close()
    assert [] == list(events)


def test_too_many_event_streams_are_rejected() -> None:
    """The problem is raised by `events` itself, not by the first event."""
    with pytest.raises(PlannerRejected) as refused:
        client_of(lambda _: busy(503, "10")).events()
    assert 503 == refused.value.status
    assert "busy" == refused.value.problem
    assert "retry in 10 s" == refused.value.hint


SKEWED = [
    httpx.Response(200, json={"odd": 1}, headers={"Rfork-Version": "99.0"}),
    httpx.Response(
        422,
        json=PROBLEM | {"type": "https://rfork.dev/problems/invalid", "status": 422, "detail": "an unknown field"},
        headers={"Rfork-Version": "99.0"},
    ),
]


@pytest.mark.parametrize("response", SKEWED)
def test_another_release_of_the_planner_is_named(response: httpx.Response) -> None:
    """The hint names it, whichever side does not understand the other."""
    with pytest.raises(PlannerRejected) as refused:
        client_of(lambda _: response).report(REPORT)
    assert "the planner runs 99.0" in refused.value.hint
    assert __version__ in refused.value.hint


def test_the_same_release_is_not_blamed() -> None:
    """A rejection by a planner of the same release is the caller's mistake."""
    handler = httpx.Response(422, json=PROBLEM | {"status": 422}, headers={"Rfork-Version": __version__})
    with pytest.raises(PlannerRejected) as refused:
        client_of(lambda _: handler).report(REPORT)
    assert "" == refused.value.hint


def test_a_password_in_the_url_is_sent_but_never_shown() -> None:
    """It is sent as a header; errors show the URL without it."""
    seen: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers["Authorization"])
        assert "hush" not in str(request.url)
        raise httpx.ConnectError("refused")

    client = PlannerClient("http://me:hush@p:1/", transport=httpx.MockTransport(handler))
    with client, pytest.raises(PlannerUnreachable) as error:
        client.models()
    assert ["Basic bWU6aHVzaA=="] == seen
    assert "http://p:1" == client.url
    assert "hush" not in str(error.value)


@pytest.mark.parametrize("url", ["http://me:hu/sh@p", "http://me:hu@sh@p:x", "ftp://me:hush@p", "http://me:hush@"])
def test_an_invalid_url_is_shown_without_its_password(url: str) -> None:
    """The parser's reason does not contain it either."""
    with pytest.raises(SettingsError) as error:
        PlannerClient(url)
    assert "hu" not in str(error.value)

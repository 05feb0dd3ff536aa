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
    """A client whose requests all go to `handler`."""
    return PlannerClient("http://p:1/", transport=httpx.MockTransport(handler), token=token)


def raising(error: Exception) -> Callable[[httpx.Request], httpx.Response]:
    """A planner that is never reached."""

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
def test_what_is_no_answer_is_a_refusal(response: httpx.Response, problem: str) -> None:
    """Problem documents by their word; anything else is not a planner's."""
    with pytest.raises(PlannerRejected) as refused:
        client_of(lambda _: response).fork("f")
    assert (response.status_code, problem) == (refused.value.status, refused.value.problem)


TRANSPORT_ERRORS = [
    (httpx.ReadTimeout("no word"), True),
    (httpx.ConnectTimeout("nobody there"), False),
    (httpx.ConnectError("refused"), False),
    (httpx.ReadError("reset"), False),
]


@pytest.mark.parametrize(("error", "silent"), TRANSPORT_ERRORS)
def test_a_planner_that_took_the_request_may_be_at_it_still(error: httpx.RequestError, silent: bool) -> None:
    """Who asks knows silence from absence."""
    with pytest.raises(PlannerUnreachable) as unreachable:
        client_of(raising(error)).models()
    assert silent == unreachable.value.silent


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
    responses: Iterator[Exception | httpx.Response] = iter(
        [httpx.RemoteProtocolError("closed"), httpx.Response(200, json=[])]
    )

    def handler(request: httpx.Request) -> httpx.Response:
        following = next(responses)
        if isinstance(following, Exception):
            raise following
        return following

    assert [] == client_of(handler).models()


def test_the_token_is_shown_and_identifiers_are_quoted() -> None:
    """The planner sees the bearer token and one path segment for each identifier."""
    seen: list[tuple[str, str | None]] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append((request.url.raw_path.decode(), request.headers.get("Authorization")))
        return httpx.Response(204)

    client_of(handler, token="t").remove("a/b:1")
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
    """The line names the variable and the file."""
    tls = TlsSettings(ca=tmp_path / "missing.pem")
    with pytest.raises(SettingsError, match=r"RFORK_TLS_CA: cannot use .*missing\.pem"):
        PlannerClient("https://p", tls=tls)


def test_plain_http_reads_no_tls_files(tmp_path: Path) -> None:
    """They are no planner's business that speaks no TLS: who uses them says what is wrong with them."""
    with PlannerClient("http://p", tls=TlsSettings(ca=tmp_path / "missing.pem")) as client:
        assert "http://p" == client.url


def test_a_closed_client_says_so() -> None:
    """No stray error of the HTTP library."""
    with client_of(lambda _: httpx.Response(200, json=[])) as client:
        pass
    with pytest.raises(PlannerUnreachable, match="closed"):
        client.models()


# -- pages ------------------------------------------------------------------------------------------


def view(instance_id: str) -> dict[str, object]:
    """An instance as it is listed."""
    report = REPORT.model_copy(update={"instance_id": instance_id})
    return InstanceInfo(report=report, age_s=1.0).model_dump(mode="json")


def test_lists_are_fetched_page_after_page() -> None:
    """The filter and the cursor go with each request."""
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
    assert (["a", "b", "c"], [("m", None), ("m", "b"), ("m", "c")]) == (found, calls)


def test_the_ranks_of_one_server_are_asked_for() -> None:
    """Filters that were not given are not sent."""
    seen: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request.url.query.decode())
        return httpx.Response(200, json={"items": [view("pod-main-tp0")], "next": None})

    with client_of(handler) as client:
        found = [each.report.instance_id for each in client.instances(replica="pod")]
    assert (["pod-main-tp0"], ["replica=pod&limit=1000"]) == (found, seen)


def test_pages_that_go_in_circles_are_a_refusal() -> None:
    """Not a loop without an end."""
    with pytest.raises(PlannerRejected, match="in circles"):
        client_of(lambda _: httpx.Response(200, json={"items": [], "next": "a"})).forks()


def test_an_instance_is_drained_by_force_only_when_told() -> None:
    """The planner's own default holds otherwise."""
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
    """A problem that may be over in a while."""
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    return httpx.Response(status, headers=headers, json={**PROBLEM, "type": "https://x/busy", "status": status})


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_planner_is_asked_once_more(status: int) -> None:
    """A report gets through, where the planner says that it will soon answer."""
    responses = iter([busy(status, "0"), httpx.Response(200, json={"heartbeat_s": 1.0, "lease_keys": ["a2V5"]})])
    assert 1.0 == client_of(lambda _: next(responses)).report(REPORT).heartbeat_s


BUSY = [
    (429, ("0", "0"), 2, "ask again in 0 s"),  # once more, not for ever
    (503, ("60",), 1, "ask again in 60 s"),  # longer than the call may take
    (503, (None,), 1, ""),
    (503, ("Fri, 31 Dec 1999 23:59:59 GMT",), 1, ""),
    (404, ("0",), 1, ""),
]


@pytest.mark.parametrize(("status", "retry_after_values", "requests", "hint"), BUSY)
def test_a_planner_that_stays_busy_is_a_refusal(
    status: int, retry_after_values: tuple[str | None, ...], requests: int, hint: str
) -> None:
    """With when to ask again, if the planner says so."""
    responses = [busy(status, each) for each in retry_after_values]
    calls: list[str] = []

    def handler(request: httpx.Request) -> httpx.Response:
        calls.append(request.method)
        return responses[len(calls) - 1]

    with pytest.raises(PlannerRejected) as refused:
        client_of(handler).request_plan(ForkRequest(fork_id="f", instance=REPORT))
    assert (status, requests, hint) == (refused.value.status, len(calls), refused.value.hint)


def test_only_reports_and_requests_are_patient() -> None:
    """Whoever lists may ask again by itself."""
    with pytest.raises(PlannerRejected) as refused:
        client_of(lambda _: busy(503, "0")).models()
    assert "ask again in 0 s" == refused.value.hint


# -- events -----------------------------------------------------------------------------------------

FORK = ForkInfo(
    fork_id="f", instance_id="i", model="m", rank=Rank(), state="running", age_s=1.0, chunk_count=1,
    image_bytes=1,
)  # fmt: skip
PLANNED, ENDED = ForkEvent(kind="planned", fork=FORK), ForkEvent(kind="ended", fork=FORK)


def block(event: ForkEvent) -> str:
    """An event as the planner writes it."""
    return f"id: 1\nevent: {event.kind}\ndata: {event.model_dump_json()}\n\n"


def streaming(*pieces: str, error: Exception | None = None) -> PlannerClient:
    """A client whose planner sends a stream in these pieces, and then ends it, or breaks it."""

    def body() -> Iterator[bytes]:
        for piece in pieces:
            yield piece.encode()
        if error is not None:
            raise error

    return client_of(lambda _: httpx.Response(200, content=body()))


STREAMS = [
    (("retry: 2000\n\n", ": still here\n\n"), []),
    ((block(PLANNED), ": still here\n\n" + block(ENDED)), [PLANNED, ENDED]),
    ((block(PLANNED)[:50], block(PLANNED)[50:-1], "\n"), [PLANNED]),
    ((block(PLANNED).replace("\n", "\r\n"),), [PLANNED]),
    ((block(PLANNED), block(ENDED)[:-2]), [PLANNED]),  # what is cut off is none
]


@pytest.mark.parametrize(("pieces", "expected"), STREAMS)
def test_events_are_read_as_they_come(pieces: tuple[str, ...], expected: list[ForkEvent]) -> None:
    """Comments and other fields are passed over; the end of the stream ends the iteration."""
    with streaming(*pieces).events() as events:
        assert expected == list(events)


def test_a_stream_that_breaks_is_told_of() -> None:
    """After the events that came before."""
    events = streaming(block(PLANNED), error=httpx.ReadTimeout("")).events(silence_s=7.0)
    assert PLANNED == next(events)
    with pytest.raises(PlannerUnreachable, match="no answer within 7 s"):
        next(events)


def test_an_event_that_is_none_is_a_refusal() -> None:
    """Another program, or another release."""
    with pytest.raises(PlannerRejected, match="no planner's answer to GET /v1/events"):
        next(streaming("data: {}\n\n").events())


def test_a_stream_that_is_closed_ends() -> None:
    """For whoever iterates it as well."""
    events = streaming(block(PLANNED), block(ENDED)).events()
    next(events)
    events.close()
    assert [] == list(events)


def test_too_many_readers_are_refused() -> None:
    """The problem is raised by `events` itself, not by its first event."""
    with pytest.raises(PlannerRejected) as refused:
        client_of(lambda _: busy(503, "10")).events()
    assert (503, "busy", "ask again in 10 s") == (
        refused.value.status, refused.value.problem, refused.value.hint,
    )  # fmt: skip


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
    """Whichever side does not understand the other."""
    with pytest.raises(PlannerRejected) as refused:
        client_of(lambda _: response).report(REPORT)
    assert "the planner is 99.0" in refused.value.hint
    assert __version__ in refused.value.hint


def test_a_planner_of_the_same_release_is_not_said_to_be_of_another() -> None:
    """What it refuses is then the caller's own mistake."""
    handler = httpx.Response(422, json=PROBLEM | {"status": 422}, headers={"Rfork-Version": __version__})
    with pytest.raises(PlannerRejected) as refused:
        client_of(lambda _: handler).report(REPORT)
    assert "" == refused.value.hint


def test_a_password_in_the_url_is_sent_and_never_shown() -> None:
    """As a header; errors name the URL without it."""
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
def test_a_url_that_cannot_be_used_is_shown_without_its_password(url: str) -> None:
    """Nor does the parser's reason quote a part of it."""
    with pytest.raises(SettingsError) as error:
        PlannerClient(url)
    assert "hu" not in str(error.value)

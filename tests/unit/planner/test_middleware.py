"""Middleware: request ids and log, roles, rate per caller, size and duration of the body."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from planner.auth import Auth
from planner.middleware import AuthMiddleware, BodyLimit, CallerKey, RateLimit, RequestLog
from rfork.logs import logger
from rfork.settings import PlannerSettings
from tests.unit.planner.builders import FakeTime

CALLER_A: CallerKey = (b"", "10.0.0.1")
CALLER_B: CallerKey = (b"", "10.0.0.2")


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the received body."""
    body = await Request(scope, receive).body()
    await PlainTextResponse(body)(scope, receive, send)


def http_client(app: ASGIApp, address: str = "10.0.0.1") -> httpx.AsyncClient:
    """Return a client with this address."""
    transport = httpx.ASGITransport(app, client=(address, 1), raise_app_exceptions=False)
    return httpx.AsyncClient(base_url="http://planner", transport=transport)


async def stream_pieces(*pieces: bytes) -> AsyncIterator[bytes]:
    """Yield a body of undeclared length."""
    for piece in pieces:
        yield piece


BUCKETS = [
    # requests per second, then alternating (time, requests sent), requests accepted
    (5.0, [(0, 12)], [10]),
    (5.0, [(0, 12), (0.2, 2), (0.25, 1), (0.4, 1)], [10, 1, 0, 1]),
    (5.0, [(0, 1), (100, 12)], [1, 10]),
    (0.1, [(0, 2), (9.9, 1), (10, 1)], [1, 0, 1]),
    (1.5, [(0, 4), (2, 4)], [3, 3]),
]  # fmt: skip


@pytest.mark.parametrize(("rate", "sent", "expected"), BUCKETS)
def test_a_bucket_holds_two_seconds_of_requests(
    time: FakeTime, rate: float, sent: Iterable[tuple[float, int]], expected: list[int]
) -> None:
    """Rejected requests cost nothing, and a rate below one lets single requests pass."""
    limit, began, passed = RateLimit(rate, time.clock.monotonic), time.now, []
    for at, requests in sent:
        time.now = began + at
        passed.append(sum(limit.wait_s(CALLER_A) == 0 for _ in range(requests)))
    assert expected == passed


def test_a_rejection_states_the_wait(time: FakeTime) -> None:
    """After exactly that time the next request passes."""
    limit = RateLimit(4.0, time.clock.monotonic)
    waits = [limit.wait_s(CALLER_A) for _ in range(9)]
    time.now += waits[-1]
    assert [0.0] * 8 + [0.25] == waits
    assert 0.0 == limit.wait_s(CALLER_A)


def test_callers_do_not_share_a_bucket(time: FakeTime) -> None:
    """Another address, or another token, is another caller."""
    limit = RateLimit(0.5, time.clock.monotonic)
    for caller in (CALLER_A, CALLER_B, (b"token", "10.0.0.1")):
        assert 0 == limit.wait_s(caller)
    for caller in (CALLER_A, CALLER_B):
        assert 0 < limit.wait_s(caller)


def test_the_number_of_tracked_callers_is_limited(time: FakeTime) -> None:
    """The least recent one is dropped, and then has a full bucket."""
    limit = RateLimit(1.0, time.clock.monotonic, max_callers=2)
    three = (b"", "10.0.0.3")
    passed = [
        limit.wait_s(caller) == 0
        for caller in (CALLER_A, CALLER_B, CALLER_A, three, CALLER_A, CALLER_B, CALLER_B, CALLER_B)
    ]
    assert [True, True, True, True, False, True, True, False] == passed


async def test_too_many_requests_are_a_problem(time: FakeTime) -> None:
    """The response is 429 with whole seconds; health checks and other addresses are unaffected."""
    limit = RateLimit(0.25, time.clock.monotonic)
    app = AuthMiddleware(echo, Auth(PlannerSettings()), limit, _ignore_rejection)
    async with http_client(app) as web, http_client(app, "10.0.0.2") as other:
        responses = [await web.get("/v1/models") for _ in range(2)]
        health = [(await web.get(path)).status_code for path in ("/healthz", "/readyz")]
        assert [200, 429] == [response.status_code for response in responses]
        assert "4" == responses[1].headers["retry-after"]
        assert "https://rfork.dev/problems/too-many-requests" == responses[1].json()["type"]
        assert [200, 200] == health
        assert 200 == (await other.get("/v1/models")).status_code


async def test_guessed_tokens_share_one_rate_limit(time: FakeTime) -> None:
    """Guesses count for their address, and the valid token has its own bucket."""
    auth = Auth(PlannerSettings(token="right"))  # type: ignore[arg-type]
    async with http_client(AuthMiddleware(echo, auth, RateLimit(1.0, time.clock.monotonic), _ignore_rejection)) as web:
        statuses = [
            (await web.get("/v1/models", headers={"Authorization": f"Bearer {token}"})).status_code
            for token in ("guess-1", "guess-2", "guess-3", "right")
        ]
    assert [401, 401, 429, 200] == statuses


async def test_the_role_is_checked_before_the_route_runs(tmp_path: Path) -> None:
    """The body is not read either."""
    path = tmp_path / "tokens"
    path.write_text("reader read-1\n")
    auth = Auth(PlannerSettings(tokens_file=path))
    async with http_client(AuthMiddleware(echo, auth, None, _ignore_rejection)) as web:
        auth_headers = {"Authorization": "Bearer read-1"}
        responses = [
            await web.get("/v1/forks", headers=auth_headers),
            await web.post("/v1/forks", headers=auth_headers),
        ]
    assert [200, 403] == [response.status_code for response in responses]
    assert "application/problem+json" == responses[1].headers["content-type"]


BODIES = [
    # pieces of the body, whether its length is declared, status
    ((b"12345", b"67890"), False, 200),
    ((b"1234567890",), True, 200),
    ((b"",), True, 200),
    ((b"12345678901",), True, 413),
    ((b"12345", b"678901"), False, 413),
]


@pytest.mark.parametrize(("pieces", "length_known", "status"), BODIES)
async def test_a_body_up_to_the_limit_is_accepted(pieces: tuple[bytes, ...], length_known: bool, status: int) -> None:
    """Ten bytes pass unchanged, eleven are rejected and the connection is closed."""
    async with http_client(BodyLimit(echo, limit=10, on_refused=_ignore_rejection)) as web:
        response = await web.put("/x", content=b"".join(pieces) if length_known else stream_pieces(*pieces))
    expected = b"".join(pieces) if status == 200 else response.content
    assert status == response.status_code
    assert expected == response.content
    assert ("close" if status == 413 else None) == response.headers.get("connection")


async def test_a_body_that_does_not_arrive_ends_with_408() -> None:
    """A trickling connection does not occupy a request for ever."""

    async def trickle() -> AsyncIterator[bytes]:
        yield b"1"
        await asyncio.Event().wait()

    async with http_client(BodyLimit(echo, limit=10, on_refused=_ignore_rejection, within_s=0.01)) as web:
        response = await web.put("/x", content=trickle())
    assert 408 == response.status_code
    assert "https://rfork.dev/problems/request-timeout" == response.json()["type"]
    assert "close" == response.headers["connection"]


async def test_a_request_that_waits_after_its_body_is_not_limited() -> None:
    """The timeout covers the body only: a stream may last, and still notices a disconnect."""
    received: list[str] = []
    incoming: list[Message] = [
        {"type": "http.request", "body": b"1", "more_body": False},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return incoming.pop(0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        received.extend([(await receive())["type"], (await receive())["type"]])

    await BodyLimit(app, limit=10, on_refused=_ignore_rejection)(
        _scope((b"content-length", b"1")), receive, _fail_on_send
    )
    assert ["http.request", "http.disconnect"] == received


async def test_a_client_that_disconnects_during_its_body_runs_no_route() -> None:
    """There would be no reader for the response."""
    incoming: list[Message] = [
        {"type": "http.request", "body": b"1", "more_body": True},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Message:
        return incoming.pop(0)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise RuntimeError("the route ran")

    await BodyLimit(app, limit=10, on_refused=_ignore_rejection)(
        _scope((b"content-length", b"9")), receive, _fail_on_send
    )
    assert [] == incoming


async def test_log_lines_of_a_request_carry_its_id(caplog: pytest.LogCaptureFixture) -> None:
    """Lines of the next request carry the next id."""
    ids: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        logger("planner.test").warning("within")
        await PlainTextResponse("")(scope, receive, send)

    async with http_client(RequestLog(app)) as web:
        for headers in ({"X-Request-Id": "find-me"}, {}):
            ids.append((await web.get("/x", headers=headers)).headers["x-request-id"])
    logger("planner.test").warning("after")
    assert "find-me" == ids[0]
    assert [f"within request_id={each}" for each in ids] + ["after"] == [
        record.getMessage() for record in caplog.records
    ]


LINES = [
    # requested path, status, log level
    ("/there", 200, logging.DEBUG),
    ("/not%0athere", 404, logging.INFO),
    ("/bug", 500, logging.INFO),
]


@pytest.mark.parametrize(("path", "status", "level"), LINES)
async def test_failed_requests_are_logged(caplog: pytest.LogCaptureFixture, path: str, status: int, level: int) -> None:
    """Others are logged at `debug` only; a path stays quoted, so that it cannot break the line."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/bug":
            raise RuntimeError
        await PlainTextResponse("", status_code=404 if "not" in scope["path"] else 200)(scope, receive, send)

    caplog.set_level(logging.DEBUG, "planner.http")
    async with http_client(RequestLog(app)) as web:
        await web.get(path)
    lines = [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "planner.http"]
    assert [(level, True)] == [
        (found, f"path={'/not%0Athere' if status == 404 else path} status={status}" in text) for found, text in lines
    ]


def _scope(*headers: tuple[bytes, bytes]) -> Scope:
    return {"type": "http", "method": "PUT", "path": "/x", "headers": list(headers)}


async def _fail_on_send(message: Message) -> None:
    raise RuntimeError(f"answered {message}")


def _ignore_rejection(slug: str) -> None:
    """Ignore the rejection."""

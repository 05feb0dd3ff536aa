"""The integrations' client of the planner, without sockets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from planner.app import create_app
from planner.integrations.planner_api import AsyncPlannerClient, PlannerApi, PlannerUnavailable
from rfork.asyncio_timeout import timeout
from rfork.errors import SettingsError
from rfork.planner_client import client as planner_client
from rfork.planner_client.ownership import OWNER_HEADER
from rfork.schema import ScaleUp
from rfork.settings import InstanceSettings, PlannerSettings
from tests.unit.planner.builders import FakeTime, fork_request, seed_report
from tests.unit.planner.threadsafe_asgi_transport import ThreadsafeAsgiTransport

URL = "http://planner:8700"
SCALEUP = ScaleUp(scaleup_id="up", model="m", replicas=3)
EMPTY: dict[str, object] = {"items": [], "next": None}
ResponseHandler = Callable[[httpx.Request], httpx.Response]
MakeClient = Callable[..., AsyncPlannerClient]


def settings(**changes: object) -> InstanceSettings:
    """Return settings of an integration."""
    return InstanceSettings.model_validate({"planner": URL, "token": "rule", **changes})


@pytest.fixture
async def client_with_handler() -> AsyncIterator[MakeClient]:
    """A function that returns a client with this handler of requests and these settings; closed after the test."""
    clients: list[AsyncPlannerClient] = []

    def make(handler: ResponseHandler, **changes: object) -> AsyncPlannerClient:
        clients.append(AsyncPlannerClient(settings(**changes), httpx.MockTransport(handler)))
        return clients[-1]

    yield make
    for each in clients:
        await each.close()


@pytest.fixture
async def planner_api(time: FakeTime) -> AsyncIterator[AsyncPlannerClient]:
    """A client of a planner that requires a token and knows a seed and a fork."""
    planner_settings = PlannerSettings.model_validate({"token": "rule", "batch_window_s": 0, "scaleup_wait_s": 0})
    app = create_app(planner_settings, time.clock)
    planner_api = AsyncPlannerClient(settings(), ThreadsafeAsgiTransport(app))
    own = {"Authorization": "Bearer rule", "Content-Type": "application/json", OWNER_HEADER: "o" * 32}
    async with httpx.AsyncClient(base_url=URL, transport=httpx.ASGITransport(app), headers=own, trust_env=False) as web:
        for name in "abc":
            report = seed_report(name, model="n" if name == "c" else "m")
            await web.put(f"/v1/instances/{name}", content=report.model_dump_json())
        await web.post("/v1/forks", content=fork_request("t").model_dump_json())
    yield planner_api
    await planner_api.close()


async def test_every_call_reaches_the_planner(planner_api: PlannerApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists with several pages, models, all operations on scale-ups, and the removal of an unknown instance."""
    monkeypatch.setattr(planner_client, "PAGE", 2)
    everyone = [view.report.instance_id for view in await planner_api.instances()]
    of_one = [view.report.instance_id for view in await planner_api.instances(model="n")]
    forks = [fork.fork_id for fork in await planner_api.forks()]
    models = {(row.model, row.seeds) for row in await planner_api.models()}
    announcement = await planner_api.announce(SCALEUP)
    listed = await planner_api.scaleups()
    for _ in range(2):
        await planner_api.withdraw("up")
        await planner_api.remove("a")
    left = [view.report.instance_id for view in await planner_api.instances(model="m")]
    assert ["a", "b", "c", "t"] == everyone
    assert ["c"] == of_one
    assert ["fork-t"] == forks
    assert {("m", 2), ("n", 1)} == models
    assert "they fork from 2 seeds" == announcement.reason
    assert 1 == len(listed)
    assert () == await planner_api.scaleups()
    assert ["b", "t"] == left


async def test_names_are_quoted(client_with_handler: MakeClient) -> None:
    """Any id is one part of a path."""
    paths: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.raw_path)
        return httpx.Response(204)

    planner_api = client_with_handler(handler)
    await planner_api.remove("a/../b")
    await planner_api.withdraw("a:b")
    assert [b"/v1/instances/a%2F..%2Fb", b"/v1/scaleups/a:b"] == paths


def problem_response(status: int, slug: str, detail: str) -> httpx.Response:
    """Return a problem document."""
    problem = {"type": f"https://rfork.dev/problems/{slug}", "title": "x", "status": status, "detail": detail}
    return httpx.Response(status, json=problem)


def unreachable(request: httpx.Request) -> httpx.Response:
    """Refuse the connection."""
    raise httpx.ConnectError("connection refused")


NO_PLANNER = "; check that RFORK_PLANNER is the URL of an rfork planner of this release"
UNAVAILABLE_CASES: list[tuple[ResponseHandler, str]] = [
    (
        unreachable,
        f"planner {URL} is unreachable: connection refused; start it (`rfork planner`), or correct RFORK_PLANNER",
    ),
    (
        lambda _: problem_response(503, "store-unavailable", "the store is unavailable"),
        f"planner {URL} refused GET /v1/instances: the store is unavailable",
    ),
    (
        lambda _: problem_response(403, "forbidden", "this requires the role reader; the token has the role instance"),
        f"planner {URL} refused GET /v1/instances: this requires the role reader; "
        "the token has the role instance; "
        "set RFORK_TOKEN, or the file RFORK_TOKEN_FILE, to one of the planner's tokens",
    ),
    (
        lambda _: httpx.Response(200, text="<html>"),
        f"unexpected response from {URL} to GET /v1/instances (status 200): body: Invalid JSON: "
        "expected value at line 1 column 1" + NO_PLANNER,
    ),
]


@pytest.mark.parametrize(("handler", "expected"), UNAVAILABLE_CASES)
async def test_an_unavailable_planner_is_reported_in_one_line(
    client_with_handler: MakeClient, handler: ResponseHandler, expected: str
) -> None:
    """It names the request and the cause."""
    with pytest.raises(PlannerUnavailable) as unavailable:
        await client_with_handler(handler).instances()
    assert f"GET /v1/instances: {expected}" == str(unavailable.value)


async def test_the_timeout_covers_all_pages_of_a_call(client_with_handler: MakeClient) -> None:
    """It applies to the call, not to each page."""
    request_count = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal request_count
        request_count += 1
        return httpx.Response(200, content=json.dumps({"items": [], "next": f"{request_count:09}"}))

    with pytest.raises(PlannerUnavailable, match=r"GET /v1/forks: planner .* no response within 0\.05 s"):
        await client_with_handler(handler, planner_timeout_s=0.05).forks()


async def test_a_planner_that_does_not_respond_delays_no_other_thread_of_the_loop(
    client_with_handler: MakeClient,
) -> None:
    """The event loop's own pool resolves the names of engines and of the API server."""
    released = threading.Event()

    def handler(request: httpx.Request) -> httpx.Response:
        released.wait(10)
        return httpx.Response(200, json=EMPTY)

    planner_api = client_with_handler(handler, planner_timeout_s=10)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    call = asyncio.create_task(planner_api.instances())
    await asyncio.sleep(0)
    try:
        async with timeout(5):
            await asyncio.to_thread(int)
    finally:
        released.set()
    assert () == await call


async def test_a_closed_client_is_unavailable(client_with_handler: MakeClient) -> None:
    """It raises no other error."""
    planner_api = client_with_handler(lambda _: httpx.Response(200, json=EMPTY))
    await planner_api.close()
    with pytest.raises(PlannerUnavailable, match=f"GET /v1/instances: the client of planner {URL} is closed"):
        await planner_api.instances()


def test_a_missing_planner_is_a_settings_error() -> None:
    """Before any request."""
    with pytest.raises(SettingsError, match="no planner is set"):
        AsyncPlannerClient(settings(planner=None))


def test_unusable_tls_files_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of RFORK_TLS_CA."""
    (tmp_path / "ca").write_text("no certificate")
    monkeypatch.setenv("RFORK_TLS_CA", str(tmp_path / "ca"))
    with pytest.raises(SettingsError, match="invalid TLS files of the planner client"):
        AsyncPlannerClient(settings(planner="https://planner"))

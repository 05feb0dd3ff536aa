"""The hooks' client of the planner, without sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from planner.app import create_app
from planner.integrations import planner_client
from planner.integrations.planner_api import PlannerApi, PlannerUnavailable
from planner.integrations.planner_client import PlannerRestClient
from rfork.errors import SettingsError
from rfork.planner_client.ownership import OWNER_HEADER
from rfork.schema import ScaleUp
from rfork.settings import InstanceSettings, PlannerSettings
from tests.unit.planner.builders import FakeTime, fork_request, seed_report

URL = "http://planner:8700"
SCALEUP = ScaleUp(scaleup_id="up", model="m", replicas=3)
EMPTY: dict[str, object] = {"items": [], "next": None}
ResponseHandler = Callable[[httpx.Request], httpx.Response]


def settings(**changes: object) -> InstanceSettings:
    """Of a hook."""
    return InstanceSettings.model_validate({"planner": URL, "token": "rule", **changes})


def client_with_handler(handler: ResponseHandler, **changes: object) -> PlannerRestClient:
    """A client whose requests are answered so."""
    return PlannerRestClient(settings(**changes), httpx.MockTransport(handler))


@pytest.fixture
async def planner_api(time: FakeTime) -> AsyncIterator[PlannerRestClient]:
    """The client of a planner that wants a token and knows a seed and a fork."""
    app = create_app(PlannerSettings.model_validate({"token": "rule", "batch_s": 0, "gather_s": 0}), time.clock)
    planner_api = PlannerRestClient(settings(), httpx.ASGITransport(app))
    own = {"Authorization": "Bearer rule", "Content-Type": "application/json", OWNER_HEADER: "o" * 32}
    async with httpx.AsyncClient(base_url=URL, transport=httpx.ASGITransport(app), headers=own, trust_env=False) as web:
        for name in "abc":
            report = seed_report(name, model="n" if name == "c" else "m")
            await web.put(f"/v1/instances/{name}", content=report.model_dump_json())
        await web.post("/v1/forks", content=fork_request("t").model_dump_json())
    yield planner_api
    await planner_api.close()


async def test_it_asks_all_that_hooks_ask(planner_api: PlannerApi, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists over several pages, models, scale-ups from first to last, and an instance that is gone."""
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
    assert (["a", "b", "c", "t"], ["c"], ["fork-t"], {("m", 2), ("n", 1)}) == (
        everyone, of_one, forks, models,
    )  # fmt: skip
    assert ("they fork from 2 seeds", 1, (), ["b", "t"]) == (
        announcement.reason, len(listed), await planner_api.scaleups(), left,
    )  # fmt: skip


async def test_names_are_quoted() -> None:
    """Whatever an id holds, it is one part of a path."""
    paths: list[bytes] = []

    def handler(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.raw_path)
        return httpx.Response(204)

    planner_api = client_with_handler(handler)
    await planner_api.remove("a/../b")
    await planner_api.withdraw("a:b")
    assert [b"/v1/instances/a%2F..%2Fb", b"/v1/scaleups/a:b"] == paths


async def test_the_token_is_shown() -> None:
    """As a bearer token; without one, none."""
    sent_tokens: list[str | None] = []

    def handler(request: httpx.Request) -> httpx.Response:
        sent_tokens.append(request.headers.get("authorization"))
        return httpx.Response(200, json=[])

    for token in ("rule", None):
        await client_with_handler(handler, token=token).models()
    assert ["Bearer rule", None] == sent_tokens


class DisconnectingHandler:
    """Answers, but that the connection turns out dead before."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.request_count = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        self.request_count += 1
        if self.left:
            self.left -= 1
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return httpx.Response(204)


@pytest.mark.parametrize(("dead", "request_count", "unavailable"), [(0, 1, False), (1, 2, False), (2, 2, True)])
async def test_a_dead_connection_is_tried_once_more(dead: int, request_count: int, unavailable: bool) -> None:
    """A planner that restarted is not away; one that is, is told."""
    handler = DisconnectingHandler(dead)
    planner_api = client_with_handler(handler)
    failed = False
    try:
        await planner_api.remove("a")
    except PlannerUnavailable:
        failed = True
    assert (request_count, unavailable) == (handler.request_count, failed)


def problem_response(status: int, slug: str, detail: str) -> httpx.Response:
    """A problem document."""
    problem = {"type": f"https://rfork.dev/problems/{slug}", "title": "x", "status": status, "detail": detail}
    return httpx.Response(status, json=problem)


def unreachable(request: httpx.Request) -> httpx.Response:
    """Nobody listens."""
    raise httpx.ConnectError("All connection attempts failed")


def cyclic_pages(request: httpx.Request) -> httpx.Response:
    """Each page names the same one as the next."""
    return httpx.Response(200, json={"items": [], "next": "a"})


NO_PLANNER = "; check that RFORK_PLANNER names an rfork planner of this release"
UNAVAILABLE_CASES: list[tuple[ResponseHandler, str]] = [
    (unreachable, f"planner {URL} did not answer GET /v1/instances: All connection attempts failed"),
    (
        lambda _: problem_response(503, "store-unavailable", "the store cannot be used"),
        f"planner {URL} refused GET /v1/instances (503 store-unavailable): the store cannot be used",
    ),
    (
        lambda _: problem_response(403, "forbidden", "this takes the role reader"),
        f"planner {URL} refused GET /v1/instances (403 forbidden): this takes the role reader; "
        "set RFORK_TOKEN to an operator's token",
    ),
    (
        lambda _: httpx.Response(502, text="<html>"),
        f"{URL} gave no planner's answer to GET /v1/instances (status 502): not a problem document" + NO_PLANNER,
    ),
    (
        lambda _: httpx.Response(200, text="<html>"),
        f"{URL} gave no planner's answer to GET /v1/instances (status 200): body: Invalid JSON: "
        "expected value at line 1 column 1" + NO_PLANNER,
    ),
    (
        lambda _: httpx.Response(200, json={"items": [{}], "next": None}),
        f"{URL} gave no planner's answer to GET /v1/instances (status 200): items.0.report: Field required"
        + NO_PLANNER,
    ),
    (
        cyclic_pages,
        f"{URL} gave no planner's answer to GET /v1/instances (status 200): its pages go in circles" + NO_PLANNER,
    ),
]


@pytest.mark.parametrize(("handler", "expected"), UNAVAILABLE_CASES)
async def test_why_the_planner_is_away_is_one_line(handler: ResponseHandler, expected: str) -> None:
    """What was asked, and why it failed."""
    with pytest.raises(PlannerUnavailable) as unavailable:
        await client_with_handler(handler).instances()
    assert expected == str(unavailable.value)


async def test_a_call_ends_within_its_time_however_many_pages_come() -> None:
    """The time is that of the call, not of each page."""
    request_count = 0

    def handler(request: httpx.Request) -> httpx.Response:
        nonlocal request_count
        request_count += 1
        return httpx.Response(200, content=json.dumps({"items": [], "next": f"{request_count:09}"}))

    with pytest.raises(PlannerUnavailable, match=r"did not answer GET /v1/forks: no answer within 0\.05 s"):
        await client_with_handler(handler, planner_timeout_s=0.05).forks()


async def test_a_client_that_was_closed_is_away() -> None:
    """No other error."""
    planner_api = client_with_handler(lambda _: httpx.Response(200, json=EMPTY))
    await planner_api.close()
    with pytest.raises(PlannerUnavailable, match="its client was closed"):
        await planner_api.instances()


BAD: list[tuple[dict[str, object], str]] = [
    ({"planner": None}, "no planner is set"),
    ({"planner": "planner:8700"}, "planner URL 'planner:8700' cannot be used"),
    ({"planner": "http://[::1"}, "cannot be used"),
    ({"token": "schlüssel\u2603"}, "the planner token has characters that cannot stand in a header"),
]


@pytest.mark.parametrize(("changes", "expected"), BAD)
def test_settings_that_cannot_be_used_are_told(changes: dict[str, object], expected: str) -> None:
    """Before anything is asked."""
    with pytest.raises(SettingsError, match=expected.replace("[", r"\[")):
        PlannerRestClient(settings(**changes))


def test_tls_files_that_cannot_be_used_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of RFORK_TLS_CA."""
    (tmp_path / "ca").write_text("no certificate")
    monkeypatch.setenv("RFORK_TLS_CA", str(tmp_path / "ca"))
    with pytest.raises(SettingsError, match="the TLS files that the planner is asked with cannot be used"):
        PlannerRestClient(settings())

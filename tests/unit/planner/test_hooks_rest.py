"""The hooks' client of the planner, without sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import httpx
import pytest

from planner.app import create_app
from planner.hooks import rest
from planner.hooks.fleet import Fleet, PlannerAway
from planner.hooks.rest import RestFleet
from rfork.control.ownership import OWNER_HEADER
from rfork.errors import SettingsError
from rfork.settings import PlannerSettings, Settings
from rfork.wire import ScaleUp
from tests.unit.planner.builders import FakeTime, ask, whole

URL = "http://planner:8700"
UP = ScaleUp(scaleup_id="up", model="m", replicas=3)
EMPTY: dict[str, object] = {"items": [], "next": None}
Answer = Callable[[httpx.Request], httpx.Response]


def settings(**changes: object) -> Settings:
    """Of a hook."""
    return Settings.model_validate({"planner": URL, "token": "rule", **changes})


def answered(answer: Answer, **changes: object) -> RestFleet:
    """A client whose requests are answered so."""
    return RestFleet(settings(**changes), httpx.MockTransport(answer))


@pytest.fixture
async def fleet(time: FakeTime) -> AsyncIterator[RestFleet]:
    """The client of a planner that wants a token and knows a seed and a fork."""
    app = create_app(
        PlannerSettings.model_validate({"token": "rule", "batch_s": 0, "gather_s": 0}), time.clock
    )
    fleet = RestFleet(settings(), httpx.ASGITransport(app))
    own = {"Authorization": "Bearer rule", "Content-Type": "application/json", OWNER_HEADER: "o" * 32}
    async with httpx.AsyncClient(
        base_url=URL, transport=httpx.ASGITransport(app), headers=own, trust_env=False
    ) as web:
        for name in "abc":
            report = whole(name, model="n" if name == "c" else "m")
            await web.put(f"/v1/instances/{name}", content=report.model_dump_json())
        await web.post("/v1/forks", content=ask("t").model_dump_json())
    yield fleet
    await fleet.close()


async def test_it_asks_all_that_hooks_ask(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists over several pages, models, scale-ups from first to last, and an instance that is gone."""
    monkeypatch.setattr(rest, "PAGE", 2)
    everyone = [view.report.instance_id for view in await fleet.instances()]
    of_one = [view.report.instance_id for view in await fleet.instances(model="n")]
    forks = [fork.fork_id for fork in await fleet.forks()]
    models = {(row.model, row.seeds) for row in await fleet.models()}
    told = await fleet.announce(UP)
    listed = await fleet.scaleups()
    for _ in range(2):
        await fleet.withdraw("up")
        await fleet.remove("a")
    left = [view.report.instance_id for view in await fleet.instances(model="m")]
    assert (["a", "b", "c", "t"], ["c"], ["fork-t"], {("m", 2), ("n", 1)}) == (
        everyone, of_one, forks, models,
    )  # fmt: skip
    assert ("they fork from 2 seeds", 1, (), ["b", "t"]) == (
        told.reason, len(listed), await fleet.scaleups(), left,
    )  # fmt: skip


async def test_names_are_quoted() -> None:
    """Whatever an id holds, it is one part of a path."""
    paths: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.raw_path)
        return httpx.Response(204)

    fleet = answered(answer)
    await fleet.remove("a/../b")
    await fleet.withdraw("a:b")
    assert [b"/v1/instances/a%2F..%2Fb", b"/v1/scaleups/a:b"] == paths


async def test_the_token_is_shown() -> None:
    """As a bearer token; without one, none."""
    shown: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        shown.append(request.headers.get("authorization"))
        return httpx.Response(200, json=[])

    for token in ("rule", None):
        await answered(answer, token=token).models()
    assert ["Bearer rule", None] == shown


class DeadOnce:
    """Answers, but that the connection turns out dead before."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.asked = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        """Answer one request."""
        self.asked += 1
        if self.left:
            self.left -= 1
            raise httpx.RemoteProtocolError("Server disconnected without sending a response.")
        return httpx.Response(204)


@pytest.mark.parametrize(("dead", "asked", "away"), [(0, 1, False), (1, 2, False), (2, 2, True)])
async def test_a_dead_connection_is_tried_once_more(dead: int, asked: int, away: bool) -> None:
    """A planner that restarted is not away; one that is, is told."""
    answer = DeadOnce(dead)
    fleet = answered(answer)
    told = False
    try:
        await fleet.remove("a")
    except PlannerAway:
        told = True
    assert (asked, away) == (answer.asked, told)


def refused(status: int, slug: str, detail: str) -> httpx.Response:
    """A problem document."""
    problem = {"type": f"https://rfork.dev/problems/{slug}", "title": "x", "status": status, "detail": detail}
    return httpx.Response(status, json=problem)


def unreachable(request: httpx.Request) -> httpx.Response:
    """Nobody listens."""
    raise httpx.ConnectError("All connection attempts failed")


def in_circles(request: httpx.Request) -> httpx.Response:
    """Each page names the same one as the next."""
    return httpx.Response(200, json={"items": [], "next": "a"})


NO_PLANNER = "; check that RFORK_PLANNER names an rfork planner of this release"
AWAY: list[tuple[Answer, str]] = [
    (unreachable, f"planner {URL} did not answer GET /v1/instances: All connection attempts failed"),
    (
        lambda _: refused(503, "store-unavailable", "the store cannot be used"),
        f"planner {URL} refused GET /v1/instances (503 store-unavailable): the store cannot be used",
    ),
    (
        lambda _: refused(403, "forbidden", "this takes the role reader"),
        f"planner {URL} refused GET /v1/instances (403 forbidden): this takes the role reader; "
        "set RFORK_TOKEN to an operator's token",
    ),
    (
        lambda _: httpx.Response(502, text="<html>"),
        f"{URL} gave no planner's answer to GET /v1/instances (status 502): not a problem document"
        + NO_PLANNER,
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
        in_circles,
        f"{URL} gave no planner's answer to GET /v1/instances (status 200): its pages go in circles"
        + NO_PLANNER,
    ),
]


@pytest.mark.parametrize(("answer", "expected"), AWAY)
async def test_why_the_planner_is_away_is_one_line(answer: Answer, expected: str) -> None:
    """What was asked, and why it failed."""
    with pytest.raises(PlannerAway) as away:
        await answered(answer).instances()
    assert expected == str(away.value)


async def test_a_call_ends_within_its_time_however_many_pages_come() -> None:
    """The time is that of the call, not of each page."""
    asked = 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal asked
        asked += 1
        return httpx.Response(200, content=json.dumps({"items": [], "next": f"{asked:09}"}))

    with pytest.raises(PlannerAway, match=r"did not answer GET /v1/forks: no answer within 0\.05 s"):
        await answered(answer, planner_timeout_s=0.05).forks()


async def test_a_client_that_was_closed_is_away() -> None:
    """No other error."""
    fleet = answered(lambda _: httpx.Response(200, json=EMPTY))
    await fleet.close()
    with pytest.raises(PlannerAway, match="its client was closed"):
        await fleet.instances()


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
        RestFleet(settings(**changes))


def test_tls_files_that_cannot_be_used_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of RFORK_TLS_CA."""
    (tmp_path / "ca").write_text("no certificate")
    monkeypatch.setenv("RFORK_TLS_CA", str(tmp_path / "ca"))
    with pytest.raises(SettingsError, match="the TLS files that the planner is asked with cannot be used"):
        RestFleet(settings())

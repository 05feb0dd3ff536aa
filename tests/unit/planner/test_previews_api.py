"""Previews over the REST interface, without sockets."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
from fastapi import FastAPI

from planner.api import previews
from planner.previews import Known, preview
from planner.problems import install
from rfork.control.client import PlannerClient
from rfork.errors import PlannerRefused
from rfork.wire import Preview, PreviewRequest, Rank
from tests.unit.planner.builders import CHUNKS, FakeTime, ask, make_registry, whole

KEY = Rank().key
RANKS = (Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2))


def test_a_preview_changes_nothing(web: httpx.Client, planner: PlannerClient) -> None:
    """It is told what a fork would be told, and the next fork is told the same."""
    planner.report(whole("s"))
    (made,) = planner.preview(PreviewRequest(model="m", targets=2)).items
    assert ("m", KEY, CHUNKS << 20, CHUNKS, 1) == (
        made.model, made.rank_key, made.image_bytes, made.chunk_count, made.seeds,
    )  # fmt: skip
    assert (["s"], [], 0) == (
        [each.report.instance_id for each in planner.instances()], planner.forks(),
        web.get("/v1/models").json()[0]["forks_running"],
    )  # fmt: skip
    assert made.targets[0].reason == planner.ask(ask("a")).reason == "from seed s (0 other readers)"


def test_each_rank_has_its_own(planner: PlannerClient) -> None:
    """All that are known of the model, or the one that is asked for."""
    for rank in RANKS:
        planner.report(whole(f"s{rank.tp}", rank=rank))
    both = planner.preview(PreviewRequest(model="m", targets=3)).items
    (second,) = planner.preview(PreviewRequest(model="m", rank_key=RANKS[1].key)).items
    assert ([rank.key for rank in RANKS], ["s1"]) == (
        [each.rank_key for each in both], [share.source_id for share in second.targets[0].shares],
    )  # fmt: skip


UNKNOWN = [
    ({"model": "other"}, "no instance of other is known"),
    ({"model": "m", "rank_key": "x"}, f"no instance of that rank is known, but of {KEY}"),
]


@pytest.mark.parametrize(("asked", "detail"), UNKNOWN)
def test_a_model_that_nobody_has_is_a_problem(
    web: httpx.Client, planner: PlannerClient, asked: dict[str, str], detail: str
) -> None:
    """404 with a word of its own: there is nothing to go by."""
    planner.report(whole("s"))
    answer = web.post("/v1/previews", json=asked)
    assert (404, "unknown-model", detail) == (
        answer.status_code, answer.json()["type"].rpartition("/")[2], answer.json()["detail"],
    )  # fmt: skip


def test_a_preview_has_its_bounds(planner: PlannerClient) -> None:
    """Of many ranks not many targets at once; of one rank all that the wire allows."""
    sizes = [Rank(tp=index, tp_size=9) for index in range(9)]
    for rank in sizes:
        planner.report(whole(f"s{rank.tp}", rank=rank))
    with pytest.raises(PlannerRefused, match="1024 of 9 ranks are more than 8192: name one rank_key"):
        planner.preview(PreviewRequest(model="m", targets=1024))
    (made,) = planner.preview(PreviewRequest(model="m", targets=1024, rank_key=sizes[0].key)).items
    assert (1024, 0) == (len(made.targets), sum(target.seconds is None for target in made.targets))


async def test_few_previews_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """One more is turned away at once, and told when to come again; the others are answered."""
    may_go_on = threading.Event()

    def slow(known: Known) -> Preview:
        may_go_on.wait()
        return preview(known)

    monkeypatch.setattr(previews, "preview", slow)
    registry = make_registry(FakeTime())
    await registry.report(whole("s"))
    app = FastAPI()
    app.include_router(previews.previews_router(registry))
    install(app, lambda: None)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://planner") as client:
        asked = [
            asyncio.create_task(client.post("/v1/previews", json={"model": "m"}))
            for _ in range(previews.MOST_WAITING + 2)
        ]
        refused, rest = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        may_go_on.set()
        answered = await asyncio.gather(*rest)
    (answer,) = [task.result() for task in refused]
    assert (503, "too-many-previews", "2", [200] * len(answered)) == (
        answer.status_code, answer.json()["type"].rpartition("/")[2], answer.headers["Retry-After"],
        [each.status_code for each in answered],
    )  # fmt: skip


WRONG = [
    ("targets", 0),
    ("targets", 1025),
    ("per_host", 0),
    ("link_bytes_per_s", 0),
    ("model", ""),
    ("more", 1),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_what_cannot_be_asked_is_refused(web: httpx.Client, field: str, value: object) -> None:
    """422, and the field is named."""
    answer = web.post("/v1/previews", json={"model": "m", field: value})
    assert (422, [field]) == (
        answer.status_code, [each["field"] for each in answer.json()["errors"]],
    )  # fmt: skip

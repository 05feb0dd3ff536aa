"""Previews over the REST interface, without sockets."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
from fastapi import FastAPI

from planner.api import previews
from planner.dry_run import Scenario, preview
from planner.http_errors import register_handlers
from rfork.errors import PlannerRejected
from rfork.planner_client.client import PlannerClient
from rfork.schema import Preview, PreviewRequest, Rank
from tests.unit.planner.builders import CHUNKS, FakeTime, fork_request, make_service, seed_report

KEY = Rank().key
RANKS = (Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2))


def test_a_preview_changes_nothing(web: httpx.Client, planner: PlannerClient) -> None:
    """A preview matches the plan of the next fork, and leaves the planner unchanged."""
    planner.report(seed_report("s"))
    (result,) = planner.preview(PreviewRequest(model="m", targets=2)).items
    assert "m" == result.model
    assert KEY == result.rank_key
    assert CHUNKS << 20 == result.image_bytes
    assert CHUNKS == result.chunk_count
    assert 1 == result.seeds
    assert ["s"] == [each.report.instance_id for each in planner.instances()]
    assert [] == planner.forks()
    assert 0 == web.get("/v1/models").json()[0]["forks_running"]
    assert result.targets[0].reason == planner.request_plan(fork_request("a")).reason == "from seed s (0 other readers)"


def test_each_rank_has_its_own_preview(planner: PlannerClient) -> None:
    """All known ranks of the model are previewed, or the requested one."""
    for rank in RANKS:
        planner.report(seed_report(f"s{rank.tp}", rank=rank))
    both = planner.preview(PreviewRequest(model="m", targets=3)).items
    (second,) = planner.preview(PreviewRequest(model="m", rank_key=RANKS[1].key)).items
    assert [rank.key for rank in RANKS] == [each.rank_key for each in both]
    assert ["s1"] == [share.source_id for share in second.targets[0].shares]


UNKNOWN_GROUPS = [
    ({"model": "other"}, "no known instance of other"),
    ({"model": "m", "rank_key": "x"}, f"no known instance of rank x; known ranks: {KEY}"),
]


@pytest.mark.parametrize(("query", "detail"), UNKNOWN_GROUPS)
def test_an_unknown_model_is_a_problem(
    web: httpx.Client, planner: PlannerClient, query: dict[str, str], detail: str
) -> None:
    """The response is 404 with problem `unknown-model`."""
    planner.report(seed_report("s"))
    response = web.post("/v1/previews", json=query)
    assert 404 == response.status_code
    assert "unknown-model" == response.json()["type"].rpartition("/")[2]
    assert detail == response.json()["detail"]


def test_the_number_of_preview_targets_is_limited(planner: PlannerClient) -> None:
    """Many ranks allow few targets each; one rank allows the schema's maximum."""
    sizes = [Rank(tp=index, tp_size=9) for index in range(9)]
    for rank in sizes:
        planner.report(seed_report(f"s{rank.tp}", rank=rank))
    with pytest.raises(PlannerRejected, match="1024 targets of 9 ranks exceed 8192: name one rank_key"):
        planner.preview(PreviewRequest(model="m", targets=1024))
    (result,) = planner.preview(PreviewRequest(model="m", targets=1024, rank_key=sizes[0].key)).items
    assert 1024 == len(result.targets)
    assert 0 == sum(target.seconds is None for target in result.targets)


async def test_the_preview_queue_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call too many is rejected with Retry-After; the queued ones are answered."""
    released = threading.Event()

    def slow_preview(scenario: Scenario) -> Preview:
        released.wait()
        return preview(scenario)

    monkeypatch.setattr(previews, "preview", slow_preview)
    service = make_service(FakeTime())
    await service.report(seed_report("s"))
    app = FastAPI()
    app.include_router(previews.previews_router(service))
    register_handlers(app, lambda: None)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://planner") as client:
        requests = [
            asyncio.create_task(client.post("/v1/previews", json={"model": "m"}))
            for _ in range(previews.MAX_QUEUED + 2)
        ]
        refused, rest = await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        released.set()
        accepted = await asyncio.gather(*rest)
    (response,) = [task.result() for task in refused]
    assert 503 == response.status_code
    assert "too-many-previews" == response.json()["type"].rpartition("/")[2]
    assert "2" == response.headers["Retry-After"]
    assert [200] * len(accepted) == [each.status_code for each in accepted]


INVALID_FIELDS = [
    ("targets", 0),
    ("targets", 1025),
    ("per_host", 0),
    ("link_bytes_per_s", 0),
    ("storage_bytes_per_s", 5e-324),
    ("model", ""),
    ("more", 1),
]


@pytest.mark.parametrize(("field", "value"), INVALID_FIELDS)
def test_invalid_preview_requests_are_rejected(web: httpx.Client, field: str, value: object) -> None:
    """The response is 422 and names the field."""
    response = web.post("/v1/previews", json={"model": "m", field: value})
    assert 422 == response.status_code
    assert [field] == [each["field"] for each in response.json()["errors"]]

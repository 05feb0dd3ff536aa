"""Previews over the REST interface, without sockets."""

from __future__ import annotations

import httpx
import pytest

from rfork.control.client import PlannerClient
from rfork.errors import PlannerRefused
from rfork.wire import PreviewRequest, Rank
from tests.unit.planner.builders import CHUNKS, ask, whole

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

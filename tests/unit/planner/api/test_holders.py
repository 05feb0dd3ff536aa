"""Holders over the REST interface, without sockets."""

from __future__ import annotations

import httpx
import pytest

from planner.api import examples
from rfork.planner_client.client import PlannerClient
from rfork.schema import HolderReport, Placement, ScaleUp
from tests.unit.planner.builders import FakeTime, seed_report


def holder_report(name: str = "h", host: str = "node", **changes: object) -> HolderReport:
    """Return the report of a holder without images."""
    values = {"holder_id": name, "placement": Placement(host=host), "memory_bytes": 1 << 30}
    return HolderReport.model_validate(values | changes)


def gauge(web: httpx.Client, name: str) -> float:
    """Return the value of a metric without labels."""
    lines = dict(line.rsplit(" ", 1) for line in web.get("/metrics").text.splitlines() if line[0] != "#")
    return float(lines[name])


def test_a_holder_gets_its_wanted_images_until_it_is_removed(planner: PlannerClient, time: FakeTime) -> None:
    """The list shows the same; its age counts from the last report."""
    planner.report(seed_report("s"))
    planner.announce(ScaleUp(scaleup_id="up", model="m", replicas=1, hosts=("node",)))
    wanted = planner.report_holder(holder_report()).wanted
    time.now += 2
    listed = planner.holders()
    assert ["announced"] == [each.cause for each in wanted]
    assert [wanted] == [each.wanted for each in listed]
    assert [holder_report()] == [each.report for each in listed]
    assert [2.0] == [each.age_s for each in listed]
    planner.remove_holder("h")
    assert [] == planner.holders()


def test_holders_are_listed_by_host(planner: PlannerClient) -> None:
    """Without a host, all are, ordered by id."""
    for name, host in (("b", "one"), ("a", "two"), ("c", "one")):
        planner.report_holder(holder_report(name, host))
    assert ["a", "b", "c"] == [each.report.holder_id for each in planner.holders()]
    assert ["b", "c"] == [each.report.holder_id for each in planner.holders(host="one")]
    assert [] == planner.holders(host="three")


def test_the_list_has_pages(web: httpx.Client, planner: PlannerClient) -> None:
    """`next` of a page is the cursor of the following one."""
    for name in ("a", "b", "c"):
        planner.report_holder(holder_report(name))
    first = web.get("/v1/holders", params={"limit": 2}).json()
    second = web.get("/v1/holders", params={"limit": 2, "after": first["next"]}).json()
    assert ["a", "b"] == [each["report"]["holder_id"] for each in first["items"]]
    assert ["c"] == [each["report"]["holder_id"] for each in second["items"]]
    assert second["next"] is None


def test_a_holder_is_shown(web: httpx.Client, planner: PlannerClient) -> None:
    """By its id."""
    planner.report_holder(holder_report())
    assert "node" == web.get("/v1/holders/h").json()["report"]["placement"]["host"]


def test_an_unknown_holder_is_a_problem(web: httpx.Client) -> None:
    """Removing it is not."""
    response = web.get("/v1/holders/h")
    assert 404 == response.status_code
    assert "unknown-holder" == response.json()["type"].rpartition("/")[2]
    assert 204 == web.delete("/v1/holders/h").status_code


@pytest.mark.parametrize(
    ("path", "changes"),
    [("/v1/holders/other", {}), ("/v1/holders/h", {"memory_bytes": -1}), ("/v1/holders/h", {"more": 1})],
)
def test_an_invalid_report_is_a_problem(web: httpx.Client, path: str, changes: dict[str, object]) -> None:
    """Among them another id in the path."""
    assert 422 == web.put(path, json=holder_report().model_dump(mode="json") | changes).status_code


def test_the_examples_are_accepted(web: httpx.Client) -> None:
    """They can be sent as they are."""
    assert 200 == web.put("/v1/holders/holder-1", json=examples.HOLDER.model_dump(mode="json")).status_code


def test_holders_are_measured(web: httpx.Client) -> None:
    """Their number, their memory, and the images that they refuse."""
    web.put("/v1/holders/holder-1", json=examples.HOLDER.model_dump(mode="json"))
    assert 1 == gauge(web, "rfork_planner_holders")
    assert examples.IMAGE_BYTES == gauge(web, "rfork_planner_held_bytes")
    assert 1 == gauge(web, "rfork_planner_refused_images")


def test_seeds_of_holders_are_counted(planner: PlannerClient) -> None:
    """They count as seeds, too."""
    planner.report(seed_report("s"))
    planner.report(seed_report("h-1", holder="h"))
    [row] = planner.models()
    assert 2 == row.seeds
    assert 1 == row.holders

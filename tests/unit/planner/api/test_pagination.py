"""Lists of instances and forks, page by page."""

from __future__ import annotations

import httpx
import pytest

from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkInfo, ForkPage, ForkResult, InstancePage
from tests.unit.planner.builders import fork_request, seed_report


def ids_of(page: InstancePage | ForkPage) -> list[str]:
    """Return the ids on a page."""
    return [each.fork_id if isinstance(each, ForkInfo) else each.report.instance_id for each in page.items]


def test_instances_are_paginated(planner: PlannerClient) -> None:
    """They are ordered by id, whatever the order of arrival; the last page has no cursor."""
    for name in "cabed":
        planner.report(seed_report(name))
    pages = [planner.instance_page(limit=2)]
    while pages[-1].next:
        pages.append(planner.instance_page(limit=2, after=pages[-1].next))
    assert [(["a", "b"], "b"), (["c", "d"], "d"), (["e"], None)] == [(ids_of(page), page.next) for page in pages]


def test_a_full_last_page_has_no_cursor(planner: PlannerClient) -> None:
    """No empty page follows it."""
    for name in "ab":
        planner.report(seed_report(name))
    assert None is planner.instance_page(limit=2).next


def test_pages_are_stable_while_instances_change(planner: PlannerClient) -> None:
    """No item is repeated or skipped when the cursor's instance is removed and others are added."""
    for name in "bdf":
        planner.report(seed_report(name))
    first = planner.instance_page(limit=2)
    planner.remove("d")
    for name in "ae":
        planner.report(seed_report(name))
    second = planner.instance_page(limit=2, after=first.next)
    assert ["b", "d"] == ids_of(first)
    assert ["e", "f"] == ids_of(second)
    assert second.next is None


def test_forks_are_paginated(planner: PlannerClient) -> None:
    """They are ordered by id, like instances."""
    planner.report(seed_report("s", max_readers=9))
    for name in "cab":
        planner.request_plan(fork_request(name))
    first = planner.fork_page(limit=2)
    second = planner.fork_page(limit=2, after=first.next)
    assert ["fork-a", "fork-b"] == ids_of(first)
    assert ["fork-c"] == ids_of(second)
    assert second.next is None


def test_lists_are_filtered_by_model_state_and_host(planner: PlannerClient) -> None:
    """Filters apply before pagination."""
    planner.report(seed_report("s", max_readers=9))
    planner.report(seed_report("t", model="other"))
    for name in "ab":
        planner.request_plan(fork_request(name))
    planner.finish("fork-a", ForkResult(outcome="forked", seconds=1, bytes_read=1))
    assert ["t"] == ids_of(planner.instance_page(model="other"))
    assert ["a", "b"] == ids_of(planner.instance_page(state="loading"))
    assert ["b"] == ids_of(planner.instance_page(host="host-b"))
    assert ["fork-b"] == ids_of(planner.fork_page(state="running"))
    assert ["fork-a"] == ids_of(planner.fork_page(state="finished", model="m"))
    assert ["fork-b"] == ids_of(planner.fork_page(host="host-b"))
    assert [] == ids_of(planner.fork_page(model="other"))


def test_the_ranks_of_one_replica_are_listed(planner: PlannerClient) -> None:
    """They are paginated and combine with other filters; replicas with a similar name are excluded."""
    for name in ("pod-main-tp1", "pod-speculative-tp0", "pod-main-tp0", "pod-b-main-tp0", "pod", "pod-x"):
        planner.report(seed_report(name))
    first = planner.instance_page(replica="pod", limit=2)
    second = planner.instance_page(replica="pod", limit=2, after=first.next)
    assert ["pod-main-tp0", "pod-main-tp1"] == ids_of(first)
    assert ["pod-speculative-tp0"] == ids_of(second)
    assert ["pod-b-main-tp0"] == ids_of(planner.instance_page(replica="pod-b", model="m"))
    assert [] == ids_of(planner.instance_page(replica="pod", model="other"))
    assert [] == ids_of(planner.instance_page(replica="unknown"))
    assert "pod-main-tp1" == first.next
    assert second.next is None


def test_an_invalid_replica_name_is_rejected(web: httpx.Client) -> None:
    """It is not treated as a replica without ranks."""
    response = web.get("/v1/instances", params={"replica": "pod 1"})
    assert 422 == response.status_code
    assert ["replica"] == [each["field"] for each in response.json()["errors"]]


@pytest.mark.parametrize(("query", "field"), [("limit=0", "limit"), ("limit=1001", "limit"), ("after=%20", "after")])
@pytest.mark.parametrize("path", ["/v1/instances", "/v1/forks"])
def test_invalid_page_parameters_are_rejected(web: httpx.Client, path: str, query: str, field: str) -> None:
    """The response names the field."""
    response = web.get(f"{path}?{query}")
    assert 422 == response.status_code
    assert [field] == [each["field"] for each in response.json()["errors"]]

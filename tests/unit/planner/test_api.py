from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from planner.app import create_app
from planner.leases import Clock
from planner.store.base import Change
from planner.store.memory import MemoryStore
from rfork.control.client import PlannerClient
from rfork.errors import PlannerRefused
from rfork.settings import PlannerSettings
from rfork.wire import ForkFinish, ForkPage, ForkProgress, ForkView, InstancePage
from tests.unit.planner.app_transport import AppTransport
from tests.unit.planner.builders import WEIGHTS, ask, fault, report, whole

WHOLE = whole("s").model_dump(mode="json")


class BrokenStore(MemoryStore):
    """A store that has been lost."""

    def __init__(self) -> None:
        super().__init__(Clock(), keep_forks=1)

    @property
    def ready(self) -> bool:
        return False

    async def commit(self, change: Change) -> None:
        raise RuntimeError("password=hunter2")  # what callers must not see


def web_of(app: FastAPI) -> httpx.Client:
    """A plain HTTP client of the application."""
    return httpx.Client(base_url="http://planner", transport=AppTransport(app))


PROBLEMS = [
    ("GET", "/nowhere", None, 404, "not-found", "Not Found"),
    ("GET", "/v1/instances/x", None, 404, "unknown-instance", "no instance x is known"),
    ("POST", "/v1/instances/x/drain", None, 404, "unknown-instance", "no instance x is known"),
    ("GET", "/v1/forks/x", None, 404, "unknown-fork", "no fork x is known"),
    ("PATCH", "/v1/models", None, 405, "method-not-allowed", "Method Not Allowed"),
    ("PUT", "/v1/instances/s", {**WHOLE, "chunk_count": -1}, 422, "invalid-request",
     "chunk_count: Input should be greater than or equal to 0"),
    ("PUT", "/v1/instances/s", {**WHOLE, "rank": {"tp": -1}}, 422, "invalid-request",
     "rank.tp: Input should be greater than or equal to 0"),
    ("PUT", "/v1/instances/s", {**WHOLE, "surplus": 1}, 422, "invalid-request",
     "surplus: Extra inputs are not permitted"),
    ("PUT", "/v1/instances/other", WHOLE, 422, "invalid-request",
     "instance_id: the path says other, the body s"),
    ("GET", "/v1/forks?state=odd", None, 422, "invalid-request",
     "state: Input should be 'planning', 'running', 'finished' or 'failed'"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "body", "status", "slug", "detail"), PROBLEMS)
def test_every_error_is_a_problem_document(
    web: httpx.Client, method: str, path: str, body: object, status: int, slug: str, detail: str
) -> None:
    """RFC 9457: media type, type, status and the first thing that is wrong."""
    response = web.request(method, path, json=body)
    problem = response.json()
    assert (status, "application/problem+json") == (response.status_code, response.headers["content-type"])
    assert (f"https://rfork.dev/problems/{slug}", status, detail) == (
        problem["type"], problem["status"], problem["detail"],
    )  # fmt: skip


def test_all_bad_fields_are_listed_and_no_value_is_repeated(web: httpx.Client) -> None:
    """`errors` names each field; what was sent stays out of the answer."""
    response = web.put("/v1/instances/s", json={**WHOLE, "layout_id": "tell-nobody", "state": "odd"})
    assert ["layout_id", "state"] == [each["field"] for each in response.json()["errors"]]
    assert "tell-nobody" not in response.text


def test_broken_json_is_a_problem_too(web: httpx.Client) -> None:
    """The position in the body is named, not a field."""
    response = web.post("/v1/forks", content=b"{", headers={"Content-Type": "application/json"})
    assert (422, "1: JSON decode error") == (response.status_code, response.json()["detail"])


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_large_is_refused(web: httpx.Client, announced: bool) -> None:
    """Whether its length is announced or found out while reading."""
    body = b" " * (PlannerSettings().max_body + 1)
    content = body if announced else iter([body])
    response = web.put("/v1/instances/s", content=content, headers={"Content-Type": "application/json"})
    assert (413, "https://rfork.dev/problems/body-too-large") == (
        response.status_code,
        response.json()["type"],
    )


def test_a_bug_shows_nothing_of_the_inside() -> None:
    """500 with a request id to find it in the log by."""
    app = create_app(PlannerSettings(), store=BrokenStore())
    response = web_of(app).put("/v1/instances/s", json=WHOLE, headers={"X-Request-Id": "find-me"})
    assert (500, "the planner failed; its log says why") == (response.status_code, response.json()["detail"])
    assert "find-me" == response.headers["x-request-id"]
    assert "hunter2" not in response.text


def test_readiness_follows_the_store() -> None:
    """Alive, but not ready."""
    app = create_app(PlannerSettings(), store=BrokenStore())
    statuses = [web_of(app).get(path).status_code for path in ("/healthz", "/readyz")]
    assert ([200, 503], False) == (statuses, PlannerClient("http://x", transport=AppTransport(app)).ready())


AUTH = [
    ("/v1/models", None, 401),
    ("/v1/models", "Bearer wrong", 401),
    ("/v1/models", "right", 401),
    ("/v1/models", "Bearer right", 200),
    ("/metrics", None, 401),
    ("/openapi.json", None, 401),
    ("/nowhere", None, 401),
    ("/healthz", None, 200),
    ("/readyz", None, 200),
]


@pytest.mark.parametrize(("path", "shown", "status"), AUTH)
def test_a_token_guards_everything_but_health(path: str, shown: str | None, status: int) -> None:
    """Even what does not exist is told only to those who show the token."""
    app = create_app(PlannerSettings(token="right"))  # type: ignore[arg-type]
    response = web_of(app).get(path, headers={} if shown is None else {"Authorization": shown})
    assert (status, "Bearer" if status == 401 else None) == (
        response.status_code, response.headers.get("www-authenticate"),
    )  # fmt: skip


@pytest.mark.parametrize(("sent", "kept"), [("abc.1-2_3", True), ("bad id", False), ("x" * 65, False)])
def test_a_sound_request_id_is_kept(web: httpx.Client, sent: str, kept: bool) -> None:
    """What could break a log line is replaced."""
    answer = web.get("/healthz", headers={"X-Request-Id": sent}).headers["x-request-id"]
    assert kept == (answer == sent)


def test_metrics_tell_what_happened(planner: PlannerClient, web: httpx.Client) -> None:
    """Instances, leases, outcomes, fallbacks by reason, bytes by source kind; labels stay few."""
    planner.report(whole("s", max_readers=2))
    planner.ask(ask("a"))
    planner.ask(ask("b", faults=(fault("s", "Invented"),)))
    planner.finish(
        "fork-b",
        ForkFinish(
            outcome="fallback", seconds=1, bytes_read=5, sources={"s": 2, "checkpoint:/models/m": 3},
            fallback="checkpoint:/models/m", reasons=("whatever", "SourceStalled: no byte for 10 s"),
        ),
    )  # fmt: skip
    lines = web.get("/metrics").text.splitlines()
    expected = {
        'rfork_planner_instances{state="serving"} 1.0',
        'rfork_planner_instances{state="loading"} 2.0',
        "rfork_planner_active_leases 1.0",
        'rfork_planner_forks_total{outcome="fallback"} 1.0',
        'rfork_planner_fallbacks_total{fallback="checkpoint",reason="SourceStalled"} 1.0',
        'rfork_planner_source_faults_total{error="other",fault="source"} 1.0',
        'rfork_planner_verified_bytes_total{source="peer"} 2.0',
        'rfork_planner_verified_bytes_total{source="checkpoint"} 3.0',
        "rfork_planner_plan_seconds_count 2.0",
    }
    assert set() == expected - set(lines)


def operations_of(web: httpx.Client) -> list[tuple[str, str, dict[str, Any]]]:
    """Method, path and description of each route under /v1."""
    return [
        (method, path, operation)
        for path, methods in web.get("/openapi.json").json()["paths"].items()
        if path.startswith("/v1")
        for method, operation in methods.items()
    ]


def test_every_operation_is_described(web: httpx.Client) -> None:
    """Summary, description, examples for bodies and answers, the request's id: a stranger needs no more."""
    operations = operations_of(web)
    assert 13 <= len(operations)
    for _, path, operation in operations:
        assert operation["summary"], path
        assert operation["description"], path
        bodies = [operation["requestBody"]] if "requestBody" in operation else []
        for status, answer in operation["responses"].items():
            assert ["X-Request-Id"] == list(answer["headers"])[:1], (path, status)
            if status == "200":
                bodies.append(answer)
        for body in bodies:
            for media_type, content in body["content"].items():
                assert content.get("examples") or content.get("example"), (path, media_type)
    assert "HTTPValidationError" not in web.get("/openapi.json").text


READING, SENDING = {"401", "403", "422", "429"}, {"400", "401", "403", "408", "413", "422", "429", "503"}
DOCUMENTED = {
    ("put", "/v1/instances/{instance_id}"): SENDING,
    ("post", "/v1/instances/{instance_id}/drain"): READING | {"404", "409", "503"},
    ("get", "/v1/instances/{instance_id}/exit"): READING,
    ("delete", "/v1/instances/{instance_id}"): READING | {"503"},
    ("get", "/v1/instances"): READING,
    ("get", "/v1/instances/{instance_id}"): READING | {"404"},
    ("post", "/v1/forks"): SENDING | {"409"},
    ("post", "/v1/forks/{fork_id}/progress"): SENDING | {"404", "409"},
    ("post", "/v1/forks/{fork_id}/finish"): SENDING,
    ("get", "/v1/forks"): READING,
    ("get", "/v1/forks/{fork_id}"): READING | {"404"},
    ("get", "/v1/models"): READING,
}


def test_every_problem_is_documented(web: httpx.Client) -> None:
    """Each with the media type of problems, and with when to come again where there is a then."""
    found: dict[tuple[str, str], set[str]] = {}
    for method, path, operation in operations_of(web):
        for status, answer in operation["responses"].items():
            if status[0] == "4" or status[0] == "5":
                assert ["application/problem+json"] == list(answer["content"]), (path, status)
                assert (status in ("429", "503")) == ("Retry-After" in answer["headers"]), (path, status)
                found.setdefault((method, path), set()).add(status)
    assert DOCUMENTED == {route: found.get(route) for route in DOCUMENTED}


def test_the_document_is_openapi_3_1(web: httpx.Client) -> None:
    """The version whose schemas are plain JSON Schema."""
    assert web.get("/openapi.json").json()["openapi"].startswith("3.1.")


def test_the_openapi_document_tells_of_the_token() -> None:
    """A generated client knows where to put it, and that the health checks need none."""
    app = create_app(PlannerSettings(token="right"))  # type: ignore[arg-type]
    document = web_of(app).get("/openapi.json", headers={"Authorization": "Bearer right"}).json()
    scheme = document["components"]["securitySchemes"]["token"]
    assert ("http", "bearer", [{"token": []}], []) == (
        scheme["type"],
        scheme["scheme"],
        document["security"],
        document["paths"]["/healthz"]["get"]["security"],
    )


def test_every_reference_of_the_openapi_document_leads_somewhere(web: httpx.Client) -> None:
    """Generators of clients stop at a dangling reference."""
    document = web.get("/openapi.json").json()
    names = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert set() == names - set(document["components"]["schemas"])


def test_the_examples_of_the_openapi_document_work_in_order(web: httpx.Client) -> None:
    """Registering, asking, asking again, progress and finish as documented are answered with success."""
    paths = web.get("/openapi.json").json()["paths"]
    statuses = []
    for method, path, url in (
        ("put", "/v1/instances/{instance_id}", "/v1/instances/seed-1"),
        ("post", "/v1/forks", "/v1/forks"),
        ("post", "/v1/forks/{fork_id}/progress", "/v1/forks/fork-1/progress"),
        ("post", "/v1/forks/{fork_id}/finish", "/v1/forks/fork-1/finish"),
    ):
        for example in paths[path][method]["requestBody"]["content"]["application/json"]["examples"].values():
            statuses.append(web.request(method, url, json=example["value"]).status_code)
    assert [200, 200, 200, 200, 200, 204] == statuses


# -- pages ------------------------------------------------------------------------------------------


def ids_of(page: InstancePage | ForkPage) -> list[str]:
    """What stands on a page."""
    return [each.fork_id if isinstance(each, ForkView) else each.report.instance_id for each in page.items]


def test_instances_come_in_pages(planner: PlannerClient) -> None:
    """In the order of ids, whatever the order of arrival; the last page has no cursor."""
    for name in "cabed":
        planner.report(whole(name))
    pages = [planner.instance_page(limit=2)]
    while pages[-1].next:
        pages.append(planner.instance_page(limit=2, after=pages[-1].next))
    assert [(["a", "b"], "b"), (["c", "d"], "d"), (["e"], None)] == [
        (ids_of(page), page.next) for page in pages
    ]


def test_a_page_that_is_just_full_is_the_last(planner: PlannerClient) -> None:
    """No empty page follows it."""
    for name in "ab":
        planner.report(whole(name))
    assert None is planner.instance_page(limit=2).next


def test_pages_are_stable_while_things_change(planner: PlannerClient) -> None:
    """The instance of the cursor goes, others come before and behind: nobody is told twice or left out."""
    for name in "bdf":
        planner.report(whole(name))
    first = planner.instance_page(limit=2)
    planner.remove("d")
    for name in "ae":
        planner.report(whole(name))
    second = planner.instance_page(limit=2, after=first.next)
    assert (["b", "d"], ["e", "f"], None) == (ids_of(first), ids_of(second), second.next)


def test_forks_come_in_pages(planner: PlannerClient) -> None:
    """As instances do."""
    planner.report(whole("s", max_readers=9))
    for name in "cab":
        planner.ask(ask(name))
    first = planner.fork_page(limit=2)
    second = planner.fork_page(limit=2, after=first.next)
    assert (["fork-a", "fork-b"], ["fork-c"], None) == (ids_of(first), ids_of(second), second.next)


def test_lists_are_filtered_by_model_state_and_host(planner: PlannerClient) -> None:
    """Pages are of what is left."""
    planner.report(whole("s", max_readers=9))
    planner.report(whole("t", model="other"))
    for name in "ab":
        planner.ask(ask(name))
    planner.finish("fork-a", ForkFinish(outcome="forked", seconds=1, bytes_read=1))
    assert [["t"], ["a", "b"], ["b"], ["fork-b"], ["fork-a"], ["fork-b"], []] == [
        ids_of(planner.instance_page(model="other")),
        ids_of(planner.instance_page(state="loading")),
        ids_of(planner.instance_page(host="host-b")),
        ids_of(planner.fork_page(state="running")),
        ids_of(planner.fork_page(state="finished", model="m")),
        ids_of(planner.fork_page(host="host-b")),
        ids_of(planner.fork_page(model="other")),
    ]


def test_the_ranks_of_one_server_are_listed(planner: PlannerClient) -> None:
    """Page by page, together with other filters; not those of a server whose name begins alike."""
    for name in ("pod-target-tp1", "pod-draft-tp0", "pod-target-tp0", "pod-b-target-tp0", "pod", "pod-x"):
        planner.report(whole(name))
    first = planner.instance_page(replica="pod", limit=2)
    second = planner.instance_page(replica="pod", limit=2, after=first.next)
    assert [["pod-draft-tp0", "pod-target-tp0"], ["pod-target-tp1"], ["pod-b-target-tp0"], [], []] == [
        ids_of(first),
        ids_of(second),
        ids_of(planner.instance_page(replica="pod-b", model="m")),
        ids_of(planner.instance_page(replica="pod", model="other")),
        ids_of(planner.instance_page(replica="nobody")),
    ]
    assert ("pod-target-tp0", None) == (first.next, second.next)


def test_a_server_that_nobody_can_be_called_is_refused(web: httpx.Client) -> None:
    """Not taken for one without ranks."""
    response = web.get("/v1/instances", params={"replica": "pod 1"})
    assert (422, ["replica"]) == (
        response.status_code, [each["field"] for each in response.json()["errors"]],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("query", "field"), [("limit=0", "limit"), ("limit=1001", "limit"), ("after=%20", "after")]
)
@pytest.mark.parametrize("path", ["/v1/instances", "/v1/forks"])
def test_a_page_that_cannot_be_is_refused(web: httpx.Client, path: str, query: str, field: str) -> None:
    """With the field that is wrong."""
    response = web.get(f"{path}?{query}")
    assert (422, [field]) == (response.status_code, [each["field"] for each in response.json()["errors"]])


def test_models_tell_what_came_from_storage_and_what_was_forked(planner: PlannerClient) -> None:
    """Bytes of the forks that ended, by the kind of their sources; alike in each row of the rank."""
    planner.report(whole("s"))
    planner.report(report("idle"))
    planner.ask(ask("a"))
    planner.finish(
        "fork-a",
        ForkFinish(
            outcome="forked", seconds=1, bytes_read=9, sources={"s": 5, "snapshot:file:///x": 3, "loader:": 1}
        ),
    )
    assert [(4, 5)] * 2 == [(row.storage_bytes, row.forked_bytes) for row in planner.models()]


def test_models_tell_what_forks_save_against_storage(planner: PlannerClient) -> None:
    """The medians of those that read it all from one kind of source, and the seconds between them."""
    planner.report(whole("s"))
    size = whole("s").image_bytes
    for name, source, seconds in (("a", "snapshot:file:///x", 9.0), ("b", "s", 2.0), ("c", "s", 4.0)):
        planner.ask(ask(name))
        told = ForkFinish(outcome="forked", seconds=seconds, bytes_read=size, sources={source: size})
        planner.finish(f"fork-{name}", told)
    known = {(row.storage_s, row.fork_s, row.saved_s) for row in planner.models()}
    planner.remove("a")
    for name in ("s", "b", "c"):
        planner.remove(name)
    planner.report(whole("t"))
    assert ({(9.0, 3.0, 12.0)}, [(None, None, 0.0)]) == (
        known,
        [(row.storage_s, row.fork_s, row.saved_s) for row in planner.models()],
    )


def test_a_fork_tells_what_its_sources_held_it_to(planner: PlannerClient) -> None:
    """While it runs, and once it has ended."""
    planner.report(whole("s").model_copy(update={"egress_rate": 500}))
    planner.ask(ask("a"))
    told = ForkProgress(verified=((0, 6),), bytes_read=6, bytes_per_s=1.0, phases={"transfer": 1.5})
    planner.progress("fork-a", told)
    running = planner.forks()[0]
    planner.report(whole("s").model_copy(update={"egress_rate": 400}))
    planner.finish("fork-a", ForkFinish(outcome="forked", seconds=1, bytes_read=1))
    assert ({"s": 500}, told, {"s": 400}) == (running.held, running.progress, planner.forks()[0].held)


def test_a_target_counts_to_the_weights_of_its_plan(planner: PlannerClient) -> None:
    """A relay that has learnt nothing yet stands in the row of what it is getting; an idle one in its own."""
    planner.report(whole("s"))
    planner.ask(ask("a"))
    planner.report(report("idle"))
    assert {(WEIGHTS, 1, 1, 1), (None, 0, 0, 0)} == {
        (row.weights_id, row.seeds, row.relays, row.forks_running) for row in planner.models()
    }


# -- the end of an instance -------------------------------------------------------------------------


def test_the_last_seed_is_drained_by_force_only(planner: PlannerClient) -> None:
    """Problem `last-seed` (409); a second seed, or `force`, makes it go."""
    planner.report(whole("s"))
    with pytest.raises(PlannerRefused) as refused:
        planner.drain("s")
    forced = planner.drain("s", force=True).report.state
    planner.report(whole("t"))
    planner.report(whole("u"))
    assert (409, "last-seed", "draining", "draining") == (
        refused.value.status,
        refused.value.problem,
        forced,
        planner.drain("t").report.state,
    )


def test_an_instance_may_end_once_its_readers_have(planner: PlannerClient) -> None:
    """Drained, with a reader: no; without: yes; not known, by a planner that just started: no."""
    planner.report(whole("s"))
    planner.ask(ask("a"))
    planner.report(whole("t"))
    planner.drain("s")
    answers = [planner.may_exit("s")]
    planner.finish("fork-a", ForkFinish(outcome="forked", seconds=1, bytes_read=1))
    answers += [planner.may_exit("s"), planner.may_exit("nobody")]
    assert [(False, 1), (True, 0), (False, 0)] == [(each.may_exit, each.readers) for each in answers]
    assert all(each.reason for each in answers)

"""Malformed and out-of-bounds values are rejected, so that no other caller receives them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import httpx
import pytest

from rfork.schema import ForkResult, SourceFault
from tests.unit.planner.builders import LAYOUT, ORIGIN, WEIGHTS, seed_report

Path = tuple[str | int, ...]
Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None

REPORT: Final[Json] = {
    "instance_id": "t", "model": "m", "layout_id": LAYOUT, "weights_id": WEIGHTS, "generation": 1,
    "rank": {"tp": 0, "tp_size": 1, "pp": 0, "pp_size": 1, "ep": 0, "ep_size": 1, "dp": 0, "role": "main"},
    "image_bytes": 12, "chunk_count": 12, "state": "loading", "verified": [[0, 6]], "provisional_id": ORIGIN,
    "storage": [{"kind": "checkpoint", "uri": "file:///c", "origin": ORIGIN, "weights_id": None}],
    "address": "10.0.0.1:1", "transports": ["http"], "max_readers": 1, "egress_share": 1.0, "egress_rate": 1,
    "placement": {"host": "h", "rack": "r", "zone": "z", "nvlink": "n"}, "readers": ["f"],
}  # fmt: skip
FORK_REQUEST: Final[Json] = {
    "fork_id": "fork-t", "instance": REPORT,
    "faults": [{"instance_id": "s", "fault": "network", "error": "SourceUnavailable", "detail": "why"}],
    "current_assignments": [{"source_id": "s", "chunks": [[6, 12]]}],
}  # fmt: skip
PROGRESS: Final[Json] = {
    "verified": [[0, 7]], "bytes_read": 1, "bytes_per_s": 1.0, "sources": {"s": 1},
    "source_bytes_per_s": {"s": 1.0},
}  # fmt: skip
FINISH: Final[Json] = {
    "outcome": "failed", "seconds": 1.0, "bytes_read": 1, "sources": {"s": 1}, "fallback": "loader:",
    "source_bytes_per_s": {"s": 1.0},
    "reasons": ["why"], "efficiency": 0.5,
}  # fmt: skip
CALLS: Final[dict[str, tuple[str, str, Json]]] = {
    "report": ("PUT", "/v1/instances/t", REPORT),
    "request_plan": ("POST", "/v1/forks", FORK_REQUEST),
    "progress": ("POST", "/v1/forks/fork-t/progress", PROGRESS),
    "finish": ("POST", "/v1/forks/fork-t/finish", FINISH),
}
FREE_TEXT_FIELDS: Final = ("detail", "fallback", "reasons")
"""Free text about failures: it is sanitized instead of rejected."""
LISTS: Final = ("/v1/instances", "/v1/forks", "/v1/models", "/metrics", "/v1/instances/t", "/v1/forks/fork-t")


def leaves(body: Json, path: Path = ()) -> Iterator[tuple[Path, Json]]:
    """Yield each scalar value and its path."""
    if isinstance(body, dict):
        for name, each in body.items():
            yield from leaves(each, (*path, name))
    elif isinstance(body, list):
        for index, each in enumerate(body):
            yield from leaves(each, (*path, index))
    else:
        yield path, body


def changed(body: Json, path: Path, value: Json) -> Json:
    """Return the body with another value at the path."""
    if not path:
        return value
    if isinstance(body, dict):
        return {**body, str(path[0]): changed(body[str(path[0])], path[1:], value)}
    assert isinstance(body, list)
    return [changed(each, path[1:], value) if each is body[int(path[0])] else each for each in body]


def leaf_paths(name: str, *types: type) -> list[Path]:
    """Return the paths of the call's leaves of these types."""
    return [path for path, leaf in leaves(CALLS[name][2]) if type(leaf) in types]


@pytest.fixture
def fleet(web: httpx.Client) -> httpx.Client:
    """A planner with a seed, a target and its fork."""
    web.put("/v1/instances/s", content=seed_report("s").model_dump_json())
    for name in ("report", "request_plan"):
        assert 200 == send(web, name, CALLS[name][2])
    return web


def send(web: httpx.Client, name: str, body: Json) -> int:
    """Return the status of a call; the body is sent as ASCII JSON, so that lone surrogates pass."""
    method, url, _ = CALLS[name]
    return web.request(method, url, content=json.dumps(body), headers={"Content-Type": "application/json"}).status_code


def lists(web: httpx.Client) -> list[int]:
    """Return the statuses of all lists."""
    return [web.get(each).status_code for each in LISTS]


@pytest.mark.parametrize("value", ["\ud800", "line\nbreak", "\x1b[2J", "x" * 70_000], ids=ascii)
@pytest.mark.parametrize("name", CALLS)
def test_malformed_text_is_rejected(fleet: httpx.Client, name: str, value: str) -> None:
    """It is rejected with 422, or sanitized in free text; other callers are unaffected."""
    accepted = [
        path for path in leaf_paths(name, str) if send(fleet, name, changed(CALLS[name][2], path, value)) != 422
    ]
    free_text_paths = [path for path in leaf_paths(name, str) if any(word in path for word in FREE_TEXT_FIELDS)]
    assert free_text_paths == accepted
    assert [200] * len(LISTS) == lists(fleet)


@pytest.mark.parametrize("value", [-1, 10**400, 1e300], ids=["-1", "10**400", "1e300"])
@pytest.mark.parametrize("name", CALLS)
def test_numbers_out_of_bounds_are_rejected(fleet: httpx.Client, name: str, value: float) -> None:
    """Sizes, counts, ranks, rates and times are rejected with 422, and plans are made as before."""
    accepted = [
        path for path in leaf_paths(name, int, float) if send(fleet, name, changed(CALLS[name][2], path, value)) != 422
    ]
    assert [] == accepted
    assert 200 == send(fleet, "request_plan", FORK_REQUEST)
    assert [200] * len(LISTS) == lists(fleet)


NAMES: Final[list[Json]] = [{"\ud800": 1}, {"a\nb": 1}, {"": 1}, {"x" * 3000: 1}]
SOURCES: Final[list[Json]] = [
    *NAMES,
    {str(each): 1 for each in range(4097)},
    {f"{each:02000}": 1 for each in range(66)},
]
RATES: Final[list[Json]] = [*NAMES, {str(each): 1 for each in range(65)}]
LONG: Final[list[tuple[str, Path, Json]]] = [
    ("report", ("verified",), [[0, 1]] * 4097),
    ("report", ("readers",), ["f"] * 4097),
    ("report", ("transports",), ["http"] * 17),
    ("report", ("storage",), [{"kind": "loader"}] * 17),
    ("request_plan", ("faults",), [{"instance_id": "s", "fault": "source", "error": "E"}] * 257),
    ("request_plan", ("current_assignments",), [{"source_id": "s", "chunks": []}] * 65),
    ("request_plan", ("current_assignments",), [{"source_id": "s", "chunks": [[0, 1]] * 2049}] * 2),
    ("progress", ("verified",), [[0, 1]] * 4097),
    *((name, ("sources",), value) for name in ("progress", "finish") for value in SOURCES),
    *((name, ("source_bytes_per_s",), value) for name in ("progress", "finish") for value in RATES),
]


def test_lists_are_bounded(fleet: httpx.Client) -> None:
    """One record stays within kilobytes; source names are validated like other text."""
    statuses = [send(fleet, name, changed(CALLS[name][2], path, value)) for name, path, value in LONG]
    assert [422] * len(LONG) == statuses


def test_failure_text_is_sanitized_to_one_line() -> None:
    """A fork's result is not lost because of an error's text. The last reasons are kept."""
    finish = ForkResult(
        outcome="failed", seconds=1, bytes_read=0, fallback="checkpoint:/a\ud800b",
        reasons=tuple(f"{number}\n\x1b{'é' * 2000}" for number in range(70)),
    )  # fmt: skip
    fault = SourceFault(instance_id="s", fault="source", error="SourceUnavailable", detail="a\r\n\u2028b\u00a0c")
    assert "checkpoint:/a b" == finish.fallback
    assert 64 == len(finish.reasons)
    assert "6  é" == finish.reasons[0][:4]
    assert "é…" == finish.reasons[0][-2:]
    assert {1000} == {len(reason) for reason in finish.reasons}
    assert "a   b\u00a0c" == fault.detail


def test_maximal_reports_are_accepted(fleet: httpx.Client) -> None:
    """The limits themselves are allowed."""
    maximal: dict[str, Json] = {
        "verified": [[2 * each, 2 * each + 1] for each in range(4096)], "chunk_count": 1 << 20,
        "image_bytes": 2**63 - 1, "generation": 2**63 - 1, "egress_rate": 2**63 - 1, "max_readers": 1 << 16,
        "readers": [f"f{each}" for each in range(4096)], "transports": ["t" * 256] * 16,
        "storage": [{"kind": "snapshot", "uri": "u" * 2048}] * 16, "layout_id": "c" * 32,
    }  # fmt: skip
    assert isinstance(REPORT, dict)
    bodies: list[Json] = [{**REPORT, **maximal}, {**REPORT, "address": "hôte:1", "model": "モデル"}]
    assert [200, 200] == [send(fleet, "report", body) for body in bodies]
    assert [200] * len(LISTS) == lists(fleet)

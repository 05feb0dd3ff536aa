"""Values without form or bound: refused at the door, so that no other caller ever meets them."""

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
    "address": "10.0.0.1:1", "transports": ["http"], "max_readers": 1, "weight": 1.0, "egress_rate": 1,
    "placement": {"host": "h", "rack": "r", "zone": "z", "nvlink": "n"}, "readers": ["f"],
}  # fmt: skip
FORK_REQUEST: Final[Json] = {
    "fork_id": "fork-t", "instance": REPORT,
    "faults": [{"instance_id": "s", "fault": "network", "error": "SourceUnavailable", "detail": "why"}],
    "current": [{"source_id": "s", "chunks": [[6, 12]]}],
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
    "ask": ("POST", "/v1/forks", FORK_REQUEST),
    "progress": ("POST", "/v1/forks/fork-t/progress", PROGRESS),
    "finish": ("POST", "/v1/forks/fork-t/finish", FINISH),
}
FREE_TEXT_FIELDS: Final = ("detail", "fallback", "reasons")
"""Texts that say what went wrong: they are made to fit, and the rest of the request counts."""
LISTS: Final = ("/v1/instances", "/v1/forks", "/v1/models", "/metrics", "/v1/instances/t", "/v1/forks/fork-t")


def leaves(body: Json, path: Path = ()) -> Iterator[tuple[Path, Json]]:
    """Each value that holds no others, and where it stands."""
    if isinstance(body, dict):
        for name, each in body.items():
            yield from leaves(each, (*path, name))
    elif isinstance(body, list):
        for index, each in enumerate(body):
            yield from leaves(each, (*path, index))
    else:
        yield path, body


def changed(body: Json, path: Path, value: Json) -> Json:
    """The body with another value there."""
    if not path:
        return value
    if isinstance(body, dict):
        return {**body, str(path[0]): changed(body[str(path[0])], path[1:], value)}
    assert isinstance(body, list)
    return [changed(each, path[1:], value) if each is body[int(path[0])] else each for each in body]


def leaf_paths(name: str, *types: type) -> list[Path]:
    """Where the body of a call has a leaf of one of the types."""
    return [path for path, leaf in leaves(CALLS[name][2]) if type(leaf) in types]


@pytest.fixture
def fleet(web: httpx.Client) -> httpx.Client:
    """A seed, a target and its fork are there."""
    web.put("/v1/instances/s", content=seed_report("s").model_dump_json())
    for name in ("report", "ask"):
        assert 200 == send(web, name, CALLS[name][2])
    return web


def send(web: httpx.Client, name: str, body: Json) -> int:
    """The status of a call; its body in ASCII, as JSON may be, so that halves of characters get through."""
    method, url, _ = CALLS[name]
    return web.request(method, url, content=json.dumps(body), headers={"Content-Type": "application/json"}).status_code


def lists(web: httpx.Client) -> list[int]:
    """What those who look are answered."""
    return [web.get(each).status_code for each in LISTS]


@pytest.mark.parametrize("value", ["\ud800", "line\nbreak", "\x1b[2J", "x" * 70_000], ids=ascii)
@pytest.mark.parametrize("name", CALLS)
def test_a_text_without_form_reaches_nobody(fleet: httpx.Client, name: str, value: str) -> None:
    """422, or made to fit where it says what went wrong; everyone else is answered as before."""
    accepted = [
        path for path in leaf_paths(name, str) if send(fleet, name, changed(CALLS[name][2], path, value)) != 422
    ]
    free_text_paths = [path for path in leaf_paths(name, str) if any(word in path for word in FREE_TEXT_FIELDS)]
    assert (free_text_paths, [200] * len(LISTS)) == (accepted, lists(fleet))


@pytest.mark.parametrize("value", [-1, 10**400, 1e300], ids=["-1", "10**400", "1e300"])
@pytest.mark.parametrize("name", CALLS)
def test_a_number_out_of_bounds_reaches_nobody(fleet: httpx.Client, name: str, value: float) -> None:
    """Sizes, counts, ranks, rates and times: 422, and plans are made as before."""
    accepted = [
        path for path in leaf_paths(name, int, float) if send(fleet, name, changed(CALLS[name][2], path, value)) != 422
    ]
    assert ([], 200, [200] * len(LISTS)) == (accepted, send(fleet, "ask", FORK_REQUEST), lists(fleet))


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
    ("ask", ("faults",), [{"instance_id": "s", "fault": "source", "error": "E"}] * 257),
    ("ask", ("current",), [{"source_id": "s", "chunks": []}] * 65),
    ("ask", ("current",), [{"source_id": "s", "chunks": [[0, 1]] * 2049}] * 2),
    ("progress", ("verified",), [[0, 1]] * 4097),
    *((name, ("sources",), value) for name in ("progress", "finish") for value in SOURCES),
    *((name, ("source_bytes_per_s",), value) for name in ("progress", "finish") for value in RATES),
]


def test_a_list_has_an_end(fleet: httpx.Client) -> None:
    """So that one record is kilobytes whatever is sent; names of sources have the form of other texts."""
    statuses = [send(fleet, name, changed(CALLS[name][2], path, value)) for name, path, value in LONG]
    assert [422] * len(LONG) == statuses


def test_what_went_wrong_is_told_in_one_line_each() -> None:
    """An error's text may be anything: a fork's end is not lost over it. The last reasons stay."""
    finish = ForkResult(
        outcome="failed", seconds=1, bytes_read=0, fallback="checkpoint:/a\ud800b",
        reasons=tuple(f"{number}\n\x1b{'é' * 2000}" for number in range(70)),
    )  # fmt: skip
    fault = SourceFault(instance_id="s", fault="source", error="SourceUnavailable", detail="a\r\n\u2028b\u00a0c")
    assert ("checkpoint:/a b", 64, "6  é", "é…", {1000}, "a   b\u00a0c") == (
        finish.fallback, len(finish.reasons), finish.reasons[0][:4], finish.reasons[0][-2:],
        {len(reason) for reason in finish.reasons}, fault.detail,
    )  # fmt: skip


def test_the_most_a_report_holds_is_taken(fleet: httpx.Client) -> None:
    """The bounds themselves are allowed."""
    maximal: dict[str, Json] = {
        "verified": [[2 * each, 2 * each + 1] for each in range(4096)], "chunk_count": 1 << 20,
        "image_bytes": 2**63 - 1, "generation": 2**63 - 1, "egress_rate": 2**63 - 1, "max_readers": 1 << 16,
        "readers": [f"f{each}" for each in range(4096)], "transports": ["t" * 256] * 16,
        "storage": [{"kind": "snapshot", "uri": "u" * 2048}] * 16, "layout_id": "c" * 32,
    }  # fmt: skip
    assert isinstance(REPORT, dict)
    bodies: list[Json] = [{**REPORT, **maximal}, {**REPORT, "address": "hôte:1", "model": "モデル"}]
    assert ([200, 200], [200] * len(LISTS)) == (
        [send(fleet, "report", body) for body in bodies], lists(fleet),
    )  # fmt: skip

"""`rfork plan`: rates as people write them, and what is said of a preview."""

from __future__ import annotations

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

from rfork.cli.app import app
from rfork.cli.plan import rate_of, render_tree, summary
from rfork.errors import UserError
from rfork.planner_client.client import PlannerClient
from rfork.schema import ChunkAssignment, ModelInfo, Preview, PreviewPage, PreviewRequest, PreviewTarget

ALL = ((0, 4),)
V1, V2 = f"files:{'1' * 32}", f"files:{'2' * 32}"
LOW, HIGH = ((0, 2),), ((2, 4),)

RATES = [
    ("3GB/s", 3e9),
    ("25Gbit/s", 3.125e9),
    ("25gbit/s", 3.125e9),
    ("10 Gb/s", 1.25e9),
    ("400Mbps", 5e7),
    ("1.5e9", 1.5e9),
    ("800kB", 8e5),
    ("7", 7.0),
]


@pytest.mark.parametrize(("text", "expected"), RATES)
def test_rates_are_written_in_many_ways(text: str, expected: float) -> None:
    """Bytes with a capital B, bits with a small one or in full; a bare number is bytes."""
    assert expected == pytest.approx(rate_of(text))


@pytest.mark.parametrize("text", ["", "fast", "0", "-1", "3 GB/h", "1e30", "GB/s", "nan"])
def test_what_is_no_rate_is_refused(text: str) -> None:
    """With an example of one."""
    with pytest.raises(UserError, match="is no rate"):
        rate_of(text)


def target(number: int, host: int, seconds: float | None, **shares: tuple[tuple[int, int], ...]) -> PreviewTarget:
    """One replica that would come; `p1` reads from the first of them, over http as from everybody."""
    named = {name.replace("p", "preview-"): chunks for name, chunks in shares.items()}
    target_id = f"preview-{number}"
    return PreviewTarget(
        instance_id=target_id,
        host=f"preview-host-{host}",
        shares=tuple(ChunkAssignment(source_id=name, chunks=chunks) for name, chunks in named.items()),
        transports={name: "http" for name in named if name != target_id},
        seconds=seconds,
        reason="" if shares else "nobody holds it",
    )


def preview(*targets: PreviewTarget, storage_bytes: int = 0, measured: bool = False) -> Preview:
    """Of an image of 4 GB, over links of 1 GB/s."""
    return Preview(
        model="m",
        rank_key="main-tp0of1-pp0of1-ep0of1",
        image_bytes=4_000_000_000,
        chunk_count=4,
        seeds=1,
        link_bytes_per_s=1e9,
        measured=measured,
        storage_bytes_per_s=5e8,
        targets=targets,
        seconds=max((each.seconds for each in targets if each.seconds is not None), default=None),
        bound_s=4.0,
        storage_bytes=storage_bytes,
    )


def rendered_tree(made: Preview) -> list[str]:
    """Its tree as it is printed on a wide terminal, less the lines under it."""
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(render_tree(made))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return lines[: -len(summary(made))]


def test_a_chain_is_drawn_as_one() -> None:
    """Each under the one that it reads from."""
    made = preview(target(1, 1, 4.0, s=ALL), target(2, 2, 5.0, p1=ALL))
    assert [
        "m: 4.00 GB in 4 chunks, to 2 replicas that would come now",
        "└── s is there already",
        "    └── preview-1 on preview-host-1: all over http; 4.00 s",
        "        └── preview-2 on preview-host-2: all over http; 5.00 s",
    ] == rendered_tree(made)


def test_who_reads_from_several_stands_under_the_nearest_to_the_top() -> None:
    """And names the others: two that read from one another are no circle."""
    made = preview(target(1, 1, 4.0, s=LOW, p2=HIGH), target(2, 2, 5.0, p1=LOW, s=HIGH))
    assert [
        "└── s is there already",
        "    ├── preview-1 on preview-host-1: 50% over http, 50% from preview-2 over http; 4.00 s",
        "    └── preview-2 on preview-host-2: 50% over http, 50% from preview-1 over http; 5.00 s",
    ] == rendered_tree(made)[1:]


def test_storage_is_a_root() -> None:
    """Of those that read a part of it themselves."""
    made = preview(target(1, 1, 4.0, p1=LOW, p2=HIGH), target(2, 2, None, p2=HIGH, p1=LOW))
    assert [
        "└── storage, 500.0 MB/s each",
        "    ├── preview-1 on preview-host-1: 50% from storage, 50% from preview-2 over http; 4.00 s",
        "    └── preview-2 on preview-host-2: 50% from storage, 50% from preview-1 over http; never whole",
    ] == rendered_tree(made)[1:]


def test_of_many_the_first_are_drawn() -> None:
    """A thousand lines tell nobody anything."""
    made = preview(*(target(number, number, 4.0, s=ALL) for number in range(1, 101)))
    lines = rendered_tree(made)
    assert (67, "└── and 36 more: --json names them all") == (len(lines), lines[-1])


def test_those_with_nobody_to_read_from_say_why() -> None:
    """Once for each reason."""
    made = preview(target(1, 1, None), target(2, 2, None))
    assert ["└── 2 replicas with nobody to read from", "    └── nobody holds it"] == rendered_tree(made)[1:]


def test_what_it_comes_to() -> None:
    """Beside the bound, and beside everybody's reading storage."""
    assert [
        "all are whole after 5.00 s: 1.25 times the bound of 4.00 s, one image over one link",
        "each from storage: 8.00 s, and 8.00 GB are read from it; by this plan nothing",
        "links of 1.00 GB/s (as forks measured it), storage of 500.0 MB/s for each reader",
    ] == summary(preview(target(1, 1, 4.0, s=ALL), target(2, 2, 5.0, p1=ALL), measured=True))


@pytest.fixture
def plan_requests(monkeypatch: pytest.MonkeyPatch) -> list[PreviewRequest]:
    """What the planner is asked, which knows the models `m` and, where it is asked for that, no other."""
    requests: list[PreviewRequest] = []

    def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            rows = [
                ModelInfo(
                    model="m",
                    version=version,
                    rank_key="r",
                    layout_id="0" * 32,
                    weights_id=None,
                    image_bytes=4,
                    seeds=1,
                    relays=0,
                    forks_running=0,
                    storage_bytes=0,
                    forked_bytes=0,
                )
                for version in (V1, V2)
            ]
            return httpx.Response(200, json=[row.model_dump(mode="json") for row in rows])
        requests.append(PreviewRequest.model_validate_json(request.read()))
        if requests[-1].version not in (None, V1, V2):
            problem = {"type": "x/unknown-version", "title": "x", "status": 404, "detail": "no such version"}
            return httpx.Response(404, json=problem)
        if requests[-1].model != "m":
            problem = {"type": "x/unknown-model", "title": "x", "status": 404, "detail": "no instance of it"}
            return httpx.Response(404, json=problem)
        page = PreviewPage(items=(preview(target(1, 1, 4.0, s=ALL)),))
        return httpx.Response(200, content=page.model_dump_json())

    def client(settings: object) -> PlannerClient:
        return PlannerClient("http://planner", transport=httpx.MockTransport(handler))

    monkeypatch.setattr(PlannerClient, "of", client)
    return requests


def test_the_command_asks_what_it_was_told(plan_requests: list[PreviewRequest]) -> None:
    """All options; without a model, the only one that the planner knows."""
    words = "plan --dry-run --targets 16 --per-host 8 --cold --rank r --rack a --zone z --link 8Gbit/s"
    run = CliRunner().invoke(app, [*words.split(), "--storage", "3GB/s", "--json"])
    assert (0, "preview-1") == (
        run.exit_code, PreviewPage.model_validate_json(run.stdout).items[0].targets[0].instance_id,
    )  # fmt: skip
    assert [
        PreviewRequest(
            model="m", rank_key="r", targets=16, per_host=8, rack="a", zone="z", cold=True,
            link_bytes_per_s=1e9, storage_bytes_per_s=3e9,
        )
    ] == plan_requests  # fmt: skip


@pytest.mark.parametrize("text", [V1, "files:11111111", "files:11"])
def test_a_version_is_named_as_tables_show_it(plan_requests: list[PreviewRequest], text: str) -> None:
    """In full, shortened, or by its beginning; the planner is asked for all of it."""
    assert 0 == CliRunner().invoke(app, ["plan", "m", "--version", text]).exit_code
    assert [V1] == [request.version for request in plan_requests]


def test_the_plan_names_its_version() -> None:
    """Beside the model, shortened."""
    versioned_preview = preview(target(1, 1, 4.0, s=ALL)).model_copy(update={"version": V1})
    assert rendered_tree(versioned_preview)[0].startswith("m files:11111111: 4.00 GB")


WRONG = [
    (["m", "--version", "files:"], "'files:' could be any of 2"),
    (["m", "--version", "v9"], "no such version"),
    (["other"], "no instance of it"),
    (["m", "--link", "fast"], "'fast' is no rate"),
    (["m" * 513], "model: "),
]


@pytest.mark.parametrize(("words", "message"), WRONG)
def test_what_it_cannot_ask_is_one_line(plan_requests: list[PreviewRequest], words: list[str], message: str) -> None:
    """And exit code 2: the user's."""
    run = CliRunner().invoke(app, ["plan", *words])
    assert (2, True) == (run.exit_code, f"error: {message}" in run.stderr.replace("\n", " "))

"""`rfork plan`: parsing of rates, and rendering of a preview."""

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
def test_a_rate_is_in_bytes_or_bits(text: str, expected: float) -> None:
    """A capital B means bytes, a small one or "bit" means bits; a plain number is bytes."""
    assert expected == pytest.approx(rate_of(text))


@pytest.mark.parametrize("text", ["", "fast", "0", "-1", "3 GB/h", "1e30", "GB/s", "nan"])
def test_invalid_rates_are_rejected(text: str) -> None:
    """Text without a valid number and unit is an error."""
    with pytest.raises(UserError, match="is not a rate"):
        rate_of(text)


def target(number: int, host: int, seconds: float | None, **shares: tuple[tuple[int, int], ...]) -> PreviewTarget:
    """A predicted replica, which reads from its `shares` over http; `p1` is the first replica."""
    named = {name.replace("p", "preview-"): chunks for name, chunks in shares.items()}
    target_id = f"preview-{number}"
    return PreviewTarget(
        instance_id=target_id,
        host=f"preview-host-{host}",
        shares=tuple(ChunkAssignment(source_id=name, chunks=chunks) for name, chunks in named.items()),
        transports={name: "http" for name in named if name != target_id},
        seconds=seconds,
        reason="" if shares else "no instance has it",
    )


def preview(*targets: PreviewTarget, storage_bytes: int = 0, measured: bool = False) -> Preview:
    """A preview of an image of 4 GB, over links of 1 GB/s."""
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


def rendered_tree(plan_preview: Preview) -> list[str]:
    """Return the tree as printed on a wide terminal, without the summary."""
    console = Console(width=200, highlight=False)
    with console.capture() as capture:
        console.print(render_tree(plan_preview))
    lines = [line.rstrip() for line in capture.get().splitlines()]
    return lines[: -len(summary(plan_preview))]


def test_a_chain_is_drawn_as_a_chain() -> None:
    """Each replica is drawn below its source."""
    plan_preview = preview(target(1, 1, 4.0, s=ALL), target(2, 2, 5.0, p1=ALL))
    assert [
        "m: 4.00 GB in 4 chunks, to 2 new replicas",
        "└── s (running)",
        "    └── preview-1 on preview-host-1: all over http; 4.00 s",
        "        └── preview-2 on preview-host-2: all over http; 5.00 s",
    ] == rendered_tree(plan_preview)


def test_a_replica_with_several_sources_is_drawn_below_the_one_nearest_to_the_root() -> None:
    """Its other sources are named, and two replicas that read from each other do not form a cycle."""
    plan_preview = preview(target(1, 1, 4.0, s=LOW, p2=HIGH), target(2, 2, 5.0, p1=LOW, s=HIGH))
    assert [
        "└── s (running)",
        "    ├── preview-1 on preview-host-1: 50% over http, 50% from preview-2 over http; 4.00 s",
        "    └── preview-2 on preview-host-2: 50% over http, 50% from preview-1 over http; 5.00 s",
    ] == rendered_tree(plan_preview)[1:]


def test_storage_is_a_root() -> None:
    """Replicas that read a part from storage are drawn below it."""
    plan_preview = preview(target(1, 1, 4.0, p1=LOW, p2=HIGH), target(2, 2, None, p2=HIGH, p1=LOW))
    assert [
        "└── storage, 500.0 MB/s per reader",
        "    ├── preview-1 on preview-host-1: 50% from storage, 50% from preview-2 over http; 4.00 s",
        "    └── preview-2 on preview-host-2: 50% from storage, 50% from preview-1 over http; never complete",
    ] == rendered_tree(plan_preview)[1:]


def test_only_the_first_replicas_are_drawn() -> None:
    """The tree is limited, and the rest is counted."""
    plan_preview = preview(*(target(number, number, 4.0, s=ALL) for number in range(1, 101)))
    lines = rendered_tree(plan_preview)
    assert 67 == len(lines)
    assert "└── and 36 more: use --json to list all" == lines[-1]


def test_replicas_without_a_source_have_a_reason() -> None:
    """Each reason is plan_preview once."""
    plan_preview = preview(target(1, 1, None), target(2, 2, None))
    assert ["└── 2 replicas without a source", "    └── no instance has it"] == rendered_tree(plan_preview)[1:]


def test_the_summary_compares_the_total_time() -> None:
    """The total time is compared with the lower bound and with reading from storage."""
    assert [
        "all complete after 5.00 s: 1.25 times the lower bound of 4.00 s, one image over one link",
        "if each read from storage: 8.00 s, 8.00 GB read from storage; with this plan: nothing",
        "link 1.00 GB/s (measured by forks), storage 500.0 MB/s per reader",
    ] == summary(preview(target(1, 1, 4.0, s=ALL), target(2, 2, 5.0, p1=ALL), measured=True))


@pytest.fixture
def plan_requests(monkeypatch: pytest.MonkeyPatch) -> list[PreviewRequest]:
    """Preview requests received by a planner that knows only the model `m`, in two versions."""
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
            problem = {"type": "x/unknown-model", "title": "x", "status": 404, "detail": "no instance of this model"}
            return httpx.Response(404, json=problem)
        page = PreviewPage(items=(preview(target(1, 1, 4.0, s=ALL)),))
        return httpx.Response(200, content=page.model_dump_json())

    def client(settings: object) -> PlannerClient:
        return PlannerClient("http://planner", transport=httpx.MockTransport(handler))

    monkeypatch.setattr(PlannerClient, "of", client)
    return requests


def test_options_are_sent_to_the_planner(plan_requests: list[PreviewRequest]) -> None:
    """All options are sent; the default model is the only one that the planner knows."""
    arguments = "plan --targets 16 --per-host 8 --cold --rank r --rack a --zone z --link 8Gbit/s"
    run = CliRunner().invoke(app, [*arguments.split(), "--storage", "3GB/s", "--json"])
    assert 0 == run.exit_code
    assert "preview-1" == PreviewPage.model_validate_json(run.stdout).items[0].targets[0].instance_id
    assert [
        PreviewRequest(
            model="m", rank_key="r", targets=16, per_host=8, rack="a", zone="z", cold=True,
            link_bytes_per_s=1e9, storage_bytes_per_s=3e9,
        )
    ] == plan_requests  # fmt: skip


@pytest.mark.parametrize("text", [V1, "files:11111111", "files:11"])
def test_a_version_can_be_abbreviated(plan_requests: list[PreviewRequest], text: str) -> None:
    """The complete, the short form or a prefix is sent to the planner as the complete version."""
    assert 0 == CliRunner().invoke(app, ["plan", "m", "--version", text]).exit_code
    assert [V1] == [request.version for request in plan_requests]


def test_the_plan_shows_its_version() -> None:
    """The title has the model and the short version."""
    versioned_preview = preview(target(1, 1, 4.0, s=ALL)).model_copy(update={"version": V1})
    assert rendered_tree(versioned_preview)[0].startswith("m files:11111111: 4.00 GB")


INVALID_ARGUMENTS = [
    (["m", "--version", "files:"], "'files:' is ambiguous, 2 versions match"),
    (["m", "--version", "v9"], "no such version"),
    (["other"], "no instance of this model"),
    (["m", "--link", "fast"], "'fast' is not a rate"),
    (["m" * 513], "MODEL: "),
]


@pytest.mark.parametrize(("arguments", "message"), INVALID_ARGUMENTS)
def test_invalid_arguments_are_user_errors(
    plan_requests: list[PreviewRequest], arguments: list[str], message: str
) -> None:
    """Each prints one line and exits with code 2."""
    run = CliRunner().invoke(app, ["plan", *arguments])
    assert 2 == run.exit_code
    assert f"error: {message}" in run.stderr.replace("\n", " ")

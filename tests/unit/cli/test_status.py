"""`rfork status`: the model table and the instance tree."""

from __future__ import annotations

import pytest
from rich.console import Console

from rfork.cli.fleet_queries import model_table
from rfork.cli.status import fork_tree
from rfork.schema import ForkInfo, ForkResult, InstanceInfo, InstanceReport, Placement, Rank
from tests.unit.cli.fleet_builders import model

FAILURE = "NotSameHost: the source's socket is not reachable from this process"


def instance(instance_id: str) -> InstanceInfo:
    """Return a seed of four chunks."""
    report = InstanceReport(
        instance_id=instance_id,
        model="m",
        layout_id="0" * 32,
        image_bytes=4,
        chunk_count=4,
        state="serving",
        verified=((0, 4),),
        address="a:1",
        placement=Placement(host="node"),
    )
    return InstanceInfo(report=report, age_s=0.0)


def finished(instance_id: str, *reasons: str) -> ForkInfo:
    """Return a finished fork with these failure reasons."""
    finish = ForkResult(outcome="forked", seconds=1.0, bytes_read=4, reasons=reasons)
    return ForkInfo(
        fork_id="f", instance_id=instance_id, model="m", rank=Rank(), state="finished", finish=finish,
        age_s=1.0, chunk_count=4, image_bytes=4,
    )  # fmt: skip


def rendered_tree(*forks: ForkInfo, view: InstanceInfo | None = None) -> str:
    """Return the tree of one instance as printed on a wide terminal."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(fork_tree([view or instance("a")], forks))
    return capture.get()


def test_the_tree_and_the_table_show_versions() -> None:
    """Both distinguish two versions of one model."""
    console = Console(width=200)
    versions = ("v1", f"files:{'3' * 32}")
    rows = [model(version=version) for version in versions]
    views = [
        instance(name).model_copy(update={"version": version}) for name, version in zip("ab", versions, strict=True)
    ]
    with console.capture() as capture:
        console.print(model_table(rows, "model"))
        console.print(fork_tree(views, []))
    text = capture.get()
    expected = [
        "llama  v1 ",
        "llama  files:33333333 ",
        "seed a m v1 on node",
        "seed b m files:33333333 on node",
    ]
    assert [] == [each for each in expected if each not in text]


def test_a_finished_fork_shows_its_failures() -> None:
    """The reasons of failures remain visible after the fork finished."""
    assert FAILURE in rendered_tree(finished("a", FAILURE))


def test_only_the_last_reasons_are_shown() -> None:
    """A fork with many failures does not fill the screen."""
    text = rendered_tree(finished("a", *(f"reason {number}" for number in range(9))))
    assert [6, 7, 8] == [number for number in range(9) if f"reason {number}" in text]


@pytest.mark.parametrize(
    ("skew_s", "text"), [(3600.0, "3600 s ahead of the planner's"), (-60.0, "60 s behind the planner's")]
)
def test_a_wrong_clock_is_shown(skew_s: float, text: str) -> None:
    """The difference and its direction are shown."""
    seen = instance("a")
    report = seen.report.model_copy(update={"clock_skew_s": skew_s})
    assert text in rendered_tree(view=seen.model_copy(update={"report": report}))

"""`rfork status`: what the tree of instances and forks says."""

from __future__ import annotations

import pytest
from rich.console import Console

from rfork.cli.status import fork_tree, model_table
from rfork.schema import ForkInfo, ForkResult, InstanceInfo, InstanceReport, Placement, Rank
from tests.unit.cli.fleet_builders import model

DETOUR = "NotSameHost: the source's socket cannot be reached from here"


def instance(instance_id: str) -> InstanceInfo:
    """A seed of four chunks."""
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
    """A fork that has ended, with what went wrong on its way."""
    finish = ForkResult(outcome="forked", seconds=1.0, bytes_read=4, reasons=reasons)
    return ForkInfo(
        fork_id="f", instance_id=instance_id, model="m", rank=Rank(), state="finished", finish=finish,
        age_s=1.0, chunk_count=4, image_bytes=4,
    )  # fmt: skip


def rendered_tree(*forks: ForkInfo, view: InstanceInfo | None = None) -> str:
    """The tree of one instance as it is printed on a wide terminal."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(fork_tree([view or instance("a")], forks))
    return capture.get()


def test_the_tree_and_the_table_name_versions() -> None:
    """Two versions of one model are told apart in both."""
    console = Console(width=200)
    versions = ("v1", f"files:{'3' * 32}")
    rows = [model(version=version) for version in versions]
    views = [
        instance(name).model_copy(update={"version": version}) for name, version in zip("ab", versions, strict=True)
    ]
    with console.capture() as capture:
        console.print(model_table(rows))
        console.print(fork_tree(views, []))
    text = capture.get()
    expected = [
        "llama  v1 ",
        "llama  files:33333333 ",
        "seed a m v1 on node",
        "seed b m files:33333333 on node",
    ]
    assert [] == [words for words in expected if words not in text]


def test_a_fork_that_took_another_way_says_why() -> None:
    """What went wrong on the way stays to be seen once the fork is done."""
    assert DETOUR in rendered_tree(finished("a", DETOUR))


def test_of_many_reasons_the_last_are_shown() -> None:
    """A fork of a bad night does not fill the screen."""
    text = rendered_tree(finished("a", *(f"reason {number}" for number in range(9))))
    assert [6, 7, 8] == [number for number in range(9) if f"reason {number}" in text]


@pytest.mark.parametrize(
    ("skew_s", "words"), [(3600.0, "3600 s ahead of the planner's"), (-60.0, "60 s behind the planner's")]
)
def test_an_instance_whose_clock_is_wrong_says_so(skew_s: float, words: str) -> None:
    """By how much, and which way."""
    seen = instance("a")
    report = seen.report.model_copy(update={"clock_skew_s": skew_s})
    assert words in rendered_tree(view=seen.model_copy(update={"report": report}))

"""`rfork status`: the model table and the instance tree."""

from __future__ import annotations

import pytest
from rich.console import Console

from rfork.cli.fleet_queries import holders_of_model, model_table
from rfork.cli.status import fork_tree, holder_rows
from rfork.schema import (
    ForkInfo,
    ForkResult,
    HeldImage,
    HolderInfo,
    HolderReport,
    InstanceInfo,
    InstanceReport,
    Placement,
    Rank,
    RefusedImage,
    WantedImage,
)
from tests.unit.cli.fleet_builders import model

FAILURE = "NotSameHost: the source's socket is not reachable from this process"


LAYOUT = "0" * 32
GB = 10**9
READY = HeldImage(
    instance_id="i1", model="llama", version="v1", rank=Rank(), layout_id=LAYOUT, image_bytes=4 * GB, state="ready",
    idle_s=180,
)  # fmt: skip
FETCHING = READY.model_copy(update={"instance_id": "i2", "version": "v2", "state": "fetching"})
REFUSED = RefusedImage(model="qwen", version="v1", rank_key=Rank().key, reason="needs 140 GB of 96 GB memory")
WANTED = WantedImage(
    model="llama", version="v1", rank=Rank(), layout_id=LAYOUT, image_bytes=4 * GB, cause="selected",
    reason="selected by the holder",
)  # fmt: skip


def holder(
    *images: HeldImage, refused: tuple[RefusedImage, ...] = (), host: str = "node-1", age_s: float = 1.0
) -> HolderInfo:
    """Return a holder that should keep `WANTED`."""
    report = HolderReport(
        holder_id=f"holder-{host}", placement=Placement(host=host), memory_bytes=96 * GB,
        used_bytes=4 * GB * len(images), images=images, refused=refused,
    )  # fmt: skip
    return HolderInfo(report=report, age_s=age_s, wanted=(WANTED,))


def shown(*holders: HolderInfo) -> list[str]:
    """Return the rows of the table of holders as text."""
    return [" | ".join(str(cell) for cell in row) for row in holder_rows(holders)]


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


def test_a_holder_shows_its_memory_and_images() -> None:
    """Host and memory once, then each image with its state, its idle time and why it is kept."""
    assert [
        "node-1 | 8.00 GB of 96.00 GB | llama | v1 | 4.00 GB | ready | 3 min | selected by the holder",
        " |  | llama | v2 | 4.00 GB | fetching |  | no longer wanted",
    ] == shown(holder(READY, FETCHING))


def test_refused_images_show_the_reason() -> None:
    """Holders with refused images come first."""
    rows = shown(holder(READY), holder(refused=(REFUSED,), host="node-2"), holder(host="node-0"))
    assert [
        "node-2 | 0 B of 96.00 GB | qwen | v1 |  | refused |  | needs 140 GB of 96 GB memory",
        "node-0 | 0 B of 96.00 GB |  |  |  | empty |  | ",
        "node-1 | 4.00 GB of 96.00 GB | llama | v1 | 4.00 GB | ready | 3 min | selected by the holder",
    ] == rows


def test_a_silent_holder_is_shown_first() -> None:
    """Its images are as it last reported them."""
    first, second, _ = shown(holder(READY), holder(READY, host="node-9", age_s=20.0))
    assert "node-9 | 4.00 GB of 96.00 GB |  |  |  | silent |  | no report for 20 s" == first
    assert " |  | llama | v1" in second


def test_holders_of_one_model() -> None:
    """Other images, and holders without any of this model, are left out."""
    mixed = holder(READY, refused=(REFUSED,))
    (found,) = holders_of_model((mixed, holder(READY, host="node-2")), "qwen")
    assert ((), (REFUSED,)) == (found.report.images, found.report.refused)
    assert (mixed,) == holders_of_model((mixed,), None)


def test_an_image_of_a_holder_has_the_role_holder() -> None:
    """In the tree, unless it is draining."""
    seen = instance("a")
    kept = seen.model_copy(update={"report": seen.report.model_copy(update={"holder": "holder-1"})})
    assert "holder a m on node" in rendered_tree(view=kept)
    report = kept.report.model_copy(update={"state": "draining"})
    assert "draining a m on node" in rendered_tree(view=kept.model_copy(update={"report": report}))

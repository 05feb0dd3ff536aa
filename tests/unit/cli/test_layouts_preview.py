"""`rfork plan --from-layouts`: the division among other layouts, what is missing, and the table."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.reshard.sharded_model import Shape, ShardedEngine, checkpoint_table
from rfork.cli.app import app
from rfork.cli.layouts_preview import LayoutShare, LayoutsPreview, complete_boxes, preview_layouts, render_layouts
from rfork.receiver.box_fork import OtherLayout
from rfork.schema import InstanceReport, Placement, Rank

SHAPE = Shape(layers=1, hidden=16, intermediate=32, key_value=8, vocabulary=32)
TABLE = checkpoint_table(SHAPE)
COMPLETE_BYTES = sum(box.byte_count for box in complete_boxes(TABLE))


def layout(rank: int, size: int) -> OtherLayout:
    """Return one rank of a layout, with its placement map."""
    report = InstanceReport(
        instance_id=f"i-{rank}of{size}", model="m", rank=Rank(tp=rank, tp_size=size), layout_id=f"{size}" * 32,
        image_bytes=1, chunk_count=1, state="serving", address="here:1", placement=Placement(host=f"node-{rank}"),
    )  # fmt: skip
    return OtherLayout(report, ShardedEngine(SHAPE, rank, size).record(TABLE))


def previewed(*layouts: OtherLayout, rank: Rank | None = None) -> LayoutsPreview:
    """Return the preview for a rank, or for the complete checkpoint."""
    return preview_layouts("m", "v1", rank.key if rank is not None else None, layouts, TABLE)


def text_of(preview: LayoutsPreview, rank: str | None = None) -> str:
    """Return a preview as it is printed."""
    out = io.StringIO()
    Console(file=out, width=140).print(render_layouts(preview, rank))
    return out.getvalue()


def test_two_ranks_of_two_have_the_complete_checkpoint() -> None:
    """Each has its half and the replicated tensors, which one of them would send."""
    preview = previewed(layout(0, 2), layout(1, 2))
    assert COMPLETE_BYTES == preview.needed_bytes
    assert COMPLETE_BYTES == sum(each.sent_bytes for each in preview.layouts)
    assert COMPLETE_BYTES < sum(each.covered_bytes for each in preview.layouts)
    assert 0 == preview.missing_bytes


def test_one_rank_of_two_leaves_boxes_missing() -> None:
    """They are named."""
    preview = previewed(layout(0, 2))
    assert COMPLETE_BYTES == preview.missing_bytes + preview.layouts[0].sent_bytes
    assert preview.missing[0].startswith("no source has model.")


def test_the_map_of_a_running_rank_is_the_target_s() -> None:
    """The layout itself is no source."""
    preview = previewed(layout(0, 1), layout(0, 2), layout(1, 2), rank=Rank())
    assert Rank().key == preview.rank_key
    assert {Rank(tp=0, tp_size=2).key, Rank(tp=1, tp_size=2).key} == {each.rank_key for each in preview.layouts}
    assert 0 == preview.missing_bytes


def test_a_rank_needs_its_part_only() -> None:
    """A rank of two needs less than the checkpoint, all of which a complete model has."""
    preview = previewed(layout(0, 1), layout(0, 2), rank=Rank(tp=0, tp_size=2))
    assert preview.needed_bytes < COMPLETE_BYTES
    assert preview.needed_bytes == preview.layouts[0].sent_bytes


def test_a_rank_that_does_not_run_is_not_divided_exactly() -> None:
    """The output states when the division is known."""
    preview = previewed(layout(0, 2), layout(1, 2), rank=Rank(tp_size=4))
    text = text_of(preview, Rank(tp_size=4).key)
    assert preview.rank_key is None
    assert "the exact division is known once the target has recorded its placement map" in text


def test_a_layout_without_a_map_is_shown_with_its_reason() -> None:
    """Nothing is known of its bytes."""
    refused = LayoutShare(Rank().key, "a" * 32, "node-9", 0, 0, 0, "no placement map")
    text = text_of(LayoutsPreview("m", "v1", None, 100, (refused,), 100, ("no source has x[0:1]",)))
    assert "cannot: no placement map" in text
    assert "no source has x[0:1]" in text


@pytest.mark.parametrize("option", [("--cold",), ("--targets", "2"), ("--per-host", "2")])
def test_other_predictions_are_excluded(option: tuple[str, ...]) -> None:
    """A preview of layouts is of one replica."""
    result = CliRunner().invoke(app, ["plan", "m", "--planner", "http://127.0.0.1:9", "--from-layouts", *option])
    assert 0 != result.exit_code
    assert "--from-layouts shows one replica" in result.output

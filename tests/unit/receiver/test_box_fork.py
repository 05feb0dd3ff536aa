"""The instances that a cross-layout fork queries, their order, and the failure of one of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from benchmarks.reshard.sharded_model import Shape, ShardedEngine, checkpoint_table
from rfork.engines.relocation import tensors_of
from rfork.errors import LayoutMismatch, NoSource, RforkError, SourceUnavailable
from rfork.peer.base import BoxImage
from rfork.placement.boxes import Box, wanted_boxes
from rfork.planner_client.client import PlannerClient
from rfork.receiver.box_assignment import AssignedPart
from rfork.receiver.box_fork import BoxFork, FetchedPart, OtherLayout, other_layouts
from rfork.schema import InstanceInfo, InstanceReport, Placement, Rank
from rfork.settings import InstanceSettings

SHAPE = Shape(layers=1, hidden=16, intermediate=32, key_value=8, vocabulary=32)
TABLE = checkpoint_table(SHAPE)


def report(tp: int = 0, tp_size: int = 1, *, role: str = "main", layout: str = "a") -> InstanceReport:
    """Return the report of a serving instance."""
    return InstanceReport(
        instance_id=f"{layout}-{tp}of{tp_size}-{role}",
        model="m",
        rank=Rank.model_validate({"tp": tp, "tp_size": tp_size, "role": role}),
        layout_id=layout * 32,
        image_bytes=1,
        chunk_count=1,
        state="serving",
        address="here:1",
        placement=Placement(host="here"),
    )


def info(reported: InstanceReport, version: str | None, quarantined: str | None = None) -> InstanceInfo:
    """Return the planner's record of an instance."""
    return InstanceInfo(report=reported, version=version, age_s=0.0, quarantined=quarantined)


def found(instances: Sequence[InstanceInfo], version: str | None = None) -> tuple[str, list[str]]:
    """Return the version and the ids of the instances that would be queried."""
    planner = SimpleNamespace(instances=lambda **_: list(instances))
    chosen, reports = other_layouts(cast(PlannerClient, planner), "m", Rank(tp_size=4), version, 0.0)
    return chosen, [each.instance_id for each in reports]


def test_one_instance_of_each_rank_and_layout_is_queried() -> None:
    """Two replicas of one layout count once."""
    replicas = [info(report(rank, 2), "v1") for rank in (0, 1)] * 2
    assert ("v1", ["a-0of2-main", "a-1of2-main"]) == found(replicas)


def test_a_target_without_a_version_adopts_the_only_one() -> None:
    """It refuses to choose between two."""
    assert "v1" == found([info(report(), "v1")])[0]
    with pytest.raises(NoSource, match="served are v1, v2"):
        found([info(report(), "v1"), info(report(1, 2), "v2")])


@pytest.mark.parametrize(
    "instance",
    [
        pytest.param(info(report(), "v2"), id="other version"),
        pytest.param(info(report(), "v1", "corrupt"), id="quarantined"),
        pytest.param(info(report(role="speculative"), "v1"), id="a draft"),
    ],
)
def test_other_instances_are_not_queried(instance: InstanceInfo) -> None:
    """Only healthy instances of the required version and role are sources."""
    with pytest.raises(NoSource, match="no instance serves version v1"):
        found([instance], "v1")


class ScriptedFork(BoxFork):
    """Fork whose layouts are given, and whose parts fail as a script decides."""

    def __init__(self, layouts: Sequence[OtherLayout], fails: Callable[[OtherLayout], RforkError | None]) -> None:
        super().__init__("m", Rank(), "v1", InstanceSettings(planner="http://none"), deadline=0.0)
        self.__dict__["layouts"] = list(layouts)
        self.__dict__["_found"] = ("v1", [])
        self._fails = fails
        self.queried: list[str] = []

    def _fetch_part(self, part: AssignedPart, tensors: Mapping[str, torch.Tensor]) -> FetchedPart:
        layout, boxes = self.layouts[part.layout], part.boxes
        self.queried.append(layout.sample.instance_id)
        if (error := self._fails(layout)) is not None:
            raise error
        unforked: Any = SimpleNamespace(seed=None, sources=(), bytes_read=sum(box.byte_count for box in boxes))
        return FetchedPart(boxes, unforked, layout)

    def _open(self, part: AssignedPart) -> BoxImage:
        return BoxImage("m#boxes", "v1", "", 0)


def layout(rank: int, size: int, name: str = "a") -> OtherLayout:
    """Return one rank of a layout."""
    return OtherLayout(report(rank, size, layout=name), ShardedEngine(SHAPE, rank, size).record(TABLE))


def never(_: OtherLayout) -> None:
    """Fail for no layout."""


def boxes_of(fork: ScriptedFork) -> list[Box]:
    """Return the boxes that a target with the complete model fetches."""
    engine = ShardedEngine(SHAPE, 0, 1)
    fetched = fork.fetch(engine.record(TABLE))
    fetched.load(engine.load_from, tensors_of)
    assert fetched.needed_bytes == fetched.received_bytes
    return [box for part in fetched.parts for box in part.boxes]


def test_a_source_with_everything_is_preferred_to_several() -> None:
    """Few large parts are fetched faster than many small ones."""
    fork = ScriptedFork([layout(0, 2), layout(1, 2), layout(0, 1, "b")], never)
    assert sorted(wanted_boxes(layout(0, 1).placement_map)) == sorted(boxes_of(fork))
    assert ["b-0of1-main"] == fork.queried


def test_a_failed_source_is_replaced_by_other_layouts() -> None:
    """Another instance of its layout is tried before."""

    def fails(source: OtherLayout) -> RforkError | None:
        return SourceUnavailable("killed") if source.sample.layout_id[0] == "b" else None

    fork = ScriptedFork([layout(0, 2), layout(1, 2), layout(0, 1, "b")], fails)
    boxes_of(fork)
    assert ["b-0of1-main", "b-0of1-main"] == fork.queried[:2]
    assert ["a-0of2-main", "a-1of2-main"] == sorted(fork.queried[2:])


def test_the_parts_and_failures_of_a_fork_are_reported() -> None:
    """The planner's record names the rank, the layout and the host of each part, the largest first."""

    def fails(source: OtherLayout) -> RforkError | None:
        return SourceUnavailable("killed") if source.sample.layout_id[0] == "b" else None

    fork = ScriptedFork([layout(0, 2), layout(1, 2), layout(0, 1, "b")], fails)
    engine = ShardedEngine(SHAPE, 0, 1)
    fetched = fork.fetch(engine.record(TABLE))
    fetched.load(engine.load_from, tensors_of)
    parts = fetched.part_descriptions
    assert sorted((part.bytes_read for part in parts), reverse=True) == [part.bytes_read for part in parts]
    assert {"main-tp0of2-pp0of1-ep0of1", "main-tp1of2-pp0of1-ep0of1"} == {part.rank_key for part in parts}
    assert {"here"} == {part.host for part in parts}
    assert fetched.needed_bytes == sum(part.bytes_read for part in parts)
    assert ["main-tp0of1-pp0of1-ep0of1/bbbbbbbb: SourceUnavailable: killed"] == fetched.failures


def test_the_last_source_s_failure_is_raised() -> None:
    """Without another layout, the fork fails as its source did."""
    fork = ScriptedFork([layout(0, 1)], lambda _: SourceUnavailable("killed"))
    with pytest.raises(SourceUnavailable, match="killed"):
        boxes_of(fork)


def test_a_missing_tensor_is_named() -> None:
    """One rank of two does not have all bytes."""
    fork = ScriptedFork([layout(0, 2)], never)
    with pytest.raises(LayoutMismatch, match=r"model\.embed_tokens\.weight\[16:32"):
        boxes_of(fork)
    assert [] == fork.queried


def test_sources_of_one_version_have_the_same_checkpoint() -> None:
    """Different types of one tensor are refused by name."""
    other = Shape(layers=1, hidden=16, intermediate=32, key_value=8, vocabulary=64)
    changed = OtherLayout(report(layout="b"), ShardedEngine(other, 0, 1).record(checkpoint_table(other)))
    fork = ScriptedFork([layout(0, 1), changed], never)
    with pytest.raises(LayoutMismatch, match=r"model\.embed_tokens\.weight is"):
        _ = fork.checkpoint

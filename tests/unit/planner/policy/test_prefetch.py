"""Images that holders should keep: announced ones, those of engines, and selected ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from planner.policy.prefetch import (
    MAX_WANTED,
    FleetImage,
    LocalEngine,
    predicted_images,
    served_version,
    wanted_images,
)
from rfork.schema import HeldImage, HolderReport, ImageSelector, Placement, Rank, ScaleUp, WantedImage

VLLM, SGLANG = "a" * 32, "b" * 32
PAIR = (Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2))
DRAFT = Rank(role="speculative")


def image(
    version: str = "v1",
    engines: int = 1,
    *,
    seeds: int | None = None,
    rank: Rank | None = None,
    layout_id: str = VLLM,
    model: str = "m",
    has_relay: bool = False,
    since: float = 0.0,
) -> FleetImage:
    """Return an image that so many engines serve, and holders up to `seeds` in all."""
    return FleetImage(
        model=model,
        version=version,
        rank=rank or Rank(),
        layout_id=layout_id,
        image_bytes=1 << 20,
        seeds=engines if seeds is None else seeds,
        engine_seeds=engines,
        has_relay=has_relay,
        since=since,
    )


def holder(
    *images: HeldImage, selects: Sequence[tuple[str, str | None]] = (), follows_host: bool = True
) -> HolderReport:
    """Return the report of a holder with these images."""
    return HolderReport(
        holder_id="h",
        placement=Placement(host="node"),
        memory_bytes=1 << 30,
        images=images,
        selectors=tuple(ImageSelector(model=model, version=version) for model, version in selects),
        follows_host=follows_host,
    )


def held(version: str | None = "v1", layout_id: str = VLLM, rank: Rank | None = None, **changes: object) -> HeldImage:
    """Return an image that the holder has completely."""
    values = {
        "instance_id": "i", "model": "m", "version": version, "rank": rank or Rank(), "layout_id": layout_id,
        "image_bytes": 1, "state": "ready",
    }  # fmt: skip
    return HeldImage.model_validate(values | changes)


def announcement(version: str | None = None, name: str = "up") -> ScaleUp:
    """Return an announcement for the holder's host."""
    return ScaleUp(scaleup_id=name, model="m", version=version, replicas=1, hosts=("node",))


def engine(of: FleetImage, *, complete: bool = True) -> LocalEngine:
    """Return an engine on the holder's host."""
    return LocalEngine(of, complete)


def names(wanted: Sequence[WantedImage]) -> list[tuple[str, str, str]]:
    """Return version, layout and cause of each image, in order."""
    return [(each.version, {VLLM: "vllm", SGLANG: "sglang"}[each.layout_id], each.cause) for each in wanted]


VERSIONS: list[tuple[str, list[FleetImage], str | None]] = [
    ("none", [], None),
    ("the only one", [image("v1")], "v1"),
    ("most engines", [image("v1", 1), image("v2", 3)], "v2"),
    ("engines before holders", [image("v1", 0, seeds=9), image("v2", 1)], "v2"),
    ("holders, if no engine serves", [image("v1", 0, seeds=2), image("v2", 0, seeds=1)], "v1"),
    ("the most recent of equals", [image("v1", since=5.0), image("v2", since=4.0)], "v1"),
    ("replicas, not ranks", [image("v1", 2, rank=PAIR[0]), image("v1", 2, rank=PAIR[1]), image("v2", 3)], "v2"),
    ("replicas of all sizes", [image("v1", 2, rank=PAIR[0]), image("v1", 2, rank=PAIR[1]), image("v1", 2),
                               image("v2", 3)], "v1"),
    ("no incomplete replica", [image("v1", 9, rank=PAIR[0]), image("v2", 1)], "v2"),
    ("none of one replica only", [image("update:r:1", 5), image("unnamed:x", 5), image("v1", 1)], "v1"),
    ("that of the main model", [image("v1", 9, rank=DRAFT), image("v2", 1)], "v2"),
    ("one that is being loaded", [image("v1", 0, has_relay=True)], "v1"),
]  # fmt: skip


@pytest.mark.parametrize(("images", "expected"), [row[1:] for row in VERSIONS], ids=[row[0] for row in VERSIONS])
def test_the_version_that_most_replicas_serve(images: list[FleetImage], expected: str | None) -> None:
    """Each row of VERSIONS is one rule."""
    assert expected == served_version(images)


def test_a_replica_of_the_size_with_most_seeds_is_predicted() -> None:
    """All its ranks are, in order."""
    pair = [image(engines=2, rank=rank) for rank in reversed(PAIR)]
    assert list(reversed(pair)) == predicted_images([image(engines=1), *pair], None)


def test_an_incomplete_size_is_not_predicted_before_a_complete_one() -> None:
    """Its other ranks have no seed."""
    single = image(engines=1)
    assert [single] == predicted_images([single, image(engines=9, rank=PAIR[0])], None)


def test_the_layout_with_most_seeds_is_predicted() -> None:
    """The other engine's layout is not fetched."""
    common = image(engines=2, layout_id=SGLANG)
    assert [common] == predicted_images([image(engines=1), common], None)


def test_the_most_recent_of_two_layouts_with_equal_seeds_is_predicted() -> None:
    """New replicas are like the last ones."""
    recent = image(layout_id=VLLM, since=2.0)
    assert [recent] == predicted_images([image(layout_id=SGLANG, since=1.0), recent], None)


def test_the_stated_version_is_predicted() -> None:
    """Even if another one has more seeds."""
    stated = image("v2", 1)
    assert [stated] == predicted_images([image("v1", 5), stated], "v2")


def test_drafts_are_predicted_after_the_main_model() -> None:
    """They have its version, and may have another model name."""
    draft = image(rank=DRAFT, model="draft", layout_id=SGLANG)
    assert [image(), draft] == predicted_images([draft, image(), image("v0", 0, rank=DRAFT)], None)


def test_nothing_is_predicted_for_an_unknown_model() -> None:
    """The replicas read their own storage."""
    assert [] == predicted_images([], None)


def test_announced_images_come_before_those_of_engines_and_selected_ones() -> None:
    """Each image is listed once, with its most urgent cause."""
    fleet = {"m": [image("v1", 3), image("v2", 1), image("v3", 1, layout_id=SGLANG)]}
    report = holder(selects=[("m", "v3"), ("m", "v1")])
    wanted = wanted_images(report, fleet, [engine(image("v2", 1)), engine(image("v1", 3))], [announcement()])
    assert [("v1", "vllm", "announced"), ("v2", "vllm", "engine"), ("v3", "sglang", "selected")] == names(wanted)


def test_two_versions_of_engines_are_wanted_side_by_side() -> None:
    """In a rollout, the holder keeps both; the most recent is more urgent."""
    engines = [engine(image("v2")), engine(image("v1"))]
    assert [("v2", "vllm", "engine"), ("v1", "vllm", "engine")] == names(wanted_images(holder(), {}, engines, []))


def test_announcements_are_in_order() -> None:
    """The replicas that start first come first."""
    fleet = {"m": [image("v1"), image("v2")]}
    announced = [announcement("v2", "first"), announcement("v1", "second")]
    assert ["v2", "v1"] == [each.version for each in wanted_images(holder(), fleet, [], announced)]


def test_an_engine_that_has_begun_replaces_the_predicted_layout() -> None:
    """Once it loads, its layout is known: the wrong one is no longer wanted, the right one not fetched twice."""
    fleet = {"m": [image(engines=2), image(engines=0, layout_id=SGLANG)]}
    loading = engine(image(engines=0, layout_id=SGLANG), complete=False)
    assert () == wanted_images(holder(), fleet, [loading], [announcement()])


def test_an_engine_that_loads_is_not_copied_yet() -> None:
    """The holder would read over the network what it can copy on the host a moment later."""
    assert () == wanted_images(holder(), {}, [engine(image(), complete=False)], [])


def test_an_engine_that_loads_keeps_what_the_holder_has_begun() -> None:
    """An engine that starts again before the holder has copied its image must not end the copy."""
    fetching = held(state="fetching")
    assert [("v1", "vllm", "engine")] == names(
        wanted_images(holder(fetching), {}, [engine(image(), complete=False)], [])
    )


@pytest.mark.parametrize("follows_host", [True, False])
def test_all_images_stay_wanted_while_their_causes_may_be_unknown(follows_host: bool) -> None:
    """After those whose cause is known."""
    report = holder(held("v1"), held(None), held("v2"), follows_host=follows_host, selects=[("m", "v2")])
    wanted = wanted_images(report, {"m": [image("v2")]}, [], [], keeps_all=True)
    assert ["v2", "v1"] == [each.version for each in wanted]


def test_the_image_of_an_engine_that_was_updated_in_place_is_not_kept() -> None:
    """An engine that starts again loads other weights."""
    assert () == wanted_images(holder(), {}, [engine(image("update:r:1"))], [])


@pytest.mark.parametrize(
    ("source", "expected"),
    [(image(engines=0), 0), (image(engines=0, has_relay=True), 1), (image(engines=0, seeds=1), 1), (image(), 1)],
    ids=["none", "relay", "holder", "engine"],
)
def test_an_image_is_wanted_while_an_instance_can_serve_it(source: FleetImage, expected: int) -> None:
    """A seed of a holder or of an engine, or a relay that progresses."""
    assert expected == len(wanted_images(holder(), {"m": [source]}, [], [announcement()]))


@pytest.mark.parametrize("known", [[], [image(engines=0)]], ids=["unknown", "without a source"])
def test_an_image_that_the_holder_has_stays_wanted(known: list[FleetImage]) -> None:
    """Also after all its other sources have left, and after a restart of the planner."""
    wanted = wanted_images(holder(held()), {"m": known}, [], [announcement()])
    assert [("v1", "vllm", "announced")] == names(wanted)


def test_an_image_without_a_cause_is_not_wanted() -> None:
    """The holder may keep it until it needs the memory."""
    assert () == wanted_images(holder(held()), {"m": [image()]}, [], [])


def test_all_layouts_of_a_selected_model_are_wanted() -> None:
    """Those with most seeds first; of the version that most replicas serve."""
    fleet = {"m": [image("v1", 1), image("v1", 2, layout_id=SGLANG), image("v2", 2)]}
    wanted = wanted_images(holder(selects=[("m", None)]), fleet, [], [])
    assert [("v1", "sglang", "selected"), ("v1", "vllm", "selected")] == names(wanted)


def test_a_selected_version_follows_a_rollout() -> None:
    """Holders that keep the earlier version do not count."""
    before = {"m": [image("v1", 2, seeds=8), image("v2", 1)]}
    after = {"m": [image("v1", 1, seeds=8), image("v2", 2)]}
    versions = [wanted_images(holder(selects=[("m", None)]), fleet, [], [])[0].version for fleet in (before, after)]
    assert ["v1", "v2"] == versions


def test_a_holder_for_one_engine_gets_only_what_that_engine_will_need() -> None:
    """Its selector counts as an announcement; other engines and announcements do not matter."""
    fleet = {"m": [image("v1", 2), image("v1", 1, layout_id=SGLANG)]}
    report = holder(selects=[("m", None)], follows_host=False)
    wanted = wanted_images(report, fleet, [engine(image("v9"))], [announcement("v1")])
    assert [("v1", "vllm", "announced")] == names(wanted)


def test_data_parallel_replicas_share_one_image() -> None:
    """The index is not part of the image."""
    wanted = wanted_images(holder(), {}, [engine(image(rank=Rank(dp=3))), engine(image(rank=Rank(dp=1)))], [])
    assert [Rank()] == [each.rank for each in wanted]


def test_the_list_is_bounded() -> None:
    """A holder cannot report more images either."""
    engines = [engine(image(f"v{number}")) for number in range(MAX_WANTED + 1)]
    assert MAX_WANTED == len(wanted_images(holder(), {}, engines, []))


def test_the_reason_names_the_scale_up() -> None:
    """For display."""
    scaleup = announcement().model_copy(update={"announced_by": "deployment/default/llama"})
    wanted = wanted_images(holder(), {"m": [image()]}, [], [scaleup])
    assert ["scale-up up announced by deployment/default/llama for this host"] == [each.reason for each in wanted]

"""Images that a holder fetches, evicts and refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.holder.inventory import (
    CAUSES,
    MAX_FETCHES,
    MAX_VERSIONS,
    InventoryPlan,
    KeptImage,
    next_fetches,
    plan_inventory,
)
from rfork.schema import ImageKey, Rank, WantedImage

Cause = Literal["announced", "engine", "selected"]
RANKS = (Rank(tp=0, tp_size=2), Rank(tp=1, tp_size=2))
GB = 10**9


def image(
    version: str = "v1", cause: Cause = "engine", size: int = 4, *, model: str = "m", rank: int = 0
) -> WantedImage:
    """Return a wanted image of `size` GB."""
    return WantedImage(
        model=model,
        version=version,
        rank=RANKS[rank],
        layout_id="a" * 32,
        image_bytes=size * GB,
        cause=cause,
        reason="",
    )


def kept(*images: WantedImage) -> dict[ImageKey, KeptImage]:
    """Return these images as kept ones, the last one used most recently."""
    return {ImageKey.of(each): KeptImage(each.image_bytes, float(number)) for number, each in enumerate(images)}


def key(image: WantedImage) -> ImageKey:
    """Return the key of an image."""
    return ImageKey.of(image)


def reasons(plan: InventoryPlan) -> list[str]:
    """Return the reasons of the refusals."""
    return [refusal.reason for refusal in plan.refused]


def test_wanted_images_are_fetched_in_order() -> None:
    """The ranks of an engine fit together, or the last ones are refused."""
    one, two = image(rank=0), image(rank=1)
    assert (one, two) == plan_inventory([one, two], {}, 8 * GB).fetch
    plan = plan_inventory([one, two], {}, 7 * GB)
    assert (one,) == plan.fetch
    assert [two] == [refusal.image for refusal in plan.refused]
    assert ["needs 4 GB, of which more urgent images leave 3 GB"] == reasons(plan)


def test_an_image_larger_than_the_memory_is_refused() -> None:
    """The reason names both sizes, and smaller images are fetched."""
    large, small = image(size=9), image(model="small")
    plan = plan_inventory([large, small], {}, 8 * GB)
    assert ["needs 9 GB, and the holder may use 8 GB"] == reasons(plan)
    assert (small,) == plan.fetch


def test_a_more_urgent_image_evicts_a_less_urgent_one() -> None:
    """A selected image makes way for an announced one."""
    selected, announced = image(model="other", cause="selected"), image(cause="announced")
    plan = plan_inventory([announced, selected], kept(selected), 4 * GB)
    assert (key(selected),) == plan.evict
    assert (announced,) == plan.fetch
    assert [selected] == [refusal.image for refusal in plan.refused]


@pytest.mark.parametrize("cause", CAUSES)
def test_an_equally_urgent_image_evicts_nothing(cause: Cause) -> None:
    """Whatever the order of the planner: it may change at any report, and images would be fetched in turn."""
    old, new = image(model="old", cause=cause), image(model="new", cause=cause)
    plan = plan_inventory([new, old], kept(old), 4 * GB)
    assert () == plan.evict
    assert () == plan.fetch
    assert [new] == [refusal.image for refusal in plan.refused]


def test_the_least_recently_used_unwanted_image_is_evicted() -> None:
    """Unwanted images keep the memory that is left."""
    oldest, newest, wanted = image(model="oldest"), image(model="newest"), image(model="wanted")
    plan = plan_inventory([wanted], kept(oldest, newest), 8 * GB)
    assert (key(oldest),) == plan.evict
    assert (wanted,) == plan.fetch


def test_nothing_is_evicted_while_memory_is_left() -> None:
    """An engine that returns finds its weights."""
    plan = plan_inventory([], kept(image(), image("v2")), 8 * GB)
    assert InventoryPlan((), (), ()) == plan


def test_two_versions_of_a_rank_are_kept() -> None:
    """The weights of a rollout are fetched, and those of before are kept."""
    old, new = image("v1"), image("v2", "announced")
    plan = plan_inventory([new, old], kept(old), 20 * GB)
    assert (new,) == plan.fetch
    assert () == plan.evict


def test_a_third_version_evicts_the_least_urgent_one() -> None:
    """However much memory is left."""
    first, second, third = image("v1", "selected"), image("v2"), image("v3", "announced")
    plan = plan_inventory([third, second, first], kept(first, second), 99 * GB)
    assert (third,) == plan.fetch
    assert (key(first),) == plan.evict
    assert ["2 versions of this rank are more urgent"] == reasons(plan)


def test_a_third_version_evicts_the_unwanted_one() -> None:
    """The one that was used least recently."""
    first, second, third = image("v1"), image("v2"), image("v3")
    plan = plan_inventory([third], kept(first, second), 99 * GB)
    assert (key(first),) == plan.evict


def test_versions_are_counted_by_rank() -> None:
    """Two versions of each rank are kept."""
    images = [image(version, rank=rank) for version in ("v1", "v2") for rank in (0, 1)]
    assert tuple(images) == plan_inventory(images, {}, 99 * GB).fetch


def test_a_failed_image_is_refused_with_its_reason() -> None:
    """Until it is tried again."""
    failed = image()
    plan = plan_inventory([failed], {}, 8 * GB, {key(failed): "no source"})
    assert () == plan.fetch
    assert ["no source"] == reasons(plan)


def test_a_failed_image_evicts_nothing() -> None:
    """It is not fetched now, so what is kept stays."""
    failed, selected = image(cause="announced"), image(model="other", cause="selected")
    plan = plan_inventory([failed, selected], kept(selected), 4 * GB, {key(failed): "no source"})
    assert () == plan.evict


def test_nothing_is_fetched_into_the_memory_of_a_failed_image() -> None:
    """It would be evicted as soon as the failed image is tried again."""
    failed, selected = image(cause="announced"), image(model="other", cause="selected")
    plan = plan_inventory([failed, selected], {}, 4 * GB, {key(failed): "no source"})
    assert () == plan.fetch
    assert [failed, selected] == [refusal.image for refusal in plan.refused]


def test_an_image_that_is_wanted_twice_is_fetched_once() -> None:
    """By the planner and by the holder itself."""
    announced, selected = image(cause="announced"), image(cause="selected")
    assert (announced,) == plan_inventory([announced, selected], {}, 99 * GB).fetch


def test_two_images_are_fetched_at_once() -> None:
    """Those that run count."""
    images = [image(model=name) for name in "abcd"]
    assert images[:MAX_FETCHES] == next_fetches(images, [])
    assert images[1:2] == next_fetches(images[1:], images[:1])
    assert [] == next_fetches(images[2:], images[:2])


def test_an_announced_image_waits_for_no_selected_one() -> None:
    """An engine will need it soon."""
    running = [image(model=name, cause="selected") for name in "ab"]
    announced = image(cause="announced")
    assert [announced] == next_fetches([announced, image(model="c", cause="selected")], running)


images = st.builds(
    image,
    version=st.sampled_from(["v1", "v2", "v3", "v4"]),
    cause=st.sampled_from(CAUSES),
    size=st.integers(1, 6),
    model=st.sampled_from(["m", "n"]),
    rank=st.integers(0, 1),
)


@st.composite
def inventories(draw: st.DrawFn) -> tuple[list[WantedImage], dict[ImageKey, KeptImage], int, dict[ImageKey, str]]:
    """Return wanted images, kept ones, the memory in bytes and failures; the size of an image is always the same."""
    sizes: dict[ImageKey, WantedImage] = {}
    wanted = [
        each.model_copy(update={"image_bytes": sizes.setdefault(key(each), each).image_bytes})
        for each in draw(st.lists(images, max_size=8))
    ]
    held = [
        each.model_copy(update={"image_bytes": sizes.setdefault(key(each), each).image_bytes})
        for each in draw(st.lists(images, max_size=6, unique_by=key))
    ]
    versions: dict[tuple[str, str], set[str]] = {}
    for each in held:
        versions.setdefault((each.model, each.rank.key), set()).add(each.version)
    held = [each for each in held if each.version in sorted(versions[(each.model, each.rank.key)])[:MAX_VERSIONS]]
    memory = max(draw(st.integers(1, 24)) * GB, sum(each.image_bytes for each in held))
    failures = dict.fromkeys(draw(st.sets(st.sampled_from([key(each) for each in wanted]))) if wanted else (), "failed")
    return wanted, kept(*held), memory, failures


def carried_out(plan: InventoryPlan, before: Mapping[ImageKey, KeptImage]) -> dict[ImageKey, KeptImage]:
    """Return the images that are kept once the plan is carried out."""
    after = {each: image for each, image in before.items() if each not in plan.evict}
    return after | {key(each): KeptImage(each.image_bytes, 99.0) for each in plan.fetch}


@given(inventories())
def test_plans_are_within_the_limits(
    inventory: tuple[list[WantedImage], dict[ImageKey, KeptImage], int, dict[ImageKey, str]],
) -> None:
    """Memory and versions, whatever was wanted and kept before."""
    wanted, before, memory, failures = inventory
    plan = plan_inventory(wanted, before, memory, failures)
    after = carried_out(plan, before)
    assert sum(each.image_bytes for each in after.values()) <= memory
    groups = {(each.model, each.rank_key) for each in after}
    assert all(
        len({each.version for each in after if (each.model, each.rank_key) == group}) <= MAX_VERSIONS
        for group in groups
    )
    assert not {key(each) for each in plan.fetch} & (before.keys() | failures.keys())
    assert {key(each) for each in wanted} == {
        *(key(refusal.image) for refusal in plan.refused),
        *(each for each in after if each in {key(image) for image in wanted}),
    }


@given(inventories())
def test_a_plan_that_is_carried_out_leads_to_no_action(
    inventory: tuple[list[WantedImage], dict[ImageKey, KeptImage], int, dict[ImageKey, str]],
) -> None:
    """No image is evicted and fetched in turn."""
    wanted, before, memory, failures = inventory
    after = carried_out(plan_inventory(wanted, before, memory, failures), before)
    plan = plan_inventory(wanted, after, memory, failures)
    assert () == plan.evict
    assert () == plan.fetch


@given(inventories())
def test_only_more_urgent_fetches_evict_wanted_images(
    inventory: tuple[list[WantedImage], dict[ImageKey, KeptImage], int, dict[ImageKey, str]],
) -> None:
    """An evicted image that is wanted is less urgent than one that is fetched or kept."""
    wanted, before, memory, failures = inventory
    plan = plan_inventory(wanted, before, memory, failures)
    best = best_causes(wanted)
    after = carried_out(plan, before)
    for evicted in plan.evict:
        if evicted in best:
            assert any(best[each] < best[evicted] for each in after if each in best)


def best_causes(wanted: Sequence[WantedImage]) -> dict[ImageKey, int]:
    """Return the most urgent cause of each image."""
    best: dict[ImageKey, int] = {}
    for each in wanted:
        cause = CAUSES.index(each.cause)
        best[key(each)] = min(cause, best.get(key(each), cause))
    return best

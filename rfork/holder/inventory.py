"""Decides which images a holder fetches, evicts and refuses. Pure.

The planner orders the wanted images by urgency. Each gets memory in that order, as far as there is any, and at most
`MAX_VERSIONS` versions of one model and rank are kept. Of images that are wanted for the same cause, those that are
kept come first: nothing is evicted for what is not more urgent. The memory that is left goes to images that are no
longer wanted, the most recently used first, so that an engine that returns finds its weights.

The result depends on the arguments only, and once it is carried out, the same arguments lead to no further action.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rfork.schema import ImageKey, WantedImage

MAX_VERSIONS: Final = 2
"""Versions of one model and rank that are kept: during a rollout, the old and the new one."""


CAUSES: Final = ("announced", "engine", "selected")
"""Causes for which images are wanted, most urgent first."""
MAX_FETCHES: Final = 2
"""Equally urgent images that are fetched concurrently: more would all finish later."""


@dataclass(frozen=True)
class KeptImage:
    """An image that the holder has or fetches."""

    image_bytes: int
    used_at: float
    """When it was last read from, or else when its fetch began."""


@dataclass(frozen=True)
class Refusal:
    """A wanted image that is not kept, and why."""

    image: WantedImage
    reason: str


@dataclass(frozen=True)
class InventoryPlan:
    """Actions of a holder. Evictions come first: the fetches need their memory."""

    evict: tuple[ImageKey, ...]
    fetch: tuple[WantedImage, ...]
    """Most urgent first."""
    refused: tuple[Refusal, ...]


def plan_inventory(
    wanted: Sequence[WantedImage],
    kept: Mapping[ImageKey, KeptImage],
    memory_bytes: int,
    failures: Mapping[ImageKey, str] | None = None,
) -> InventoryPlan:
    """Return which images to evict, to fetch and to refuse, with `memory_bytes` for all images together.

    `wanted`: most urgent first. `failures`: images that are not fetched at the moment, with the reason.
    """
    failures = failures or {}
    chosen: dict[ImageKey, WantedImage] = {}
    # Nothing is evicted for an image that is not fetched now. But what is fetched in its place would be evicted later.
    postponed: dict[ImageKey, WantedImage] = {}
    refused: dict[ImageKey, Refusal] = {}
    free = memory_bytes
    for image in sorted(wanted, key=lambda image: (CAUSES.index(image.cause), ImageKey.of(image) not in kept)):
        key = ImageKey.of(image)
        if key in chosen or key in refused:
            continue
        reserved = {} if key in kept else postponed
        versions = _versions(key, chosen.keys() | reserved.keys())
        available = max(0, free - sum(each.image_bytes for each in reserved.values()))
        if key.version not in versions and len(versions) >= MAX_VERSIONS:
            refused[key] = Refusal(image, f"{MAX_VERSIONS} versions of this rank are more urgent")
        elif image.image_bytes > available:
            refused[key] = Refusal(image, _memory_reason(image.image_bytes, available, memory_bytes))
        elif key in failures and key not in kept:
            refused[key] = Refusal(image, failures[key])
            postponed[key] = image
        else:
            chosen[key] = image
            free -= image.image_bytes
    retained = set(chosen)
    for key in sorted(kept.keys() - chosen.keys(), key=lambda key: (-kept[key].used_at, key)):
        versions = _versions(key, retained)
        if kept[key].image_bytes <= free and (key.version in versions or len(versions) < MAX_VERSIONS):
            retained.add(key)
            free -= kept[key].image_bytes
    return InventoryPlan(
        evict=tuple(sorted(kept.keys() - retained)),
        fetch=tuple(image for key, image in chosen.items() if key not in kept),
        refused=tuple(refused.values()),
    )


def next_fetches(planned: Sequence[WantedImage], running: Sequence[WantedImage]) -> list[WantedImage]:
    """Return the planned fetches, most urgent first, that begin now.

    No more than `MAX_FETCHES` run that are as urgent: an announced image does not wait for one that is selected.
    """
    started: list[WantedImage] = []
    for image in planned:
        urgency = CAUSES.index(image.cause)
        others = [each for each in (*running, *started) if CAUSES.index(each.cause) <= urgency]
        if len(others) < MAX_FETCHES:
            started.append(image)
    return started


def _versions(image: ImageKey, keys: Collection[ImageKey]) -> set[str]:
    """Return the versions of the image's model and rank among the keys."""
    return {key.version for key in keys if (key.model, key.rank_key) == (image.model, image.rank_key)}


def _memory_reason(needed: int, free: int, total: int) -> str:
    if needed > total:
        return f"needs {needed / 1e9:.3g} GB, and the holder may use {total / 1e9:.3g} GB"
    return f"needs {needed / 1e9:.3g} GB, of which more urgent images leave {free / 1e9:.3g} GB"

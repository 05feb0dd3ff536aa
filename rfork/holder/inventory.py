"""Decides which images a holder fetches, evicts and refuses. Pure.

The planner orders the wanted images by urgency. Each gets memory in that order, as far as there is any and at most
`MAX_VERSIONS` versions of one model and rank are kept. The memory that is left goes to images that are no longer
wanted, the most recently used first, so that an engine that returns finds its weights.

The result depends on the arguments only, and once it is carried out, the same arguments lead to no further action.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from rfork.schema import Rank, WantedImage

MAX_VERSIONS: Final = 2
"""Versions of one model and rank that are kept: during a rollout, the old and the new one."""


class ImageKey(NamedTuple):
    """Identity of an image before its weights are known."""

    model: str
    version: str
    rank_key: str
    layout_id: str

    @classmethod
    def of(cls, wanted: WantedImage) -> ImageKey:
        """Return the key of a wanted image."""
        return cls(wanted.model, wanted.version, wanted.rank.key, wanted.layout_id)

    @property
    def group(self) -> tuple[str, str]:
        """Model and rank, whose versions are counted."""
        return self.model, self.rank_key


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
    """What to do now. Evictions come first: the fetches need their memory."""

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
    refused: list[Refusal] = []
    free = memory_bytes
    for image in wanted:
        key = ImageKey.of(image)
        if key in chosen:
            continue
        if key in failures and key not in kept:
            refused.append(Refusal(image, failures[key]))
        elif key.version not in _versions(key.group, chosen) and len(_versions(key.group, chosen)) >= MAX_VERSIONS:
            refused.append(Refusal(image, f"{MAX_VERSIONS} versions of this rank are more urgent"))
        elif image.image_bytes > free:
            refused.append(Refusal(image, _memory_reason(image.image_bytes, free, memory_bytes)))
        else:
            chosen[key] = image
            free -= image.image_bytes
    retained = set(chosen)
    for key in sorted(kept.keys() - chosen.keys(), key=lambda key: (-kept[key].used_at, key)):
        versions = _versions(key.group, retained)
        if kept[key].image_bytes <= free and (key.version in versions or len(versions) < MAX_VERSIONS):
            retained.add(key)
            free -= kept[key].image_bytes
    return InventoryPlan(
        evict=tuple(sorted(kept.keys() - retained)),
        fetch=tuple(image for key, image in chosen.items() if key not in kept),
        refused=tuple(refused),
    )


def _versions(group: tuple[str, str], keys: Collection[ImageKey]) -> set[str]:
    return {key.version for key in keys if key.group == group}


def _memory_reason(needed: int, free: int, total: int) -> str:
    if needed > total:
        return f"needs {needed / 1e9:.3g} GB, and the holder may use {total / 1e9:.3g} GB"
    return f"needs {needed / 1e9:.3g} GB, of which more urgent images leave {free / 1e9:.3g} GB"


def rank_of(image: WantedImage) -> Rank:
    """Return the rank of an image without its data parallel index, which images do not depend on."""
    return image.rank.model_copy(update={"dp": 0})

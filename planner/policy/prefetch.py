"""Prefetch: decides which images a holder should keep, and in which order.

Most urgent are images announced for the holder's host: replicas will start there, and their ranks and layouts are
predicted from the instances that the model has now. Then come the images of the engines on its host, so that an
engine that restarts finds its weights, and at last those that the holder selects itself. An image is wanted only if
some instance can serve it now, or if the holder has it already: it must not drop an image because all its other
sources left.

A holder that does not follow its host is started for one engine. Its selectors therefore count as announcements: for
itself, or, if it has no memory, for the other holders on its host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from rfork.schema import HeldImage, HolderReport, ImageKey, ImageSelector, Rank, ScaleUp, WantedImage
from rfork.weights_version import is_shareable, short

MAX_WANTED: Final = 256
"""Maximum images that a holder is to keep, and that it can report."""


@dataclass(frozen=True)
class FleetImage:
    """An image that instances of the fleet have or receive."""

    model: str
    version: str
    rank: Rank
    """Rank of one of its instances."""
    layout_id: str
    image_bytes: int
    seeds: int = 0
    """Number of complete instances that can be read from, those of holders included."""
    engine_seeds: int = 0
    """Number of those that belong to engines."""
    has_relay: bool = False
    """True if an incomplete instance has a source, so that it will serve all chunks."""
    since: float = 0.0
    """Time of the first report of its most recent instance."""

    @property
    def key(self) -> ImageKey:
        """Identity of the image."""
        return ImageKey(self.model, self.version, self.rank.key, self.layout_id)

    @property
    def is_available(self) -> bool:
        """True if some instance can serve it."""
        return self.seeds > 0 or self.has_relay


@dataclass(frozen=True)
class LocalEngine:
    """The image of one engine on the holder's host."""

    image: FleetImage
    complete: bool
    """True if the engine has all of it."""


@dataclass
class ReplicaShape:
    """The images of replicas of one version, size and role."""

    min_ranks: int
    """Minimum number of ranks; expert parallelism may add more."""
    by_rank: dict[str, list[FleetImage]] = field(default_factory=dict)
    """Images in any layout, by rank key."""

    def add(self, image: FleetImage) -> None:
        """Add an image of one of the ranks."""
        self.by_rank.setdefault(image.rank.key, []).append(image)

    @property
    def images(self) -> list[FleetImage]:
        """Of each rank the image in the layout with most seeds, ordered by rank."""
        best = [max(images, key=_seed_score) for images in self.by_rank.values()]
        return sorted(best, key=lambda image: (image.rank.pp, image.rank.ep, image.rank.tp))

    @property
    def score(self) -> tuple[int, int, float]:
        """Seeds of engines, and all seeds, of the rank that has fewest, and the most recent report.

        Engines count first, or holders, which keep an earlier version for a while, would outvote a rollout.
        """
        ranks = self.by_rank.values()
        is_complete = len(ranks) >= self.min_ranks
        return (
            min(sum(image.engine_seeds for image in images) for images in ranks) if is_complete else 0,
            min(sum(image.seeds for image in images) for images in ranks) if is_complete else 0,
            max(image.since for images in ranks for image in images),
        )


def served_version(images: Iterable[FleetImage]) -> str | None:
    """Return the version that most replicas serve, the most recent one if several are equal; None if there is none.

    Versions that only one replica can have do not count. Drafts have the version of their main models.
    """
    shareable = [image for image in images if is_shareable(image.version)]
    mains = [image for image in shareable if image.rank.role == "main"] or shareable
    scores: dict[str, tuple[int, int, float]] = {}
    for (version, _), shape in _shapes(mains).items():
        engine_seeds, seeds, since = shape.score
        before = scores.get(version, (0, 0, since))
        scores[version] = before[0] + engine_seeds, before[1] + seeds, max(before[2], since)
    return max(scores, key=lambda version: (scores[version], version), default=None)


def predicted_images(images: Sequence[FleetImage], version: str | None) -> list[FleetImage]:
    """Return the images that a new replica will need: those of the replicas with most seeds, main model first.

    `version`: None for the version that most replicas serve.
    """
    version = version or served_version(images)
    predicted: list[FleetImage] = []
    for role in ("main", "speculative"):
        shapes = _shapes(image for image in images if image.version == version and image.rank.role == role)
        if shapes:
            predicted += max(shapes.values(), key=lambda shape: shape.score).images
    return predicted


def wanted_images(
    report: HolderReport,
    fleet: Mapping[str, Sequence[FleetImage]],
    engines: Sequence[LocalEngine],
    announcements: Iterable[ScaleUp],
    starting: Iterable[ImageSelector] = (),
    *,
    keeps_all: bool = False,
) -> tuple[WantedImage, ...]:
    """Return the images that a holder should keep, most urgent first.

    `fleet`: the images of each model that the holder selects, that is announced for its host, or that starts there,
    with those of its drafts. `engines`: the engines on its host, most recent first. `announcements`: those for its
    host, in the order in which the replicas will start. `starting`: weights of engines that start on its host.
    `keeps_all`: True if the causes of its present images may not be known yet, as after a restart of the planner.
    """
    wanted = _WantedImages(report)
    if not report.memory_bytes:
        return ()
    models = {model: _with_held_images(model, images, report.images) for model, images in fleet.items()}
    # An engine that has the image serves the next one on its host as well.
    served = set() if report.follows_host else {engine.image.key for engine in engines if engine.complete}
    for selector in starting if report.follows_host else report.selectors:
        reason = f"an engine with {_weights_name(selector)} starts on this host"
        for image in predicted_images(models.get(selector.model, ()), selector.version):
            if image.key not in served:
                wanted.add(image, "announced", reason)
    if not report.follows_host:
        if keeps_all:
            wanted.add_held_images()
        return wanted.images
    local_layouts: dict[tuple[str, str, str], set[str]] = {}
    for engine in engines:
        local_layouts.setdefault(engine.image.key[:3], set()).add(engine.image.layout_id)
    for scaleup in announcements:
        announcer = f" by {scaleup.announced_by}" if scaleup.announced_by else ""
        reason = f"scale-up {scaleup.scaleup_id} announced{announcer} for this host"
        for image in predicted_images(models.get(scaleup.model, ()), scaleup.version):
            # An engine that has begun shows the layout that it needs.
            if image.layout_id in local_layouts.get(image.key[:3], (image.layout_id,)):
                wanted.add(image, "announced", reason)
    for engine in engines:
        # Of an engine that still loads, the image is not fetched twice; but what the holder has begun, it completes.
        if is_shareable(engine.image.version) and (engine.complete or wanted.is_held(engine.image)):
            wanted.add(engine.image, "engine", f"an engine on this host {'has' if engine.complete else 'loads'} it")
    for selector in report.selectors:
        images = models.get(selector.model, ())
        version = selector.version or served_version(images)
        selected = [image for image in images if image.version == version]
        for image in sorted(selected, key=_seed_score, reverse=True):
            wanted.add(image, "selected", f"this holder selects {_weights_name(selector)}")
    if keeps_all:
        wanted.add_held_images()
    return wanted.images


class _WantedImages:
    """Images that a holder should keep, each once."""

    def __init__(self, report: HolderReport) -> None:
        self._held = {ImageKey.of(image): image for image in report.images if image.version is not None}
        self._by_key: dict[ImageKey, WantedImage] = {}

    @property
    def images(self) -> tuple[WantedImage, ...]:
        """The images, most urgent first."""
        return tuple(self._by_key.values())[:MAX_WANTED]

    def is_held(self, image: FleetImage) -> bool:
        """Return True if the holder has the image, or a part of it."""
        return image.key in self._held

    def add_held_images(self) -> None:
        """Add all images that the holder has, after those that have a cause."""
        for image in self._held.values():
            reason = "the planner does not know the engines yet"
            self.add(_fleet_image(image), "engine", reason)

    def add(self, image: FleetImage, cause: Literal["announced", "engine", "selected"], reason: str) -> None:
        """Add an image, unless it is wanted already or nothing can serve it to the holder."""
        if image.key in self._by_key or not (image.is_available or self.is_held(image)):
            return
        self._by_key[image.key] = WantedImage(
            model=image.model,
            version=image.version,
            rank=image.rank.model_copy(update={"dp": 0}) if image.rank.dp else image.rank,
            layout_id=image.layout_id,
            image_bytes=image.image_bytes,
            cause=cause,
            reason=reason,
        )


def _with_held_images(model: str, images: Sequence[FleetImage], held: Iterable[HeldImage]) -> list[FleetImage]:
    """Return the images with those of the model that only the holder itself has, as after a planner's restart."""
    known = {image.key for image in images}
    own = [
        _fleet_image(image)
        for image in held
        if image.model == model and image.version is not None and ImageKey.of(image) not in known
    ]
    return [*images, *own]


def _fleet_image(image: HeldImage) -> FleetImage:
    return FleetImage(
        model=image.model,
        version=image.version or "",
        rank=image.rank,
        layout_id=image.layout_id,
        image_bytes=image.image_bytes,
        seeds=int(image.state == "ready"),
    )


def _shapes(images: Iterable[FleetImage]) -> dict[tuple[str, tuple[str, int, int, int, str]], ReplicaShape]:
    """Return the shapes by version, and by model, size and role."""
    shapes: dict[tuple[str, tuple[str, int, int, int, str]], ReplicaShape] = {}
    for image in images:
        rank = image.rank
        size = image.model, rank.tp_size, rank.pp_size, rank.ep_size, rank.role
        shapes.setdefault((image.version, size), ReplicaShape(rank.tp_size * rank.pp_size)).add(image)
    return shapes


def _seed_score(image: FleetImage) -> tuple[int, int, float, str]:
    return image.engine_seeds, image.seeds, image.since, image.layout_id


def _weights_name(selector: ImageSelector) -> str:
    return f"version {short(selector.version)} of {selector.model}" if selector.version else selector.model

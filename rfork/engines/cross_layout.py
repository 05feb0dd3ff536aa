"""Cross-layout forks of an engine's model: the boxes that it needs become a model, and its own become boxes of others.

Runs in the engine's process, on the thread that loads the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from rfork import settings as options
from rfork.engines.relocation import RelocatingEngine, tensors_of
from rfork.errors import EngineMismatch, NoSource, RforkError, StorageNotFound
from rfork.logs import logger
from rfork.placement.placement_map import PlacementMap
from rfork.planner_client.client import PlannerClient
from rfork.receiver.box_fork import BoxFork, BoxWeights, other_layouts
from rfork.receiver.box_race import SampleLoad
from rfork.receiver.fallback import ENGINE_LOADER, Fallback, layouts_fallback, sampled_load
from rfork.receiver.own_load import OwnLoad
from rfork.schema import CrossLayoutResult, Rank
from rfork.settings import InstanceSettings, StorageSettings
from rfork.source.box_images import BoxImages
from rfork.source.seed import Seed

log = logger(__name__)

RequiredVersion = Callable[[], str | None]
"""Returns the version that a fork requires; None if it adopts the one that is served, and does not know it yet."""
OwnFiles = Callable[[], Path | None]
"""Returns the file or folder that the engine's loader reads; None if there is none of the required version."""
ReplaceWith = Callable[[Callable[[], nn.Module]], nn.Module]
"""Returns the model that a function builds and fills, and keeps it in place of the first one."""


class CrossLayout:
    """Reads one rank of an engine's model from other layouts, and serves it to them."""

    def __init__(self, engine: object, model: str, rank: Rank, settings: InstanceSettings) -> None:
        self._model, self._rank = model, rank
        self._engine = engine if isinstance(engine, RelocatingEngine) else None
        self._settings = settings
        self._weights: BoxWeights | None = None
        self._placement_map: PlacementMap | None = None
        self._version = ""
        self._record_s = 0.0
        self._result: CrossLayoutResult | None = None
        # The fork before and this one together keep the deadline: the engine's own loader needs the rest of its time.
        self._deadline = time.monotonic() + settings.deadline_s

    def fallbacks(
        self, required_version: RequiredVersion, replace_with: ReplaceWith, own_files: OwnFiles | None
    ) -> list[Fallback]:
        """Return the fallback that reads the model from other layouts; none if that is impossible, which is logged.

        It ends while its sources are slower than the engine's loader would be with `own_files`.
        """
        if (refusal := self._refusal) is not None:
            log.info("not read from other layouts", reason=refusal)
            return []
        may_race = self._settings.race_storage and self._settings.fork_required_reason is None
        sample_load = partial(self._sample_load, own_files) if may_race and own_files is not None else None
        return [
            layouts_fallback(
                lambda: self._fetch(required_version(), sample_load),
                lambda: replace_with(self._load),
                lambda: self._version,
                lambda: self._check(required_version()),
                lambda: self._result,
            )
        ]

    def _sample_load(self, own_files: OwnFiles, byte_count: int) -> OwnLoad:
        """Return how long the engine's loader takes for so many bytes. Raises StorageError subclasses."""
        path = own_files()
        if path is None:
            raise StorageNotFound(f"{self._model} has no files of the required version on this host")
        return sampled_load(ENGINE_LOADER, path, byte_count, self._rank, options.load(StorageSettings))

    @property
    def _refusal(self) -> str | None:
        """Return why the model cannot be read from other layouts; None if it can."""
        if self._engine is None:
            return "its engine cannot load from other layouts"
        if self._settings.planner is None:
            return "no planner is set"
        if self._rank.role != "main":
            return "drafts are read from equal layouts only"
        return None

    def _check(self, version: str | None) -> None:
        """Raise StorageNotFound if no instance serves the model. Any thread."""
        deadline = time.monotonic() + self._settings.planner_timeout_s
        with PlannerClient.of(self._settings) as planner:
            try:
                other_layouts(planner, self._model, self._rank, version, deadline)
            except NoSource as error:
                raise StorageNotFound(str(error)) from None

    def _fetch(self, version: str | None, sample_load: SampleLoad | None) -> None:
        """Prepare the weights: fetch what the loader computes with. Raises NoSource, LayoutMismatch, and the failures
        of the sources.
        """
        began = time.monotonic()
        fork = BoxFork(
            self._model, self._rank, version, self._settings, deadline=self._deadline, sample_load=sample_load
        )
        checkpoint = fork.checkpoint
        self._placement_map = self._relocating.record(checkpoint)
        recorded = time.monotonic()
        weights = self._weights = fork.fetch(self._placement_map)
        self._version, self._record_s = weights.version, recorded - began
        log.info(
            "weights requested from other layouts",
            version=weights.version,
            record_s=round(self._record_s, 2),
            fetch_s=round(time.monotonic() - recorded, 2),
        )

    def _load(self) -> nn.Module:
        """Return a new model from the engine's own loader, with the weights. Call `_fetch` before.

        Raises the failures of the sources, and what the loader raises.
        """
        weights, began = self._weights, time.monotonic()
        if weights is None:
            raise EngineMismatch("the model was built before its weights were fetched: this is a bug in rfork")
        try:
            module = weights.load(self._relocating.load_from, tensors_of)
        except Exception as error:
            if weights.failure is not None:
                raise weights.failure from error
            raise
        else:
            load_s = time.monotonic() - began
            log.info(
                "weights loaded from other layouts",
                version=weights.version,
                report=weights.line(),
                load_s=round(load_s, 2),
            )
            self._result = CrossLayoutResult(
                needed_bytes=weights.needed_bytes,
                parts=weights.part_descriptions,
                failures=tuple(weights.failures),
                record_s=round(self._record_s, 4),
                transfer_s=round(weights.transfer_s, 4),
                load_s=round(load_s - weights.fill_s, 4),
            )
            return module
        finally:
            self._weights = None
            weights.release(self._settings.drain_timeout_s)

    def serve(self, module: nn.Module, seed: Seed) -> None:
        """Let instances of other layouts read a loaded model. A model that cannot be read so is logged."""
        if self._engine is None or self._rank.role != "main":
            return
        try:
            placement_map = self._placement_map
            if placement_map is None:
                checkpoint = self._engine.checkpoint_tensors()
                if checkpoint is None:
                    seed.no_boxes_reason = "the names of its checkpoint's tensors are not known there"
                    log.info("not served to other layouts: the names of the checkpoint's tensors are not known here")
                    return
                placement_map = self._engine.record(checkpoint)
            tensors, reason = self._engine.live_tensors(module, placement_map)
            if reason:
                log.info("some tensors are not served to other layouts", reason=reason)
            seed.boxes = BoxImages(
                seed,
                placement_map.only(tensors, reason or "changed after loading"),
                tensors,
                self._settings,
                memory_bytes=self._settings.max_box_bytes,
            )
        except Exception as error:  # the model is loaded, and serves without
            known = isinstance(error, RforkError)
            seed.no_boxes_reason = f"{type(error).__name__}: {error}"
            log.warning("not served to other layouts", reason=f"{type(error).__name__}: {error}", exc_info=not known)

    @property
    def _relocating(self) -> RelocatingEngine:
        if self._engine is None:
            raise EngineMismatch("the engine cannot load from other layouts")
        return self._engine

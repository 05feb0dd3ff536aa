"""Gets the weights of an engine's model: by a fork, or by the engine's own loader, but never a mix of both.

Runs on the target, in the engine's process and on the thread that loads the model. The engine package
describes how to build the model (`EngineAdapter`) and what it is (`ModelIdentity`).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from rfork import settings as options
from rfork.engines.completeness import Completeness
from rfork.engines.hidden_state import HiddenState
from rfork.engines.identity import CurrentVersion, choose_version, replica_of
from rfork.engines.served_model import ATTRIBUTE, ServedModel
from rfork.engines.shared_tensors import Patterns, TensorSharing, matches
from rfork.engines.update_agreement import agreement_of
from rfork.errors import (
    AllSourcesFailed,
    EngineMismatch,
    NetworkError,
    PlannerRejected,
    RforkError,
    SettingsError,
    TargetError,
    WrongVersion,
)
from rfork.image.capture import capture
from rfork.image.host_memory import separate_mappings
from rfork.image.memory import compute_manifest
from rfork.logs import logger
from rfork.planner_client.client import PlannerClient
from rfork.receiver.fallback import Fallback, engine_fallback, snapshot_fallback
from rfork.receiver.session import TRANSIENT_EGRESS_SHARE, ForkOptions, ForkSession, Network
from rfork.schema import Rank
from rfork.settings import InstanceSettings, StorageSettings
from rfork.source.seed import Connections, InstanceIdentity, Seed
from rfork.storage.versions.version import folder_of, version_of_files

if TYPE_CHECKING:
    from rfork.engines.cross_layout import CrossLayout

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """One rank of one model, and the facts that must be equal on both sides of a fork."""

    model: str
    rank: Rank
    facts: tuple[str, ...] = ()
    """Engine and version, device, quantisation; see `rfork.image.layout`."""
    packages: tuple[str, ...] = ()
    """Packages of the engine; see `rfork.engines.hidden_state`."""
    helper_attributes: tuple[str, ...] = ()
    """Attributes of the engine's layers that refer to helper objects; see there."""
    exclude: tuple[str, ...] = ()
    """Name patterns of tensors that are not weights, such as KV caches."""
    files: str | None = None
    """Folder or hub id that the engine loads this model from."""
    revision: str | None = None
    """Revision of the hub id."""
    sharing: TensorSharing | None = None
    """For a draft that shares tensors with its main model."""


Rebuild = Callable[[nn.Module], None]
"""Rebuilds what an engine's kernels derived from the weights. Changes no tensor."""

DescribeModel = Callable[[], ModelIdentity]
"""Returns the identity of the model to load. If it raises, the model is not forked."""


class EngineAdapter(Protocol):
    """Builds one model with one engine.

    `empty` is called once, then `load` at most once, both on the engine's own thread.
    """

    def empty(self) -> nn.Module:
        """Return a model in its final layout, post-processed like a loaded one, without reading its weights."""
        ...

    def load(self) -> nn.Module:
        """Return a new model from the engine's own loader. The model returned by `empty` must be dropped first."""
        ...

    def check(self) -> None:
        """Raise CheckpointError if `load` has nothing to load. Reads no weights.

        Called on a separate thread while the engine's thread waits.
        """
        ...


def load_or_fork(
    engine: EngineAdapter,
    describe: DescribeModel,
    settings: InstanceSettings | None = None,
    rebuild: Rebuild | None = None,
    no_seed_reason: str | None = None,
    *,
    holder: str | None = None,
) -> nn.Module:
    """Return a model whose weights are forked if possible and loaded by the engine otherwise, and make it a seed.

    `rebuild` is called with a model that was filled by a fork or a snapshot, before it becomes a seed. If it
    raises, the next fallback is tried. With `no_seed_reason`, which is logged, the instance stops serving once it
    has its weights: the engine may change them without notice. `holder`: this process keeps the model for engines and
    is no replica; the id of that holder.

    Without a planner, the weights come from the configured snapshot; without either, the engine loads them.
    The returned model is in the same state as after the engine's own loader. `served_model` returns its
    ServedModel if it is served. Raises the exceptions of the engine's loader. If a fork is required
    (`InstanceSettings.fork_required_reason`), raises an RforkError instead of calling that loader. Invalid
    settings raise SettingsError.
    """
    chosen = settings or options.load(InstanceSettings)
    if chosen.planner is None and chosen.snapshot is None:
        if (reason := chosen.fork_required_reason) is not None:
            raise SettingsError(
                f"{reason}, but neither a planner nor a snapshot is set",
                hint="set RFORK_PLANNER or RFORK_SNAPSHOT",
            )
        log.warning("no planner is set, using the engine's loader", hint="set RFORK_PLANNER")
        return engine.load()
    return _LoadOrFork(engine, describe, chosen, rebuild, no_seed_reason, holder).run()


class _LoadOrFork:
    """One call of `load_or_fork`."""

    def __init__(
        self,
        engine: EngineAdapter,
        describe: DescribeModel,
        settings: InstanceSettings,
        rebuild: Rebuild | None,
        no_seed_reason: str | None,
        holder: str | None,
    ) -> None:
        self._engine = engine
        self._describe = describe
        self._settings = settings
        self._rebuild = rebuild
        self._no_seed_reason = no_seed_reason
        self._holder = holder
        self._model: nn.Module | None = None
        self._hidden_state: HiddenState | None = None
        self._shared: Patterns = ()
        self._loading = self._loaded = False
        self._seed: Seed | None = None

    @cached_property
    def _identity(self) -> ModelIdentity:
        return self._describe()

    @cached_property
    def _cross_layout(self) -> CrossLayout | None:
        if not self._settings.cross_layout:
            return None
        from rfork.engines.cross_layout import CrossLayout

        return CrossLayout(self._engine, self._identity.model, self._identity.rank, self._settings)

    def run(self) -> nn.Module:
        """Fork the model or load it."""
        try:
            return self._fork()
        except Exception as error:  # a failed fork must never stop the server from starting
            if self._model is not None and self._loaded:
                log.error(
                    "weights loaded by the engine's loader, not seeding",
                    reason=f"{type(error).__name__}: {error}",
                    exc_info=not isinstance(error, RforkError),
                )
                return self._model
            if self._loading or isinstance(error, (SettingsError, WrongVersion)):
                raise
            if self._settings.fork_required_reason is not None:
                if isinstance(error, RforkError):
                    raise
                raise TargetError(f"fork failed: {type(error).__name__}: {error}") from error
            known = isinstance(error, RforkError)
            log.error(
                "falling back to the engine's loader",
                reason=f"{type(error).__name__}: {error}",
                hint=error.hint if isinstance(error, RforkError) else "please report this",
                exc_info=not known,
            )
        self._abandon()
        return self._engine.load()

    def _fork(self) -> nn.Module:
        with Completeness() as completeness, self._mappable_memory():
            completeness.check(self._adopt_empty_model(self._engine.empty()))
        shared = self._shared
        report = self._session().run()
        module, hidden_state, seed = self._model, self._hidden_state, report.seed
        if module is None or hidden_state is None or seed is None:
            raise AllSourcesFailed("the fork ended without a model: this is a bug in rfork", ())
        if self._no_seed_reason is not None:
            seed.close()
            log.warning("not a seed: this instance serves its weights to no other", reason=self._no_seed_reason)
            return module
        if self._shared != shared:
            seed = self._seed_of_loaded(seed)
        if self._cross_layout is not None:
            self._cross_layout.serve(module, seed)
        try:
            served = ServedModel(module, seed, report, hidden_state, self._exclude, agreement_of(seed.identity))
            setattr(module, ATTRIBUTE, served)
        except BaseException:
            seed.close()  # it must not serve a model that is about to be dropped
            raise
        return module

    def _mappable_memory(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which to build a model whose memory can be mapped from another process of this host."""
        return contextlib.nullcontext() if torch.cuda.is_available() else separate_mappings()

    def _prepare(self) -> None:
        """Finish a model that was filled in place. Raises EngineMismatch for any exception of the engine."""
        module, hidden_state = self._model, self._hidden_state
        if module is None or hidden_state is None:
            raise EngineMismatch("the fork was finished before the engine built its model: this is a bug in rfork")
        if changed := hidden_state.apply():
            log.info("float attributes of the model set to the seed's values", count=changed)
        if self._identity.sharing is not None:
            self._identity.sharing.on_filled(module)
        if self._rebuild is None:
            return
        try:
            self._rebuild(module)
        except Exception as error:  # an engine's kernels may raise anything
            raise EngineMismatch(f"failed to rebuild the engine's kernels: {type(error).__name__}: {error}") from error

    def _session(self) -> ForkSession:
        chosen, identity = self._settings, self._identity
        if self._model is None:
            raise AllSourcesFailed("the engine built no model to fill: this is a bug in rfork", ())
        version, current_version = self._version()
        instance = InstanceIdentity.of(
            identity.model,
            identity.rank,
            chosen.replica,
            version=version,
            replica=replica_of(chosen, identity.rank),
        )
        instance = replace(instance, holder=self._holder)
        if self._no_seed_reason is not None:
            instance = replace(instance, egress_share=TRANSIENT_EGRESS_SHARE)
        return ForkSession(
            self._model,
            instance,
            chosen,
            Network.of(chosen),
            ForkOptions(
                fallbacks=self._fallbacks(version),
                current_version=current_version,
                exclude=self._exclude,
                on_filled=self._prepare,
                on_started=self._remember_seed,
            ),
        )

    def _remember_seed(self, seed: Seed) -> None:
        self._seed = seed

    def _version(self) -> tuple[str | None, CurrentVersion | None]:
        identity, storage = self._identity, options.load(StorageSettings)
        files = (
            partial(version_of_files, identity.files, identity.revision, storage)
            if identity.files is not None
            else None
        )
        return choose_version(self._settings.version, files, self._settings.snapshot, storage)

    def _fallbacks(self, version: str | None) -> Sequence[Fallback]:
        fallbacks: list[Fallback] = []
        if self._settings.snapshot is not None:
            storage = options.load(StorageSettings)
            fallback = snapshot_fallback(self._settings.snapshot, self._exclude, self._identity.rank, storage, version)

            def load(module: nn.Module) -> None:
                fallback.load(module)
                self._prepare()

            fallbacks.append(replace(fallback, load=load))
        files, revision = self._identity.files, self._identity.revision
        path = partial(folder_of, files, revision) if files is not None else None
        if (other := self._cross_layout) is not None:
            own_files = partial(self._files_of_version, path) if path is not None else None
            fallbacks += other.fallbacks(lambda: self._required_version, self._replace_with, own_files)
        if self._settings.fork_required_reason is None:
            fallbacks.append(engine_fallback(self._load, self._engine.check, path))
        return fallbacks

    def _files_of_version(self, path: Callable[[], Path | None]) -> Path | None:
        """Return the path of this instance's files; None if they may contain another version than the fork requires."""
        return path() if self._seed is not None and not self._seed.adopts_version else None

    @property
    def _required_version(self) -> str | None:
        """Version that the fork requires; None if it adopts the one that is served, and does not know it yet."""
        return self._seed.version if self._seed is not None else None

    def _load(self) -> nn.Module:
        self._loading = True
        return self._replace_with(self._engine.load)

    def _replace_with(self, load: Callable[[], nn.Module]) -> nn.Module:
        """Return a new model that `load` builds and fills. The first one is dropped before."""
        self._model = self._hidden_state = None
        collect()
        completeness = Completeness()
        module = load()
        self._model, self._loaded = module, True
        sharing = self._identity.sharing
        completeness.check(self._adopt_model(module, sharing.of_loaded(module) if sharing is not None else ()))
        return module

    def _adopt_empty_model(self, module: nn.Module) -> nn.Module:
        """Adopt a model without weights, with the shared tensors of the first choice whose layout is served."""
        sharing = self._identity.sharing
        choices = sharing.choices(module) if sharing is not None else [()]
        served = self._served_layouts() if len(choices) > 1 else frozenset()
        for choice in choices:
            if served and capture(self._adopt_model(module, choice), exclude=self._exclude).layout.layout_id in served:
                return module
        return self._adopt_model(module, choices[0])

    def _served_layouts(self) -> frozenset[str]:
        """Return the layouts of this model and rank at the planner; none if it does not respond."""
        if self._settings.planner is None:
            return frozenset()
        identity = self._identity
        with PlannerClient.of(self._settings) as planner:
            try:
                models = planner.models()
            except (NetworkError, PlannerRejected) as error:
                log.warning("the layouts that are served are not known", reason=str(error))
                return frozenset()
        return frozenset(
            one.layout_id for one in models if one.model == identity.model and one.rank_key == identity.rank.key
        )

    def _seed_of_loaded(self, unused: Seed) -> Seed:
        """Return a seed of the loaded model, which has another layout than the model that was to be forked."""
        if self._model is None:
            raise AllSourcesFailed("the engine loaded no model: this is a bug in rfork", ())
        try:
            image = capture(self._model, exclude=self._exclude)
            manifest, (version, _) = compute_manifest(image), self._version()
            if version is None or version != unused.version:  # the files have changed since the fork began
                version = unused.version_by_content(manifest)
        finally:
            unused.close()
        identity = replace(unused.identity, instance_id=f"{unused.identity.instance_id}-loaded", version=version)
        log.info("serving the loaded model as another instance", instance=identity.instance_id)
        return Seed(image, identity, self._settings, Connections.of(self._settings), manifest=manifest).start()

    @property
    def _exclude(self) -> Patterns:
        """Name patterns of tensors that are not in the image."""
        return (*self._identity.exclude, *self._shared)

    def _adopt_model(self, module: nn.Module, shared: Patterns) -> nn.Module:
        self._model, self._shared = module, shared
        identity = self._identity
        if identity.sharing is not None:
            identity.sharing.apply(module, shared)
        self._hidden_state = HiddenState(module, identity.facts, identity.packages, identity.helper_attributes)
        return module

    def _abandon(self) -> None:
        """Free the memory of an unused model: the engine is about to allocate the same amount again."""
        if self._model is not None:
            for name, value in self._model.named_parameters():
                if matches(name, self._shared):
                    continue  # they may be the main model's
                with contextlib.suppress(RuntimeError):  # borrowed memory cannot be resized
                    value.untyped_storage().resize_(0)
        self._model = self._hidden_state = None
        collect()


def collect() -> None:
    """Return unreferenced memory to the allocators."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def cap_deadline(settings: InstanceSettings, load_timeout_s: float, hint: str = "") -> InstanceSettings:
    """Limit a fork's deadline to half of the time that the engine grants for loading.

    If the fork fails at its deadline, the engine's own loader needs the other half.
    """
    max_deadline_s = load_timeout_s / 2
    if settings.deadline_s <= max_deadline_s:
        return settings
    log.info(
        "deadline reduced to half of the engine's timeout for loading",
        deadline_s=max_deadline_s,
        requested_s=settings.deadline_s,
        hint=hint,
    )
    return settings.model_copy(update={"deadline_s": max_deadline_s})

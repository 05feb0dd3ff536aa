"""How an engine's model gets its weights: forked, or loaded by the engine itself; never half of either.

Runs on the target, in the process and on the thread of the engine that loads the model. The engine's room
says how one is made (`EngineAdapter`) and what it is (`ModelIdentity`).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import nn

from rfork import settings as options
from rfork.engines.completeness import Completeness
from rfork.engines.hidden_state import HiddenState
from rfork.engines.replica import replica_of
from rfork.engines.served_model import ATTRIBUTE, ServedModel
from rfork.engines.version_selection import CurrentVersion, choose_version, version_of_files
from rfork.errors import (
    AllSourcesFailed,
    EngineMismatch,
    RforkError,
    SettingsError,
    TargetError,
    WrongVersion,
)
from rfork.logs import logger
from rfork.peer.client import PeerClient
from rfork.planner_client.client import PlannerClient
from rfork.receiver.fallback import Fallback, engine_fallback, snapshot_fallback
from rfork.receiver.session import ForkSession
from rfork.schema import Rank
from rfork.settings import InstanceSettings, StorageSettings
from rfork.source.seed import InstanceIdentity
from rfork.transport.selection import select_transports

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """What is brought up: one rank of one model, and what must be equal on both sides of a fork."""

    model: str
    rank: Rank
    facts: tuple[str, ...] = ()
    """See `rfork.image.compat_tags`: engine and version, device, quantisation."""
    packages: tuple[str, ...] = ()
    """The engine's: see `rfork.engines.hidden_state`."""
    exclude: tuple[str, ...] = ()
    """Patterns of tensors that are no weights: KV caches."""
    files: str | None = None
    """The folder, or the hub id, that the engine loads this model from."""
    revision: str | None = None
    """Of the hub id."""


Rebuild = Callable[[nn.Module], None]
"""Has an engine's kernels read anew what they made of the weights; changes no tensor."""

DescribeModel = Callable[[], ModelIdentity]
"""Says what is brought up; whatever it raises is a reason not to fork."""


class EngineAdapter(Protocol):
    """How one engine makes one model.

    `empty` is called once, and then `load` at most once, both on the engine's own thread.
    """

    def empty(self) -> nn.Module:
        """A model in its final layout, post-processed as one that was loaded, its weights not read."""
        ...

    def load(self) -> nn.Module:
        """A new model, by the engine's own loader. What `empty` made is given up: forget it first."""
        ...

    def check(self) -> None:
        """Raises CheckpointError where `load` has nothing to load from; looks at no weights.

        Called on a thread of its own, while the engine's waits.
        """
        ...


def load_or_fork(
    engine: EngineAdapter,
    describe: DescribeModel,
    settings: InstanceSettings | None = None,
    rebuild: Rebuild | None = None,
) -> nn.Module:
    """A model with its weights: forked where somebody has them, else loaded by the engine; then a seed.

    `rebuild` is called with a model that was filled by a fork or a snapshot, before it is a seed; where it
    raises, the next way is tried.

    Without a planner they come from the snapshot that the settings name; without either, the engine loads.
    Returns the model in the state that the engine's own loader leaves it in; `served_model` gives its
    instance, unless it gives nothing. Raises what the engine's loader raises; with the setting `required`,
    an RforkError instead of calling it. Bad settings are a SettingsError.
    """
    chosen = settings or options.load(InstanceSettings)
    if chosen.planner is None and chosen.snapshot is None:
        if chosen.fail_if_not_forked:
            raise SettingsError(
                "neither a planner nor a snapshot is set, and RFORK_FAIL_IF_NOT_FORKED is",
                hint="set RFORK_PLANNER or RFORK_SNAPSHOT",
            )
        log.warning("no planner is set: the engine loads its weights by itself", hint="set RFORK_PLANNER")
        return engine.load()
    return _LoadOrFork(engine, describe, chosen, rebuild).run()


class _LoadOrFork:
    """One model on its way."""

    def __init__(
        self,
        engine: EngineAdapter,
        describe: DescribeModel,
        settings: InstanceSettings,
        rebuild: Rebuild | None,
    ) -> None:
        self._engine = engine
        self._describe = describe
        self._settings = settings
        self._rebuild = rebuild
        self._model: nn.Module | None = None
        self._traits: HiddenState | None = None
        self._loading = self._loaded = False

    @cached_property
    def _subject(self) -> ModelIdentity:
        return self._describe()

    def run(self) -> nn.Module:
        """Fork or load it."""
        try:
            return self._fork()
        except Exception as error:  # whatever is wrong with a fork, it is no reason not to serve
            if self._model is not None and self._loaded:
                log.error(
                    "the engine loaded its weights by itself, and is no seed",
                    because=f"{type(error).__name__}: {error}",
                    exc_info=not isinstance(error, RforkError),
                )
                return self._model
            if self._loading or isinstance(error, (SettingsError, WrongVersion)):
                raise
            if self._settings.fail_if_not_forked:
                if isinstance(error, RforkError):
                    raise
                raise TargetError(f"not forked: {type(error).__name__}: {error}") from error
            known = isinstance(error, RforkError)
            log.error(
                "not forked: the engine loads its weights by itself",
                because=f"{type(error).__name__}: {error}",
                hint=error.hint if isinstance(error, RforkError) else "please report it",
                exc_info=not known,
            )
        self._abandon()
        return self._engine.load()

    def _fork(self) -> nn.Module:
        proof = Completeness()
        proof.check(self._adopt_model(self._engine.empty()))
        report = self._session().run()
        module, traits, seed = self._model, self._traits, report.seed
        if module is None or traits is None or seed is None:
            raise AllSourcesFailed("the fork ended without a model", ())
        try:
            setattr(module, ATTRIBUTE, ServedModel(module, seed, report, traits, self._subject.exclude))
        except BaseException:
            seed.close()  # it must not give what is about to be given up
            raise
        return module

    def _prepare(self) -> None:
        """Finish a model that was filled in place. Raises EngineMismatch, whatever the engine raised."""
        module, traits = self._model, self._traits
        if module is None or traits is None:
            raise EngineMismatch("there is no model to finish")
        if changed := traits.apply():
            log.info("numbers of the modules taken over", count=changed)
        if self._rebuild is None:
            return
        try:
            self._rebuild(module)
        except Exception as error:  # an engine's kernels may raise anything
            raise EngineMismatch(
                f"the engine's kernels could not be rebuilt: {type(error).__name__}: {error}"
            ) from error

    def _session(self) -> ForkSession:
        chosen, subject = self._settings, self._subject
        if self._model is None:
            raise AllSourcesFailed("there is no model to fill", ())
        version, current_version = self._version()
        return ForkSession(
            self._model,
            InstanceIdentity.of(
                subject.model,
                subject.rank,
                chosen.replica,
                version=version,
                replica=replica_of(chosen, subject.rank),
            ),
            chosen,
            select_transports(chosen),
            planner=PlannerClient.of(chosen) if chosen.planner is not None else None,
            dial=lambda address, token: PeerClient(address, token, chosen.tls),
            fallbacks=self._fallbacks(version),
            exclude=subject.exclude,
            current_version=current_version,
            on_filled=self._prepare,
        )

    def _version(self) -> tuple[str | None, CurrentVersion | None]:
        subject, storage = self._subject, options.load(StorageSettings)
        files = (
            partial(version_of_files, subject.files, subject.revision, storage) if subject.files is not None else None
        )
        return choose_version(self._settings.version, files, self._settings.snapshot, storage)

    def _fallbacks(self, version: str | None) -> Sequence[Fallback]:
        fallbacks: list[Fallback] = []
        if self._settings.snapshot is not None:
            storage = options.load(StorageSettings)
            fallback = snapshot_fallback(
                self._settings.snapshot, self._subject.exclude, self._subject.rank, storage, version
            )

            def load(module: nn.Module) -> None:
                fallback.load(module)
                self._prepare()

            fallbacks.append(replace(fallback, load=load))
        if not self._settings.fail_if_not_forked:
            fallbacks.append(engine_fallback(self._load, self._engine.check))
        return fallbacks

    def _load(self) -> nn.Module:
        self._model = self._traits = None
        collect()
        proof = Completeness()
        self._loading = True
        module = self._engine.load()
        self._model, self._loaded = module, True
        proof.check(self._adopt_model(module))
        return module

    def _adopt_model(self, module: nn.Module) -> nn.Module:
        self._model = module
        self._traits = HiddenState(module, self._subject.facts, self._subject.packages)
        return module

    def _abandon(self) -> None:
        """The memory of a model that is not used: the engine is about to take as much for another."""
        if self._model is not None:
            for value in self._model.parameters():
                with contextlib.suppress(RuntimeError):  # memory that somebody lent is not resized
                    value.untyped_storage().resize_(0)
        self._model = self._traits = None
        collect()


def collect() -> None:
    """Have the allocators take back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

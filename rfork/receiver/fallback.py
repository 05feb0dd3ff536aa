"""Fallbacks: ways to fill a module without a peer, also offered to the planner for cold starts. Runs on the target.

If no instance has the image and several need it, each reports to the planner which storage it can read, and the
planner has each byte read by one instance, for all. A snapshot or a checkpoint that matches byte for byte is read
chunk by chunk and served meanwhile; an opaque loader fills the complete module first. An engine's loader builds
another model: the first one's memory is released before, so that the two never exist at the same time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final, TypeVar

from pydantic import TypeAdapter, ValidationError
from torch import nn
from typing_extensions import Self

from rfork import settings as options
from rfork.errors import (
    AllSourcesFailed,
    CheckpointError,
    RforkError,
    SettingsError,
    SourceUnavailable,
    StorageError,
    UserError,
    WrongVersion,
    without_frames,
)
from rfork.image.capture import capture
from rfork.image.layout import Manifest
from rfork.image.memory import Image, compute_manifest
from rfork.logs import logger
from rfork.receiver.clean_module import DerivedTensors, Poison, TargetModule, one_line
from rfork.receiver.own_load import OwnLoad, StorageScope
from rfork.receiver.spool import ChunkPersister
from rfork.schema import CrossLayoutResult, Rank, StorageAssignment, StorageCandidate, StorageType, Text
from rfork.settings import StorageSettings
from rfork.source.seed import Seed
from rfork.source.served_image import VersionOf
from rfork.storage.abandonable_call import AbandonableCall
from rfork.storage.base import ImageStorage, storage_name, to_candidate
from rfork.storage.location import Location
from rfork.storage.module_io.module_state import registered_state, self_loading
from rfork.tracing import Tracer
from rfork.weights_version import is_single, is_unnamed, short

if TYPE_CHECKING:
    from rfork.storage.snapshots.snapshot import Snapshot

log = logger(__name__)
ALTERNATIVES_HINT: Final = "start a seed, or pass a checkpoint folder to fall back to"
"""Hint if no failure has one."""
FIX_FALLBACK_HINT: Final = "fix the problem in the last reason, or start a seed"
ENGINE_LOADER: Final = "the engine's loader"
OTHER_LAYOUTS: Final = "instances with other layouts"
OTHER_LAYOUTS_URI: Final = "layouts:"
SAMPLE_TIMEOUT_S: Final = 10.0
"""Maximum time to read a sample of storage."""
_text: Final[TypeAdapter[str]] = TypeAdapter(Text)

Loader = Callable[[nn.Module], None]
OutOfPlaceLoader = Callable[[], nn.Module]
"""Builds and loads another model; its exceptions reach the caller of the fork unchanged."""
OpenStorage = Callable[[nn.Module, Image, DerivedTensors], ImageStorage | None]
Offer = TypeVar("Offer")


class LoaderError(Exception):
    """A loader that builds its own model failed with `error`, after the first model was released.

    Not a failure of the fork: no other fallback can follow.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class ModuleReleased(Exception):
    """A loader released the module's memory, and then failed with `error`, because it lost its sources.

    Nothing can be received any more, and only fallbacks that build a model of their own can follow.
    """

    def __init__(self, error: RforkError) -> None:
        super().__init__(str(error))
        self.error = error


class ModuleReplaced(Exception):
    """A loader replaced the module's tensors: the weights are loaded, but the image does not contain them.

    Not a failure of the fork: `fallback` loaded the weights.
    """

    def __init__(self, fallback: Fallback) -> None:
        super().__init__(fallback.name)
        self.fallback = fallback


@dataclass(frozen=True, slots=True)
class Fallback:
    """One way to fill a module without a peer; `name` identifies it in the report.

    `storage_type` and `uri` describe it to the planner; `uri` is empty for storage without a name. `open`
    returns storage that can be read chunk by chunk, or None if `load` must do everything; it raises
    CheckpointError or StorageError if neither works. It may be called at any time of the fork, on its own
    thread, so it must not read the bytes of the tensors. Without it, `load` is used.

    `path` returns the local file that `load` reads, or the folder with its weight files, if there is one: its speed
    shows how long `load` would take.

    With `load_out_of_place`, it is a loader that builds its own model, as engines do: the module's memory is
    released first, so that the two models never exist at the same time, and `load` is not called. `prepare` is called
    before the memory is released; if it raises an RforkError, the next fallback is tried. If the loader of a fallback
    that reads instances raises one, the next fallback that builds its own model is tried.

    `stated_version` returns the version of the weights that were loaded, if they are not this instance's files: it
    loads the version that the fork requires, or fails. `cross_layout` returns what came from which layout, once it
    was loaded.
    """

    name: str
    load: Loader
    storage_type: StorageType = "loader"
    uri: str = ""
    open: OpenStorage | None = None
    load_out_of_place: OutOfPlaceLoader | None = None
    path: Callable[[], Path | None] | None = None
    prepare: Callable[[], None] | None = None
    stated_version: Callable[[], str] | None = None
    cross_layout: Callable[[], CrossLayoutResult | None] | None = None

    @property
    def is_local(self) -> bool:
        """Return whether it reads files of this host, as far as its address shows."""
        return self.path is not None or self.uri.startswith("file:")

    @property
    def cross_layout_result(self) -> CrossLayoutResult | None:
        """Return what came from which other layout; None if it did not read from any."""
        return self.cross_layout() if self.cross_layout is not None else None

    @property
    def reads_instances(self) -> bool:
        """Return whether it reads the weights from running instances."""
        return self.stated_version is not None


def checkpoint_fallback(uri: str | Path, settings: StorageSettings | None = None) -> Fallback:
    """Return a fallback that loads a checkpoint of safetensors files: a path, or any storage URI.

    Raises SettingsError.
    """
    # Here and below: a fork without files imports 31 modules less, a seventh of all.
    from rfork.storage.checkpoint import Checkpoint, CheckpointChunks, NotBytewiseLoadable

    location = Location.parse(uri)
    checked_uri = _validate_uri(location.uri)
    path = Path(location.path)

    def load(module: nn.Module) -> None:
        Checkpoint.open(uri, settings).load_into(module)

    def chunks(module: nn.Module, image: Image, derived: DerivedTensors) -> ImageStorage | None:
        try:
            return CheckpointChunks.open(Checkpoint.open(uri, settings), module, image, derived.kept)
        except NotBytewiseLoadable as error:
            log.info("the checkpoint can only be loaded as a whole", checkpoint=checked_uri, reason=str(error))
            return None

    name = f"checkpoint {uri if _is_path(uri) else checked_uri}"
    is_local = location.scheme == "file"
    return Fallback(name, load, "checkpoint", checked_uri, chunks, path=(lambda: path) if is_local else None)


def loader_fallback(loader: Loader) -> Fallback:
    """Return a fallback that calls the caller's own loader."""
    return Fallback("loader", loader)


def engine_fallback(
    load: OutOfPlaceLoader, check: Callable[[], None], path: Callable[[], Path | None] | None = None
) -> Fallback:
    """Return a fallback that runs the engine's own loader, which builds a new model.

    `check` raises CheckpointError or StorageError if there is nothing to load from; then the loader is not
    offered. `path` returns the local file or folder that it reads, if there is one.
    """

    def opened(module: nn.Module, image: Image, derived: DerivedTensors) -> None:
        check()

    return Fallback(ENGINE_LOADER, _reject_in_place, open=opened, load_out_of_place=load, path=path)


def layouts_fallback(
    prepare: Callable[[], None],
    load: OutOfPlaceLoader,
    stated_version: Callable[[], str],
    check: Callable[[], None],
    result: Callable[[], CrossLayoutResult | None],
) -> Fallback:
    """Return a fallback that reads the weights from instances with other layouts, through the engine's loader.

    `prepare` fetches them, `load` builds a new model from them. `check` raises StorageError if no instance has them.
    `result` returns what came from which layout.
    """

    def opened(module: nn.Module, image: Image, derived: DerivedTensors) -> None:
        check()

    return Fallback(
        OTHER_LAYOUTS,
        _reject_in_place,
        uri=OTHER_LAYOUTS_URI,
        open=opened,
        load_out_of_place=load,
        prepare=prepare,
        stated_version=stated_version,
        cross_layout=result,
    )


def _reject_in_place(module: nn.Module) -> None:
    raise UserError("the engine's loader builds its own model")


def snapshot_fallback(
    uri: str | Path,
    exclude: Sequence[str] = (),
    rank: Rank | None = None,
    settings: StorageSettings | None = None,
    version: str | None = None,
) -> Fallback:
    """Return a fallback that reads a snapshot, without tensors that match `exclude` (see `capture`).

    It must contain weights of `version`; None: of any version. `uri` (or path) is the file, or the folder
    with one for each rank. Raises SettingsError.
    """
    from rfork.storage.snapshots.entry import snapshot_location
    from rfork.storage.snapshots.snapshot import Snapshot

    named = str(uri)
    folder, name = snapshot_location(named, rank)
    # The URI of the file itself, without the query of a presigned URL, which is a secret.
    checked_uri = _validate_uri(folder.child(name.partition("?")[0]).uri)

    def load(module: nn.Module) -> None:
        image = capture(module, exclude=exclude)
        with closing(opened(image)) as snapshot:
            snapshot.fill(image)

    def opened(image: Image) -> Snapshot:
        snapshot = Snapshot.open(named, image.layout, rank=rank, settings=settings)
        try:
            _check_version(snapshot, version)
        except BaseException:
            snapshot.close()
            raise
        return snapshot

    def chunks(module: nn.Module, image: Image, derived: DerivedTensors) -> ImageStorage:
        return opened(image)

    return Fallback(f"snapshot {checked_uri}", load, "snapshot", checked_uri, chunks)


def load_into_clean_module(module: nn.Module, derived: DerivedTensors | None, fallback: Fallback) -> None:
    """Run one fallback on a clean model. Raises RforkError, whatever the loader raised.

    A loader that leaves a part of the model unchanged has failed: UserError names the first such tensor.
    """
    poison: Poison | None = None
    if derived is not None:
        derived.restore()
        if fallback.storage_type == "loader" or (fallback.storage_type == "checkpoint" and self_loading(module, ())):
            poison = Poison(derived.loadable)
    try:
        fallback.load(module)
    except RforkError:
        raise
    except Exception as error:  # the caller's loader may raise anything
        raise UserError(f"{fallback.name}: {one_line(error)}") from error
    if poison is not None and (left := poison.unwritten(registered_state(module))):
        raise UserError(
            f"{fallback.name} did not fill {left[0]} (tensors not filled: {len(left)})",
            hint="a loader must fill all parameters and persistent buffers; name those that must not be"
            " forked in exclude=",
        )


def run_fallbacks(
    fallbacks: Iterable[Fallback], load: Callable[[Fallback], None], reasons: Sequence[RforkError]
) -> Fallback:
    """Try each fallback by calling `load`; returns the one that worked. The next one is chosen only after that.

    `reasons` are the failures so far. Raises AllSourcesFailed with these and the failure of each fallback if none
    worked: the module's content is then undefined.
    """
    failures, tried = list(reasons), False
    for fallback in fallbacks:
        tried = True
        log.warning("falling back", to=fallback.name, reason=str(failures[-1]) if failures else "")
        try:
            load(fallback)
        except RforkError as error:
            # A fallback that could not be offered is tried anyway; it mostly fails the same way.
            failures = [one for one in failures if (one.kind, str(one)) != (error.kind, str(error))]
            failures.append(without_frames(error))
        else:
            return fallback
    failure_text = (
        "; ".join(f"{error.kind}: {error}" for error in failures) or "no source and no fallback is configured"
    )
    raise AllSourcesFailed(
        f"no source or fallback worked: {failure_text}",
        failures,
        hint=_advice(failures, tried=tried),
    )


class FallbackRunner:
    """The fallbacks of one fork: offered to the planner as storage, read if it elects this instance, and run in
    order once nothing else works. A context manager, which closes the storage.

    A fork that has a source causes no disk reads: storage is opened by `open`. Storage that cannot be used is left
    out with a warning, is tried again as a fallback, and reports its error there.
    """

    def __init__(
        self,
        target: TargetModule,
        seed: Seed,
        persister: ChunkPersister,
        fallbacks: Sequence[Fallback],
        current_version: Callable[[], str | None] | None,
        tracer: Tracer,
    ) -> None:
        """`current_version` recomputes the version of this instance's files, if it started with that version:
        waiting instances must not receive files that have changed since.
        """
        self.target = target
        self.seed = seed
        self.reasons: list[RforkError] = []
        """Failures of the fork so far, in order; those of this instance's storage are added here."""
        self.advertised: tuple[StorageCandidate, ...] = ()
        """Opened storage; empty before `open`."""
        self.replaced = False
        """True if a loader built another model."""
        self.serves_replacement = False
        """True if the seed serves that model: it has the layout of the first one."""
        self._released_by: Fallback | None = None
        """The loader that released the module's memory and then failed."""
        self._persister = persister
        self._fallbacks = fallbacks
        self._current_version = current_version
        self._tracer = tracer
        self._lock = threading.Lock()
        self._usable: list[tuple[Fallback, ImageStorage | None]] | None = None
        """Fallbacks that could be opened; None before that."""
        self._is_advertised = False
        self._closing = threading.Lock()
        self._is_closed = False
        self._chunk_sources: dict[tuple[StorageType, str], ImageStorage] = {}
        self._loaders: dict[tuple[StorageType, str], Fallback] = {}

    # -- storage for waiting instances ------------------------------------------------------------------

    def open(self) -> bool:
        """Open all storage concurrently; returns whether this call was the first and found any.

        Raises subclasses of UserError for invalid settings.
        """
        if self.seed.settings.cold_start != "cooperative":
            return False
        with self._lock:
            if self._is_advertised:
                return False
            self._is_advertised = True
            self.advertised = tuple(
                to_candidate(storage) if storage is not None else StorageCandidate(kind="loader", uri=fallback.uri)
                for fallback, storage in self._open_all()
            )
            return bool(self.advertised)

    def _open_all(self) -> Sequence[tuple[Fallback, ImageStorage | None]]:
        """Open all storage, once, and return what can be used; the caller holds the lock."""
        if self._usable is not None:
            return self._usable
        settings = self.seed.settings
        self._usable = usable = []
        until = time.monotonic() + min(settings.storage_idle_timeout_s, settings.deadline_s)
        attempts = [(fallback, self._start_open(fallback)) for fallback in self._fallbacks]
        for fallback, attempt in attempts:
            try:
                storage = attempt.result(until) if attempt is not None else None
                if fallback.storage_type != "snapshot" and not fallback.reads_instances:
                    self._check_files()  # after opening, so that the files that are read are the checked ones
            except (CheckpointError, StorageError) as error:
                if fallback.reads_instances:  # normal for the first instance of a model
                    log.info("no other layout can be read", reason=str(error))
                    continue
                log.warning("this instance cannot read its storage", storage=fallback.name, reason=str(error))
                self.reasons.append(without_frames(error))
                continue
            if storage is not None:
                with self._closing:
                    if self._is_closed:
                        storage.close()
                        continue
                    self._chunk_sources[storage.storage_type, storage.uri] = storage
            elif ("loader", fallback.uri) in self._loaders:
                continue
            else:
                self._loaders["loader", fallback.uri] = fallback
            usable.append((fallback, storage))
        return usable

    def _start_open(self, fallback: Fallback) -> AbandonableCall[ImageStorage | None] | None:
        open_storage, target, derived = fallback.open, self.target, self.target.derived
        if open_storage is None or derived is None:
            return None
        return AbandonableCall(fallback.name, lambda: open_storage(target.module, target.image, derived), _close)

    def remove(self, name: str) -> None:
        """Stop offering the storage of that name (`KIND:URI`)."""
        self.advertised = tuple(offer for offer in self.advertised if storage_name(offer.kind, offer.uri) != name)

    def storage_for(self, read: StorageAssignment) -> ImageStorage:
        """Return the storage of a plan. Raises StorageError if this instance did not offer it."""
        return self._offered(self._chunk_sources, read)

    def run_loader(self, read: StorageAssignment) -> Manifest:
        """Fill the module with a loader, and digest it. Raises RforkError, ModuleReplaced or ModuleReleased."""
        with self._tracer.span("read from storage", source=storage_name(read.kind, read.uri)):
            fallback = self._offered(self._loaders, read)
            if self.seed.manifest is not None:
                self.seed.fence()  # its weights are about to be replaced
            try:
                self.load(fallback)
            except RforkError as error:
                if self._released_by is not None:
                    raise ModuleReleased(error) from None
                raise
            manifest = None if self.replaced or not self.target.is_in_place() else compute_manifest(self.target.image)
        if manifest is None:
            raise ModuleReplaced(fallback)
        return manifest

    def _offered(self, offers: Mapping[tuple[StorageType, str], Offer], read: StorageAssignment) -> Offer:
        with self._lock:
            self._open_all()
        offer = offers.get((read.kind, read.uri))
        if offer is None:
            named = storage_name(read.kind, read.uri)
            raise StorageError(f"the planner assigned {named} to this instance, which cannot read it")
        return offer

    # -- storage besides peers --------------------------------------------------------------------------

    @property
    def scope(self) -> StorageScope | None:
        """Location of this instance's storage, if it may be read while peers serve the fork."""
        if not self.seed.settings.race_storage:
            return None
        readable = [
            each for each in self._fallbacks if each.path is not None or (each.uri and not each.reads_instances)
        ]
        if not readable:
            return None
        local = [each for each in readable if each.is_local]
        if any(each.open is not None and each.load_out_of_place is None for each in local):
            return "local"
        return "loader" if local else "remote"

    def measure(self) -> OwnLoad | None:
        """Open all storage, and read a sample of the first that can be read; None if there is none.

        Storage that hangs is abandoned after `SAMPLE_TIMEOUT_S`.
        """
        with self._lock:
            usable = list(self._open_all())
        for fallback, storage in usable:
            attempt = AbandonableCall(fallback.name, partial(self._measure, fallback, storage), lambda _: None)
            try:
                measured = attempt.result(time.monotonic() + SAMPLE_TIMEOUT_S)
            except (StorageError, SourceUnavailable) as error:
                log.warning("own storage cannot be measured", storage=fallback.name, reason=str(error))
                continue
            if measured is not None:
                log.info("own storage measured", storage=fallback.name, gb_per_s=round(measured.bytes_per_s / 1e9, 3))
                return measured
        return None

    def _measure(self, fallback: Fallback, storage: ImageStorage | None) -> OwnLoad | None:
        from rfork.storage.io.sample import sample_rate

        image_bytes, settings = self.target.image.layout.image_bytes, options.load(StorageSettings)
        # Files of an instance that adopts the version of its sources may contain another one.
        replaces_fork = not self.seed.adopts_version
        if storage is not None:
            rate = sample_rate(storage, image_bytes, fallback.name, settings)
            assignment = StorageAssignment(kind=storage.storage_type, uri=storage.uri, chunks=())
            is_local = storage.uri.startswith("file:")
            return OwnLoad(fallback.name, rate, image_bytes / rate, assignment, is_local, replaces_fork)
        path = fallback.path() if fallback.path is not None else None
        if path is None:
            return None
        own = sampled_load(fallback.name, path, image_bytes, self.seed.identity.rank, settings)
        return replace(own, replaces_fork=replaces_fork)

    # -- loading ----------------------------------------------------------------------------------------

    def run(self) -> Fallback:
        """Run the fallbacks after the failures in `reasons`; returns the one that worked. Raises AllSourcesFailed."""
        version = self.seed.version
        shared = version is not None and self.seed.adopts_version and not is_unnamed(version)
        if shared and self._fallbacks and not is_single(self.seed.identity.rank):
            # No fallback of this rank is known to provide the version that another rank may have: a replica of two
            # versions is worse than one that does not start.
            self.reasons.append(
                WrongVersion(
                    f"the replica started with version {version}, and this rank has no files of that version",
                    hint="set the version (RFORK_VERSION), or restart all ranks",
                )
            )
            others = [each for each in self._fallbacks if each.reads_instances]
            return run_fallbacks(self._runnable(others), self.load, self.reasons)
        return run_fallbacks(self._runnable(self._fallbacks), self.load, self.reasons)

    def _runnable(self, fallbacks: Sequence[Fallback]) -> Iterator[Fallback]:
        """Yield the fallbacks that can run when it is their turn: an earlier one may have released the memory."""
        for fallback in fallbacks:
            released_by = self._released_by
            if released_by is None or (fallback is not released_by and fallback.load_out_of_place is not None):
                yield fallback

    def load(self, fallback: Fallback) -> None:
        """Run one fallback on the calling thread; no other thread may write to the image.

        Raises RforkError, and LoaderError if the fallback builds a model of its own.
        """
        if fallback.load_out_of_place is not None:
            if fallback.prepare is not None:
                fallback.prepare()
            self._replace_module(fallback, fallback.load_out_of_place)
        else:
            load_into_clean_module(self.target.module, self.target.derived, fallback)

    def _replace_module(self, fallback: Fallback, load_out_of_place: OutOfPlaceLoader) -> None:
        """Release the module's memory, build another model, and serve it if it has the same layout.

        State that a model computes when it is built (rotary tables) may be shared with the next one: it is
        restored, and its memory is kept.
        """
        image, derived = self.target.image, self.target.derived
        self._persister.pause()
        self.seed.release_memory()
        if derived is not None:
            derived.restore()
        image.release(keep=derived.storages if derived is not None else ())
        try:
            module = load_out_of_place()
        except Exception as error:  # an engine's loader may raise anything
            if fallback.reads_instances and isinstance(error, RforkError):
                self._released_by = fallback
                raise  # the next fallback that builds its own model is tried
            raise LoaderError(error) from error
        self.replaced = True
        try:
            loaded = capture(module, exclude=self.target.exclude)
            if difference := image.layout.first_difference(loaded.layout):
                log.warning("not a seed: the loaded model has another layout", difference=difference)
                return
            image.rebind(loaded)
            self.seed.memory_restored(self._version_of(fallback))
        except RforkError as error:
            log.warning("not a seed: the loaded model cannot be captured", reason=str(error))
        except Exception:  # a bug here must not stop the engine from serving the loaded model
            log.exception("not a seed: the loaded model cannot be captured")
        else:
            self.serves_replacement = True

    def _version_of(self, fallback: Fallback) -> VersionOf | None:
        """Return a function that names what a fallback loaded; None: `seed.version`."""
        if fallback.stated_version is None:
            return self.version_of_loaded()
        stated = fallback.stated_version()
        return lambda _: stated

    def version_of_loaded(self) -> VersionOf | None:
        """Return a function that names weights which this instance read itself; None: they have `seed.version`."""
        seed = self.seed
        try:
            self._check_files()
        except (CheckpointError, StorageError) as error:
            log.warning("serving weights as a new version", reason=str(error))
            self.reasons.append(without_frames(error))
            return seed.version_by_content
        if not seed.adopts_version or (seed.version is not None and is_unnamed(seed.version)):
            return None
        return seed.version_by_content

    def _check_files(self) -> None:
        """Raise CheckpointError if this instance's files have changed since it started."""
        if self._current_version is None:
            return
        current, started = self._current_version(), self.seed.identity.version
        if current != started:
            raise CheckpointError(
                f"the weight files changed after this instance started: they had version {started} and "
                + (f"have {current}" if current else "are gone"),
                hint="restart the instance",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._closing:
            self._is_closed = True
            for storage in self._chunk_sources.values():
                storage.close()


def sampled_load(name: str, path: Path, image_bytes: int, rank: Rank, settings: StorageSettings) -> OwnLoad:
    """Return how long a loader takes for a rank's image, from a sample of the file or folder that it reads.

    Raises StorageError subclasses.
    """
    from rfork.storage.io.sample import sample_files

    rate = sample_files(path, settings)
    # The ranks of a replica load together, mostly from one disk.
    return OwnLoad(name, rate, image_bytes * rank.tp_size * rank.pp_size / rate)


def _check_version(snapshot: Snapshot, version: str | None) -> None:
    """Raise CheckpointError if a snapshot has weights of another version than `version`."""
    recorded = snapshot.manifest_file.version
    if version is None or recorded == version:
        return
    if recorded is None and version.startswith("weights:"):
        return  # derived from this snapshot, which records no version
    raise CheckpointError(
        f"snapshot {snapshot.uri} has version {short(recorded)}, but this instance requires {short(version)}",
        hint="write the snapshot again from an instance of that version, or unset RFORK_SNAPSHOT",
    )


def _advice(failures: Sequence[RforkError], *, tried: bool) -> str:
    """Return the hint: that of the last failure with one, or of a fallback whose files do not fit the model."""
    if tried and failures and isinstance(failures[-1], UserError):
        return failures[-1].hint or FIX_FALLBACK_HINT
    return next((error.hint for error in reversed(failures) if error.hint), ALTERNATIVES_HINT)


def _validate_uri(uri: str) -> str:
    """Return a URI that the planner accepts. Raises SettingsError if it would not."""
    try:
        return _text.validate_python(uri)
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
        raise SettingsError(f"the planner does not accept the URI {uri[:200]!r}: {reason}") from None


def _is_path(uri: str | Path) -> bool:
    return isinstance(uri, Path) or "://" not in uri


def _close(storage: ImageStorage | None) -> None:
    if storage is not None:
        storage.close()

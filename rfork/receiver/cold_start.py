"""The cold start, on the instance's side: what it could read by itself if the planner elects it to.

Runs on the target. Nobody holds the image, and many instances want it: each tells the planner what it
could read, and the planner has every byte read by one of them, for all. A snapshot or a checkpoint
that fits byte for byte is read chunk by chunk, and given onwards while it is read; an opaque loader
fills the whole module first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from torch import nn

from rfork.errors import CheckpointError, RforkError, StorageError
from rfork.image.capture import capture
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.receiver.fallback import DerivedTensors, Fallback, load_into_clean_module
from rfork.schema import StorageAssignment, StorageCandidate
from rfork.schema.types import StorageType
from rfork.source.image_state import compute_manifest
from rfork.source.seed import Seed
from rfork.storage.abandonable_call import AbandonableCall
from rfork.storage.base import ImageStorage, storage_name, to_candidate
from rfork.tracing import NOOP_TRACER, Tracer

log = logger(__name__)


class ModuleReplaced(Exception):
    """A loader put new tensors in the module's place: the weights are loaded, the image is not of them.

    Not an error of the fork's: `fallback` is what loaded them.
    """

    def __init__(self, fallback: Fallback) -> None:
        super().__init__(fallback.name)
        self.fallback = fallback


class StorageCandidates:
    """The ways of one fork as the planner is told of them, and as they are read; a context manager.

    A fork that has a source costs no disk anything: the ways are opened once `open` is called. A way that
    cannot work is left out, with a warning; it is tried again as a fallback, and says why there.
    """

    def __init__(
        self,
        fallbacks: Sequence[Fallback],
        module: nn.Module,
        image: Image,
        derived: DerivedTensors | None,
        seed: Seed,
        timeout_s: float,
        exclude: Sequence[str] = (),
        load_out_of_place: Callable[[Fallback], None] | None = None,
        tracer: Tracer = NOOP_TRACER,
        check_files: Callable[[], None] | None = None,
    ) -> None:
        """`exclude` is what the image leaves out of the module; see `capture`. No `derived`, no ways.

        `timeout_s` is how long storage that gives nothing is waited for when it is opened; `elsewhere` runs
        a way that builds a model of its own. `check_files` raises CheckpointError where the instance's own
        files are of another version than it wants: those that wait for them must not get them.
        """
        self.advertised: tuple[StorageCandidate, ...] = ()
        """What was opened; nothing before `open`."""
        self.reasons: list[RforkError] = []
        """Why ways were left out."""
        self._fallbacks = fallbacks
        self._module = module
        self._image = image
        self._derived = derived
        self._seed = seed
        self._timeout_s = timeout_s
        self._exclude = exclude
        self._load_out_of_place = load_out_of_place
        self._tracer = tracer
        self._check_files = check_files
        self._lock = threading.Lock()
        self._opened = False
        self._chunk_sources: dict[tuple[StorageType, str], ImageStorage] = {}
        self._loaders: dict[tuple[StorageType, str], Fallback] = {}

    def open(self) -> bool:
        """Open the ways, all at once; whether this call, the first, found any.

        Raises UserError kinds where a way makes no sense at all.
        """
        with self._lock:
            if self._opened:
                return False
            self._opened = True
            until = time.monotonic() + self._timeout_s
            attempts = [(fallback, self._start_open(fallback)) for fallback in self._fallbacks]
            advertised: list[StorageCandidate] = []
            for fallback, attempt in attempts:
                try:
                    storage = attempt.result(until) if attempt is not None else None
                    if fallback.storage_type != "snapshot" and self._check_files is not None:
                        self._check_files()  # once they are open: what is read is what was checked
                except (CheckpointError, StorageError) as error:
                    log.warning("not offered for a cold start", way=fallback.name, reason=str(error))
                    self.reasons.append(error)
                    continue
                if storage is not None:
                    self._chunk_sources[storage.storage_type, storage.uri] = storage
                    advertised.append(to_candidate(storage))
                elif ("loader", fallback.uri) not in self._loaders:
                    self._loaders["loader", fallback.uri] = fallback
                    advertised.append(StorageCandidate(kind="loader", uri=fallback.uri))
            self.advertised = tuple(advertised)
            return bool(advertised)

    def _start_open(self, fallback: Fallback) -> AbandonableCall[ImageStorage | None] | None:
        open_storage, derived = fallback.open, self._derived
        if open_storage is None or derived is None:
            return None
        return AbandonableCall(fallback.name, lambda: open_storage(self._module, self._image, derived), _close)

    def remove(self, name: str) -> None:
        """Offer the way of that name (`KIND:URI`) no more."""
        self.advertised = tuple(offer for offer in self.advertised if storage_name(offer.kind, offer.uri) != name)

    def storage_for(self, read: StorageAssignment) -> ImageStorage:
        """The storage of a plan. Raises StorageError where this instance has none such."""
        self.open()
        storage = self._chunk_sources.get((read.kind, read.uri))
        if storage is None:
            raise StorageError(f"the plan names {storage_name(read.kind, read.uri)}, which was not offered")
        return storage

    def run_loader(self, read: StorageAssignment) -> Manifest:
        """Fill the module by a loader, and digest it. Raises RforkError kinds, or Rebound."""
        span = self._tracer.start_span("read from storage", source=storage_name(read.kind, read.uri))
        try:
            return self._run_loader(read)
        except RforkError as error:  # not Rebound: that one is loaded
            span.fail(error)
            raise
        finally:
            span.end()

    def _run_loader(self, read: StorageAssignment) -> Manifest:
        self.open()
        fallback = self._loaders.get((read.kind, read.uri))
        if fallback is None:
            raise StorageError(f"the plan names {storage_name(read.kind, read.uri)}, which was not offered")
        if self._seed.manifest is not None:
            self._seed.fence()  # it was of other weights than those that come now
        if fallback.load_out_of_place is not None and self._load_out_of_place is not None:
            self._load_out_of_place(fallback)
            raise ModuleReplaced(fallback)
        load_into_clean_module(self._module, self._derived, fallback)
        if not self._image.shares_memory_with(capture(self._module, exclude=self._exclude)):
            raise ModuleReplaced(fallback)
        return compute_manifest(self._image)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for storage in self._chunk_sources.values():
            storage.close()


def _close(storage: ImageStorage | None) -> None:
    if storage is not None:
        storage.close()

"""Cold start on the target: the storage that this instance can read if the planner elects it.

Runs on the target. If no instance has the image and several need it, each reports to the planner which
storage it can read, and the planner has each byte read by one instance, for all. A snapshot or a checkpoint
that matches byte for byte is read chunk by chunk and served meanwhile; an opaque loader fills the complete
module first.
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
from rfork.image.memory import Image, compute_manifest
from rfork.logs import logger
from rfork.receiver.fallback import DerivedTensors, Fallback, load_into_clean_module
from rfork.schema import StorageAssignment, StorageCandidate
from rfork.schema.types import StorageType
from rfork.source.seed import Seed
from rfork.storage.abandonable_call import AbandonableCall
from rfork.storage.base import ImageStorage, storage_name, to_candidate
from rfork.tracing import NOOP_TRACER, Tracer

log = logger(__name__)


class ModuleReplaced(Exception):
    """A loader replaced the module's tensors: the weights are loaded, but the image does not contain them.

    Not a failure of the fork: `fallback` loaded the weights.
    """

    def __init__(self, fallback: Fallback) -> None:
        super().__init__(fallback.name)
        self.fallback = fallback


class StorageCandidates:
    """Storage that one fork offers to the planner and reads when elected; a context manager.

    A fork that has a source causes no disk reads: storage is opened by `open`. Storage that cannot be used is
    left out with a warning, is tried again as a fallback, and reports its error there.
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
        """`exclude`: tensors that the image leaves out; see `capture`. Without `derived`, nothing is offered.

        `timeout_s` is how long opening may take without progress; `load_out_of_place` runs a fallback that
        builds a new model. `check_files` raises CheckpointError if the instance's files are not of its
        version: waiting instances must not receive them.
        """
        self.advertised: tuple[StorageCandidate, ...] = ()
        """Opened storage; empty before `open`."""
        self.reasons: list[RforkError] = []
        """Reasons why storage was left out."""
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
        """Open all storage concurrently; returns whether this call was the first and found any.

        Raises subclasses of UserError for invalid settings.
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
                        self._check_files()  # after opening, so that the files that are read are the checked ones
                except (CheckpointError, StorageError) as error:
                    log.warning("this instance cannot read its storage", storage=fallback.name, reason=str(error))
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
        """Stop offering the storage of that name (`KIND:URI`)."""
        self.advertised = tuple(offer for offer in self.advertised if storage_name(offer.kind, offer.uri) != name)

    def storage_for(self, read: StorageAssignment) -> ImageStorage:
        """Return the storage of a plan. Raises StorageError if this instance did not offer it."""
        self.open()
        storage = self._chunk_sources.get((read.kind, read.uri))
        if storage is None:
            named = storage_name(read.kind, read.uri)
            raise StorageError(f"the planner assigned {named} to this instance, which cannot read it")
        return storage

    def run_loader(self, read: StorageAssignment) -> Manifest:
        """Fill the module with a loader, and digest it. Raises RforkError, or ModuleReplaced."""
        span = self._tracer.start_span("read from storage", source=storage_name(read.kind, read.uri))
        try:
            return self._run_loader(read)
        except RforkError as error:  # not ModuleReplaced, which is a success
            span.fail(error)
            raise
        finally:
            span.end()

    def _run_loader(self, read: StorageAssignment) -> Manifest:
        self.open()
        fallback = self._loaders.get((read.kind, read.uri))
        if fallback is None:
            named = storage_name(read.kind, read.uri)
            raise StorageError(f"the planner assigned {named} to this instance, which cannot read it")
        if self._seed.manifest is not None:
            self._seed.fence()  # its weights are about to be replaced
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

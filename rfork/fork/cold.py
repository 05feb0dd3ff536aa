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
from rfork.fields import StorageKind
from rfork.fork.fallback import Derived, Fallback, load_clean
from rfork.image.capture import capture
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.seed.holding import seal
from rfork.seed.seed import Seed
from rfork.storage.attempt import Attempt
from rfork.storage.base import Storage, name_of, offer_of
from rfork.tracing import OFF, Tracer
from rfork.wire import StorageOffer, StorageRead

log = logger(__name__)


class Rebound(Exception):
    """A loader put new tensors in the module's place: the weights are loaded, the image is not of them.

    Not an error of the fork's: `way` is what loaded them.
    """

    def __init__(self, way: Fallback) -> None:
        super().__init__(way.name)
        self.way = way


class Offers:
    """The ways of one fork as the planner is told of them, and as they are read; a context manager.

    A fork that has a source costs no disk anything: the ways are opened once `open` is called. A way that
    cannot work is left out, with a warning; it is tried again as a fallback, and says why there.
    """

    def __init__(
        self,
        ways: Sequence[Fallback],
        module: nn.Module,
        image: Image,
        derived: Derived | None,
        seed: Seed,
        patience_s: float,
        exclude: Sequence[str] = (),
        elsewhere: Callable[[Fallback], None] | None = None,
        tracer: Tracer = OFF,
        check_files: Callable[[], None] | None = None,
    ) -> None:
        """`exclude` is what the image leaves out of the module; see `capture`. No `derived`, no ways.

        `patience_s` is how long storage that gives nothing is waited for when it is opened; `elsewhere` runs
        a way that builds a model of its own. `check_files` raises CheckpointError where the instance's own
        files are of another version than it wants: those that wait for them must not get them.
        """
        self.told: tuple[StorageOffer, ...] = ()
        """What was opened; nothing before `open`."""
        self.reasons: list[RforkError] = []
        """Why ways were left out."""
        self._ways = ways
        self._module = module
        self._image = image
        self._derived = derived
        self._seed = seed
        self._patience_s = patience_s
        self._exclude = exclude
        self._elsewhere = elsewhere
        self._tracer = tracer
        self._check_files = check_files
        self._lock = threading.Lock()
        self._opened = False
        self._chunked: dict[tuple[StorageKind, str], Storage] = {}
        self._whole: dict[tuple[StorageKind, str], Fallback] = {}

    def open(self) -> bool:
        """Open the ways, all at once; whether this call, the first, found any.

        Raises UserError kinds where a way makes no sense at all.
        """
        with self._lock:
            if self._opened:
                return False
            self._opened = True
            until = time.monotonic() + self._patience_s
            attempts = [(way, self._attempt(way)) for way in self._ways]
            told: list[StorageOffer] = []
            for way, attempt in attempts:
                try:
                    storage = attempt.result(until) if attempt is not None else None
                    if way.kind != "snapshot" and self._check_files is not None:
                        self._check_files()  # once they are open: what is read is what was checked
                except (CheckpointError, StorageError) as error:
                    log.warning("not offered for a cold start", way=way.name, because=str(error))
                    self.reasons.append(error)
                    continue
                if storage is not None:
                    self._chunked[storage.kind, storage.uri] = storage
                    told.append(offer_of(storage))
                elif ("loader", way.uri) not in self._whole:
                    self._whole["loader", way.uri] = way
                    told.append(StorageOffer(kind="loader", uri=way.uri))
            self.told = tuple(told)
            return bool(told)

    def _attempt(self, way: Fallback) -> Attempt[Storage | None] | None:
        opening, derived = way.open, self._derived
        if opening is None or derived is None:
            return None
        return Attempt(way.name, lambda: opening(self._module, self._image, derived), _close)

    def drop(self, name: str) -> None:
        """Offer the way of that name (`KIND:URI`) no more."""
        self.told = tuple(offer for offer in self.told if name_of(offer.kind, offer.uri) != name)

    def find(self, read: StorageRead) -> Storage:
        """The storage of a plan. Raises StorageError where this instance has none such."""
        self.open()
        storage = self._chunked.get((read.kind, read.uri))
        if storage is None:
            raise StorageError(f"the plan names {name_of(read.kind, read.uri)}, which was not offered")
        return storage

    def load_whole(self, read: StorageRead) -> Manifest:
        """Fill the module by a loader, and digest it. Raises RforkError kinds, or Rebound."""
        span = self._tracer.begin("read from storage", source=name_of(read.kind, read.uri))
        try:
            return self._load_whole(read)
        except RforkError as error:  # not Rebound: that one is loaded
            span.fail(error)
            raise
        finally:
            span.end()

    def _load_whole(self, read: StorageRead) -> Manifest:
        self.open()
        way = self._whole.get((read.kind, read.uri))
        if way is None:
            raise StorageError(f"the plan names {name_of(read.kind, read.uri)}, which was not offered")
        if self._seed.manifest is not None:
            self._seed.fence()  # it was of other weights than those that come now
        if way.elsewhere is not None and self._elsewhere is not None:
            self._elsewhere(way)
            raise Rebound(way)
        load_clean(self._module, self._derived, way)
        if not self._image.same_memory(capture(self._module, exclude=self._exclude)):
            raise Rebound(way)
        return seal(self._image)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for storage in self._chunked.values():
            storage.close()


def _close(storage: Storage | None) -> None:
    if storage is not None:
        storage.close()

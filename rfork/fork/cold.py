"""The cold start, on the instance's side: what it could read by itself if the planner elects it to.

Runs on the target. Nobody holds the image, and many instances want it: each tells the planner what it
could read, and the planner has every byte read by one of them, for all. A snapshot or a checkpoint
that fits byte for byte is read chunk by chunk, and given onwards while it is read; an opaque loader
fills the whole module first.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Self

from torch import nn

from rfork.errors import CheckpointError, StorageError
from rfork.fork.fallback import Derived, Fallback, load_clean
from rfork.image.capture import capture
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.seed.holding import seal
from rfork.seed.seed import Seed
from rfork.storage.base import Storage, name_of, offer_of
from rfork.wire import StorageKind, StorageOffer, StorageRead

log = logger(__name__)


class Rebound(Exception):
    """A loader put new tensors in the module's place: the module is loaded, the image is not of it.

    Not an error of the fork's: `name` is the way that filled the module.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Offers:
    """The ways of one fork as the planner is told of them, and as they are read; a context manager.

    Opened before the first byte arrives: `derived` and the module are then as they were built. A way
    that cannot work is left out, with a warning; it is tried again as a fallback, and says why there.
    """

    def __init__(
        self,
        ways: Sequence[Fallback],
        module: nn.Module,
        image: Image,
        derived: Derived | None,
        seed: Seed,
        exclude: Sequence[str] = (),
    ) -> None:
        """`exclude` is what the image leaves out of the module; see `capture`. No `derived`, no ways."""
        self._module = module
        self._image = image
        self._derived = derived
        self._seed = seed
        self._exclude = exclude
        self._chunked: dict[tuple[StorageKind, str], Storage] = {}
        self._whole: dict[tuple[StorageKind, str], Fallback] = {}
        told: list[StorageOffer] = []
        for way in ways:
            try:
                storage = self._open(way)
            except (CheckpointError, StorageError) as error:
                log.warning("not offered for a cold start", way=way.name, because=str(error))
                continue
            if storage is not None:
                self._chunked[storage.kind, storage.uri] = storage
                told.append(offer_of(storage))
            elif ("loader", way.uri) not in self._whole:
                self._whole["loader", way.uri] = way
                told.append(StorageOffer(kind="loader", uri=way.uri))
        self.told = tuple(told)

    def _open(self, way: Fallback) -> Storage | None:
        if way.open is None or self._derived is None:
            return None
        return way.open(self._module, self._image, self._derived)

    def find(self, read: StorageRead) -> Storage:
        """The storage of a plan. Raises StorageError where this instance has none such."""
        storage = self._chunked.get((read.kind, read.uri))
        if storage is None:
            raise StorageError(f"the plan names {name_of(read.kind, read.uri)}, which was not offered")
        return storage

    def load_whole(self, read: StorageRead) -> Manifest:
        """Fill the module by a loader, and digest it. Raises RforkError kinds, or Rebound."""
        way = self._whole.get((read.kind, read.uri))
        if way is None:
            raise StorageError(f"the plan names {name_of(read.kind, read.uri)}, which was not offered")
        if self._seed.manifest is not None:
            self._seed.fence()  # it was of other weights than those that come now
        load_clean(self._module, self._derived, way)
        if not self._image.same_memory(capture(self._module, exclude=self._exclude)):
            raise Rebound(way.name)
        return seal(self._image)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for storage in self._chunked.values():
            storage.close()

"""Replacement of the target's module by a model that a loader builds. Runs on the target.

Engines load like this: a model whose weights were post-processed cannot load a checkpoint again. The first
model's memory is released before the second is built, so that the two never exist at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rfork.errors import RforkError
from rfork.image.capture import capture
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.receiver.chunk_persister import ChunkPersister
from rfork.receiver.fallback import DerivedTensors, Fallback, LoaderError
from rfork.source.seed import Seed
from rfork.source.served_image import VersionOf

log = logger(__name__)


class ModuleReplacement:
    """Moves one fork's model and seed to a model that was loaded elsewhere."""

    def __init__(
        self,
        image: Image,
        seed: Seed,
        persister: ChunkPersister,
        derived: DerivedTensors | None,
        exclude: Sequence[str],
        version_of_loaded: Callable[[], VersionOf | None],
    ) -> None:
        """`version_of_loaded` names the weights that were loaded; None: their version is known."""
        self.replaced = False
        """True if another model was loaded."""
        self.can_serve = False
        """True if the seed serves that model: it has the layout of the first one."""
        self._image = image
        self._seed = seed
        self._persister = persister
        self._derived = derived
        self._exclude = exclude
        self._version_of_loaded = version_of_loaded

    def load(self, fallback: Fallback) -> None:
        """Run `fallback.load_out_of_place` on the calling thread; no other thread may write to the image.

        State that a model computes when it is built (rotary tables) may be shared with the next one: it is
        restored, and its memory is kept. Raises LoaderError.
        """
        if fallback.load_out_of_place is None:
            raise ValueError(f"{fallback.name} loads in place")
        self._persister.pause()
        self._seed.release_memory()
        if self._derived is not None:
            self._derived.restore()
        self._image.release(keep=self._derived.storages if self._derived is not None else ())
        try:
            module = fallback.load_out_of_place()
        except Exception as error:  # an engine's loader may raise anything
            raise LoaderError(error) from error
        self.replaced = True
        try:
            image = capture(module, exclude=self._exclude)
            if difference := self._image.layout.first_difference(image.layout):
                log.warning("not a seed: the loaded model has another layout", difference=difference)
                return
            self._image.rebind(image)
            self._seed.memory_restored(self._version_of_loaded())
        except RforkError as error:
            log.warning("not a seed: the loaded model cannot be captured", reason=str(error))
        except Exception:  # a bug here must not stop the engine from serving the loaded model
            log.exception("not a seed: the loaded model cannot be captured")
        else:
            self.can_serve = True

"""A loader that builds another model in the place of the one that was to be filled. Runs on the target.

Engines load like that: a model whose weights were post-processed takes no checkpoint any more. So that the
two never stand side by side, the first one's memory is given back before the second is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rfork.errors import RforkError
from rfork.image.capture import capture
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.receiver.chunk_persister import ChunkPersister
from rfork.receiver.fallback import DerivedTensors, Fallback, LoaderError
from rfork.source.image_state import VersionOf
from rfork.source.seed import Seed

log = logger(__name__)


class ModuleReplacement:
    """One fork's model and seed, as they go over to a model that was loaded elsewhere."""

    def __init__(
        self,
        image: Image,
        seed: Seed,
        persister: ChunkPersister,
        derived: DerivedTensors | None,
        exclude: Sequence[str],
        version_of_loaded: Callable[[], VersionOf | None],
    ) -> None:
        """`version_of_loaded`: what names the weights that were loaded; None: their version is known."""
        self.replaced = False
        """Whether another model was loaded."""
        self.can_serve = False
        """Whether the seed gives that one now: it has the layout that the first one had."""
        self._image = image
        self._seed = seed
        self._persister = persister
        self._derived = derived
        self._exclude = exclude
        self._version_of_loaded = version_of_loaded

    def load(self, fallback: Fallback) -> None:
        """Run `fallback.elsewhere`, on the calling thread; nobody else writes to the image any more.

        What a model computes for itself when it is built (rotary tables) may be shared with the next one: it
        is put back as it was, and its memory is kept. Raises LoaderError.
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
                log.warning("not a seed: it was loaded into another layout", difference=difference)
                return
            self._image.rebind(image)
            self._seed.memory_restored(self._version_of_loaded())
        except RforkError as error:
            log.warning("not a seed: what was loaded cannot be given", reason=str(error))
        except Exception:  # a bug here is no reason not to serve what is loaded
            log.exception("not a seed: what was loaded cannot be given")
        else:
            self.can_serve = True

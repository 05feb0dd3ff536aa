"""One rank of an engine's model as it is given to others, and what the engine tells of it.

Runs on the source, in the process of the engine that holds the model. The engine's room calls the instance
around the engine's work, and where its weights change, go away, or come back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import nn

from rfork.engines.hidden_state import HiddenState
from rfork.errors import LayoutMismatch, RforkError
from rfork.image.capture import capture
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.receiver.report import ForkReport
from rfork.source.image_state import VersionOf
from rfork.source.seed import Seed

log = logger(__name__)

ATTRIBUTE = "rfork_instance"
"""Of the model: its instance."""


@dataclass(frozen=True, eq=False, slots=True)
class _Update:
    """An update in place that succeeded: its number, and the version of its weights where that is known."""

    count: int
    version: str | None


class ServedModel:
    """What the engine's room tells of its model; thread-safe. Once it is closed, a call does nothing."""

    def __init__(
        self,
        module: nn.Module,
        seed: Seed,
        report: ForkReport,
        traits: HiddenState,
        exclude: Sequence[str] = (),
    ) -> None:
        """`seed` gives the image of `module`, or of a part of its tensors: without what `exclude` names."""
        self.seed = seed
        self.report = report
        self._module = module
        self._traits = traits
        self._exclude = exclude
        self._renewing = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        self._updates = 0
        self._update = 0
        """Number of the latest update that began here."""
        self._unversioned_update: _Update | None = None
        """The latest update whose weights have not got their version yet."""

    def serving(self) -> AbstractContextManager[object]:
        """Around each step of the engine's own work: who reads is held back as far as it takes longer."""
        return self.seed.measure_step()

    @contextlib.contextmanager
    def updating(self, version: str | None = None) -> Iterator[None]:
        """Around a change of weights in place: nobody reads them meanwhile, and they are given after it.

        `version` names the new weights, where it is known. When the block raises, the weights may be
        anything: nothing is given until the next change.
        """
        self.begin_update()
        yield
        self.renew(updated=True, version=version)

    def begin_update(self) -> None:
        """Fence before other weights are written, and count the update, whether it succeeds or not."""
        self.count_update()
        self._update = self._updates
        self.fence()

    def count_update(self) -> None:
        """Count an update that began on other ranks of the replica at least.

        The engine sends each request to all ranks. So an update has one number on all of them, and that names
        the new weights where nothing else does.
        """
        self._updates += 1

    def fence(self) -> None:
        """The weights are about to change: give nothing from now on. Returns once nobody reads them."""
        self._detach(self.seed.fence)

    def suspend(self) -> None:
        """The memory of the weights is about to be released or moved; `renew` takes it on again.

        Returns once nobody reads it and no device has it registered: digesting it is seen to its end first.
        """
        self._detach(self.seed.suspend)

    def renew(self, *, updated: bool = False, version: str | None = None) -> None:
        """The weights are whole again, maybe others, maybe elsewhere: digest and give them, in a thread.

        `updated`: they are others than before, of `version` where that is known; each update begins with
        `begin_update`. A `version` that the weights had before is theirs still.
        Fence or suspend before the change. Where another one is begun meanwhile, this one gives nothing: the
        next `renew` does.
        """
        if self._closed:
            return
        if self.seed.manifest is not None:
            self.fence()  # the caller forgot to: what is given is not what was told
        if updated:
            self._unversioned_update = _Update(self._update, version)
        arguments = (self.seed.generation,)
        threading.Thread(target=self._renew, args=arguments, name="rfork-renew", daemon=True).start()

    def recapture(self) -> Image:
        """The tensors that are given, as the model has them now; what was hung on it since is left out.

        Raises LayoutMismatch where one is gone or another, and UnsupportedTensor.
        """
        served_layout = self.seed.image.layout
        image = capture(self._module, exclude=self._exclude, like=served_layout)
        if difference := served_layout.first_difference(image.layout):
            raise LayoutMismatch(difference)
        return image

    def close(self, drain_s: float | None = None) -> None:
        """Give no more, after the readers there are had `drain_s` seconds (none: the setting) to finish."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self.seed.close(self.seed.settings.drain_timeout_s if drain_s is None else drain_s)

    def _version_of(self) -> VersionOf | None:
        """Return what names the weights that are served next; None where they are those of before.

        An update whose weights changed again before they were digested is followed by another call.
        """
        update = self._unversioned_update
        if update is None:
            return None
        kept = update.version is not None and update.version == self.seed.version
        choose = self.seed.version_after_update(update.version, update.count)

        def chosen(manifest: Manifest) -> str | None:
            if self._unversioned_update is update:
                self._unversioned_update = None
            return update.version if kept else choose(manifest)

        return chosen

    def _detach(self, how: Callable[[], None]) -> None:
        """The engine does its work, whatever an exporter says: the weights are only not given then."""
        if self._closed:
            return
        try:
            how()
        except Exception:
            log.exception("not a seed until the weights are whole again: they were not let go of in order")
            if self.seed.manifest is not None:  # it did not come to it
                self._stop_serving()

    def _stop_serving(self) -> None:
        try:
            self.close(0.0)
        except Exception:
            log.exception("not closed in order")

    def _renew(self, generation: int) -> None:
        with self._renewing:
            try:
                if generation != self.seed.generation:
                    return  # the weights change again by now
                self._traits.save()
                self.seed.resume(self.recapture(), generation, self._version_of())
            except LayoutMismatch as error:
                self.fence()
                log.error("not a seed any more: the engine put other tensors into the model", because=str(error))
            except RforkError as error:
                log.error("not a seed any more", because=str(error), hint=error.hint)
            except Exception:  # the engine serves on, whatever becomes of its seed
                self.fence()
                log.exception("not a seed any more")


def served_model(module: nn.Module | None) -> ServedModel | None:
    """The instance of a model that `load_or_fork` made; None of any other."""
    found = vars(module).get(ATTRIBUTE) if module is not None else None
    return found if isinstance(found, ServedModel) else None

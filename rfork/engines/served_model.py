"""One rank of an engine's model while it is served to other instances.

Runs on the source, in the engine's process. The engine package calls ServedModel around the engine's steps,
and when weights change, are released, or return.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from rfork.cuda.device import current_work
from rfork.engines.hidden_state import HiddenState
from rfork.engines.update_agreement import UpdateAgreement
from rfork.errors import LayoutMismatch, RforkError
from rfork.image.capture import recapture
from rfork.image.layout import Manifest
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.receiver.report import ForkReport
from rfork.source.seed import Seed
from rfork.source.served_image import VersionOf
from rfork.weights_version import is_single

log = logger(__name__)

ATTRIBUTE = "rfork_instance"
"""Attribute of the model that refers to its ServedModel."""


WRAPPERS = ("base_layer",)
"""Attributes of an engine's LoRA layers that refer to the layers they wrap (vLLM, SGLang)."""


@dataclass(frozen=True, eq=False, slots=True)
class _Update:
    """A successful in-place update: its number, and the version of its weights if known."""

    count: int
    version: str | None


class ServedModel:
    """Receives notifications from the engine package about its model. Thread-safe. After `close`, calls do nothing."""

    def __init__(
        self,
        module: nn.Module,
        seed: Seed,
        report: ForkReport,
        hidden_state: HiddenState,
        exclude: Sequence[str] = (),
        agreement: UpdateAgreement | None = None,
    ) -> None:
        """`seed` serves the image of `module`, without the tensors matching `exclude`.

        `agreement` is that of a rank of several; without one, its updates are not served unless they have a version.
        """
        self.seed = seed
        self.steps = seed.track_steps()
        """Steps of the engine's own work: readers are throttled while they become slower."""
        self.report = report
        self._module = module
        self._hidden_state = hidden_state
        self._exclude = exclude
        self._agreement = agreement
        self._renewing = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False
        self._gpus = seed.image.gpus
        self._updates = 0
        self._update = 0
        """Number of the latest update that began on this rank."""
        self._unversioned_update: _Update | None = None
        """The latest update whose weights have no version yet."""

    def begin_update(self) -> None:
        """Fence before the weights are overwritten, and count the update whether it succeeds or not."""
        self.count_update()
        self._update = self._updates
        self.fence()

    def count_update(self) -> None:
        """Count an update that has begun, at least on other ranks of the replica.

        The engine sends each request to all ranks. So an update has the same number on all of them, and that
        number identifies the new weights when no version does.
        """
        self._updates += 1

    def fence(self) -> None:
        """Stop serving because the weights are about to change. Returns after the last read has ended."""
        self._detach(self.seed.fence)

    def suspend(self) -> None:
        """Stop serving because the memory of the weights is about to be released or moved. `renew` resumes.

        Returns after the last read has ended and no device has the memory registered. A running digest
        computation is finished first.
        """
        self._detach(self.seed.suspend)

    def renew(self, *, updated: bool = False, version: str | None = None) -> None:
        """Digest the weights on another thread and serve them; they may have changed or moved.

        `updated`: the weights have changed, to `version` if it is known; each update begins with
        `begin_update`. An unchanged `version` is kept. Call `fence` or `suspend` before the change. If
        another change begins meanwhile, this call serves nothing; the next `renew` does.
        """
        if self._closed:
            return
        if self.seed.manifest is not None:
            self.fence()  # the caller did not fence: the served bytes no longer match the manifest
        if updated:
            self._unversioned_update = _Update(self._update, version)
        # Kernels on the engine's stream may still write the weights, and the other thread has another stream.
        arguments = (self.seed.generation, current_work(self._gpus))
        threading.Thread(target=self._renew, args=arguments, name="rfork-renew", daemon=True).start()

    def recapture(self) -> Image:
        """Return an image of the served tensors where they are now, without tensors attached to the model since.

        Layers may have been wrapped for LoRA since. Raises LayoutMismatch if a tensor is missing or has changed,
        and UnsupportedTensor.
        """
        return recapture(self._module, self.seed.image.layout, exclude=self._exclude, wrappers=WRAPPERS)

    def close(self, drain_s: float | None = None) -> None:
        """Stop serving. Current readers have `drain_s` seconds to finish (default: the setting `drain_timeout_s`)."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self.seed.close(self.seed.settings.drain_timeout_s if drain_s is None else drain_s)

    def _version_of(self) -> VersionOf | None:
        """Return a function that names the version of the next served weights; None if they are unchanged.

        If the weights change again before they are digested, the function is created again by the next call.
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

    def _is_agreed(self, generation: int) -> bool:
        """Return True if the weights may be served: all ranks have completed the update, or it has a version.

        Waits for the other ranks. Weights of a version are served without them: that version stands for the same
        weights of this rank on any replica.
        """
        update = self._unversioned_update
        if update is None or update.version is not None or is_single(self.seed.identity.rank):
            return True
        if self._agreement is None:
            log.error(
                "not seeding until the next weight update: the ranks of this replica cannot agree on an update",
                update=update.count,
                hint="state the version of the weights in the update",
            )
            return False
        return self._agreement.reach(update.count, lambda: self._closed or generation != self.seed.generation)

    def _detach(self, stop: Callable[[], None]) -> None:
        """Run `stop`. Failures must not stop the engine; the weights are then not served."""
        if self._closed:
            return
        try:
            stop()
        except Exception:
            log.exception("failed to stop serving cleanly, not seeding until the weights are complete again")
            if self.seed.manifest is not None:  # serving has not stopped
                self._stop_serving()

    def _stop_serving(self) -> None:
        try:
            self.close(0.0)
        except Exception:
            log.exception("failed to close the seed")

    def _renew(self, generation: int, finish_engine_work: Callable[[], None]) -> None:
        with self._renewing:
            try:
                if generation != self.seed.generation:
                    return  # the weights are changing again
                if not self._is_agreed(generation):
                    return
                finish_engine_work()
                self._hidden_state.save()
                self.seed.resume(self.recapture(), generation, self._version_of())
            except LayoutMismatch as error:
                self.fence()
                log.error("no longer seeding: the engine replaced tensors of the model", reason=str(error))
            except RforkError as error:
                log.error("no longer seeding", reason=str(error), hint=error.hint)
            except Exception:  # the engine must keep serving whatever happens to its seed
                self.fence()
                log.exception("no longer seeding")


def served_model(module: nn.Module | None) -> ServedModel | None:
    """Return the ServedModel of a model that `load_or_fork` created; None for any other model."""
    found = vars(module).get(ATTRIBUTE) if module is not None else None
    return found if isinstance(found, ServedModel) else None

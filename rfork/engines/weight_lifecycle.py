"""State of one served model in an engine's process, which decides when its weights may be served."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from weakref import WeakSet

import torch
from torch import nn

from rfork.engines.served_model import ServedModel
from rfork.logs import logger

log = logger(__name__)

ATTRIBUTE = "rfork_lifecycle"
"""Attribute of the model that refers to its WeightLifecycle."""

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]

_attached: WeakSet[WeightLifecycle] = WeakSet()
"""Lifecycles of the models of this process."""


class WeightLifecycle:
    """Tracks changes to the weights. Called on the only thread of the engine's process."""

    def __init__(self, served: ServedModel, shares_with: WeightLifecycle | None = None) -> None:
        """`shares_with`: the main model of a draft that has some of its tensors, which its updates write, too."""
        self.served = served
        self._shares_with = shares_with
        self._lost = False
        """True while the weights are undefined, until a complete update."""
        self._updated = False
        """True if the weights have changed since they were last served."""
        self._version: str | None = None
        """Version of the changed weights, if known."""
        self._failed = False
        """True if a part of the update has failed."""
        self._broken = False
        self.asleep = False
        """True while the weights' memory is released."""
        self._update_depth = 0

    @contextlib.contextmanager
    def updating(self, version: Callable[[], str | None] = lambda: None) -> Iterator[None]:
        """Wrap an in-place change of the weights. After nested changes, weights are served at the outermost end.

        `version` returns the version of the new weights after the change. If the block raises, the weights
        are undefined.
        """
        self.begin_update()
        try:
            yield
        except BaseException:
            self.fail_update()
            raise
        self.end_update(version())

    def begin_update(self) -> None:
        """Stop serving before the weights change. Returns after the last read has ended."""
        self._update_depth += 1
        if self._update_depth == 1:
            self._failed = False
        self._call_served(self.served.begin_update)
        if self._shares_with is not None:
            self._shares_with.begin_update()

    def end_update(self, version: str | None = None) -> None:
        """Serve the updated, complete weights, of `version` if known, unless a part of the update has failed."""
        self._update_depth = max(self._update_depth - 1, 0)
        if self._update_depth == 0 and not self._failed:
            self._lost = False
            self._updated, self._version = True, version
            self._publish()
        if self._shares_with is not None:
            self._shares_with._end_shared_update()

    def _end_shared_update(self) -> None:
        """Serve the weights after an update of a model that shares tensors with this one. Their version is unknown."""
        self._update_depth = max(self._update_depth - 1, 0)
        if self._update_depth == 0 and not self._failed:
            self._updated, self._version = True, None
            self._publish()

    def fail_update(self) -> None:
        """End an update that has failed after it had changed weights: they are undefined."""
        self._update_depth = max(self._update_depth - 1, 0)
        if self._shares_with is not None:
            self._shares_with._update_depth = max(self._shares_with._update_depth - 1, 0)
        self.fail_step()

    def fail_step(self) -> None:
        """Record that a part of an update has failed after it had changed weights. The update itself continues."""
        if not self._lost:
            log.error("not seeding until the next weight update: the last one failed after it had changed weights")
        self._lost = self._failed = True
        if self._shares_with is not None:
            self._shares_with.fail_step()

    def cancel_update(self) -> None:
        """End an update that has changed nothing: serve the previous weights, if they were served."""
        self._update_depth = max(self._update_depth - 1, 0)
        self._publish()
        if self._shares_with is not None:
            self._shares_with.cancel_update()

    def abandon_updates(self) -> None:
        """Forget updates that have begun and will never end."""
        if self._shares_with is not None:
            self._shares_with._update_depth = max(self._shares_with._update_depth - self._update_depth, 0)
        self._update_depth = 0

    def mark_lost(self) -> None:
        """Stop serving until a complete update: the weights are about to be overwritten."""
        self._lost = True
        self._call_served(self.served.fence)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Wrap a call of the model's own `load_weights`, which may receive only some of the weights.

        Outside an update nothing marks the last call, so the weights count as undefined.
        """
        if self._update_depth == 0:
            if not self._lost:
                log.warning("not seeding until the next complete weight update: only a part of the weights was loaded")
            self.mark_lost()
            if self._shares_with is not None:
                self._shares_with.mark_lost()
        yield

    @contextlib.contextmanager
    def sleeping(self, kept: bool) -> Iterator[None]:
        """Wrap the release of the weights' memory. `kept`: their content will be restored.

        If the block raises, the weights may or may not be present; they are served again after waking up.
        """
        self.sleep(kept)
        try:
            yield
        except BaseException:
            log.warning("not seeding until the weights wake up: the engine failed to put them to sleep")
            raise

    def sleep(self, kept: bool) -> None:
        """Stop serving before the memory is released. `kept`: the content will be restored."""
        self.asleep = True
        self._lost = self._lost or not kept
        self._call_served(self.served.suspend)

    @contextlib.contextmanager
    def waking(self) -> Iterator[None]:
        """Wrap the restoration of the memory, with its content. If the block raises, the weights stay asleep."""
        try:
            yield
        except BaseException:
            log.warning("not seeding: the engine failed to wake up its weights")
            raise
        self.wake()

    def wake(self, kept: bool = True) -> None:
        """Serve the weights again: their memory is back. Without `kept`, only after the next update."""
        self.asleep = False
        if not kept:
            self._lost = True
            log.info("not seeding until the next weight update: the engine released the weights without a backup")
        self._publish()

    def _publish(self) -> None:
        if self._lost or self._broken or self.asleep or self._update_depth:
            return
        renew = functools.partial(self.served.renew, updated=self._updated, version=self._version)
        self._updated, self._version = False, None
        self._call_served(renew)

    def _call_served(self, call: Callable[[], None]) -> None:
        """Call the served model. The engine must proceed whatever happens to its seed."""
        try:
            if not self._broken:
                call()
        except Exception:
            log.exception("no longer seeding: failed to update the seed's state")
            self.stop()

    def stop(self) -> None:
        """Stop serving for good: the state of the weights is unknown."""
        self._broken = True
        self._end()

    def _end(self) -> None:
        try:
            self.served.close(0.0)
        except Exception:
            log.exception("failed to close the seed")


def attach_lifecycle(
    module: nn.Module,
    served: ServedModel,
    *,
    observe_loads: bool = False,
    shares_with: WeightLifecycle | None = None,
) -> WeightLifecycle:
    """Attach a lifecycle to a model. `observe_loads`: detect every call of its `load_weights` from then on.

    vLLM users make these calls from their own extensions (in reinforcement learning, for example), where no
    worker method is involved. `shares_with` is as for WeightLifecycle.
    """
    lifecycle = WeightLifecycle(served, shares_with)
    _attached.add(lifecycle)
    setattr(module, ATTRIBUTE, lifecycle)
    load: LoadWeights | None = getattr(module, "load_weights", None) if observe_loads else None
    if load is not None:
        vars(module)["load_weights"] = functools.wraps(load)(functools.partial(_observe_load, lifecycle, load))
    return lifecycle


def lifecycle_of(module: nn.Module | None) -> WeightLifecycle | None:
    """Return the lifecycle of a model managed by rfork; None for any other model."""
    found = vars(module).get(ATTRIBUTE) if module is not None else None
    return found if isinstance(found, WeightLifecycle) else None


def stop_seeding() -> None:
    """Stop serving all models of this process: a change of their weights may have been missed."""
    for lifecycle in list(_attached):
        lifecycle.stop()


def close_seeds(max_drain_s: float) -> None:
    """Stop serving all models of this process. Readers have at most `max_drain_s` seconds to finish."""
    for lifecycle in list(_attached):
        try:
            lifecycle.served.close(min(lifecycle.served.seed.settings.drain_timeout_s, max_drain_s))
        except Exception:
            log.exception("failed to close the seed")


def _observe_load(
    lifecycle: WeightLifecycle,
    load: LoadWeights,
    weights: Iterable[tuple[str, torch.Tensor]],
    *args: object,
    **kwargs: object,
) -> object:
    with lifecycle.loading():
        return load(weights, *args, **kwargs)

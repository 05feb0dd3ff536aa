"""One model's instance while a worker of vLLM's works with it: when its weights may be given."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn

from rfork.engines.served_model import ServedModel
from rfork.logs import logger

log = logger(__name__)

ATTRIBUTE = "rfork_care"
"""Of the model."""

WORKER_DRAIN_S = 4.0
"""What a worker may take to end is five seconds (VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS)."""

LoadWeights = Callable[[Iterable[tuple[str, torch.Tensor]]], object]


class WeightLifecycle:
    """Called on the worker's one thread, around what it does to the weights."""

    def __init__(self, instance: ServedModel) -> None:
        self.instance = instance
        self._lost = False
        """Whether the weights may be anything, until they are updated as a whole."""
        self._updated = False
        """Whether the weights were changed since they were served last."""
        self._version: str | None = None
        """Of the changed weights, where it is known."""
        self._broken = False
        self._asleep = False
        self._update_depth = 0

    @contextlib.contextmanager
    def updating(self, version: Callable[[], str | None] = lambda: None) -> Iterator[None]:
        """Around a change of weights in place; of several, one inside the other, the outermost counts.

        `version` names the new weights once they are there. When the block raises, the weights may be
        anything.
        """
        self.begin_update()
        try:
            yield
        except BaseException:
            self.fail_update()
            raise
        self.end_update(version())

    def begin_update(self) -> None:
        """The weights are about to change. Returns once nobody reads them."""
        self._update_depth += 1
        if self._update_depth == 1:
            self._call_instance(self.instance.begin_update)

    def end_update(self, version: str | None = None) -> None:
        """They are whole, and of this version where it is known."""
        self._update_depth = max(self._update_depth - 1, 0)
        if self._update_depth == 0:
            self._lost = False
            self._updated, self._version = True, version
            self._publish()

    def fail_update(self) -> None:
        """They may be anything."""
        self._update_depth = max(self._update_depth - 1, 0)
        self._lost = True

    def mark_lost(self) -> None:
        """The weights are about to be overwritten with something else, until they are updated as a whole."""
        self._lost = True
        self._call_instance(self.instance.fence)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Around a call of the model's own loader, which need not be given all of the weights.

        Outside an update nobody says which call is the last one, so the weights count as lost.
        """
        if self._update_depth == 0:
            if not self._lost:
                log.warning("not a seed until a whole update: weights were loaded piece by piece")
            self.mark_lost()
        yield

    @contextlib.contextmanager
    def sleeping(self, kept: bool) -> Iterator[None]:
        """Around the release of their memory; `kept` says whether they come back as they are.

        When the block raises, nobody knows whether they are there: they are given once they are awake.
        """
        self.sleep(kept)
        try:
            yield
        except BaseException:
            log.warning("not a seed until it is woken: vLLM could not put its weights to sleep")
            raise

    def sleep(self, kept: bool) -> None:
        """Their memory is about to be released; `kept` says whether they come back as they are."""
        self._asleep = True
        self._lost = self._lost or not kept
        self._call_instance(self.instance.suspend)

    @contextlib.contextmanager
    def waking(self) -> Iterator[None]:
        """Around their memory's return. When the block raises, they sleep on."""
        try:
            yield
        except BaseException:
            log.warning("not a seed: vLLM could not wake its weights")
            raise
        self.wake()

    def wake(self) -> None:
        """Their memory is back."""
        self._asleep = False
        self._publish()

    def close(self) -> None:
        """The worker ends. Who has a name was seen off by whoever gave it one; see `front`."""
        settings = self.instance.seed.settings
        self.instance.close(min(settings.drain_timeout_s, WORKER_DRAIN_S) if settings.replica is None else 0.0)

    def _publish(self) -> None:
        if self._lost or self._broken or self._asleep or self._update_depth:
            return
        updated, self._updated = self._updated, False
        self._call_instance(functools.partial(self.instance.renew, updated=updated, version=self._version))

    def _call_instance(self, what: Callable[[], None]) -> None:
        """The engine does what it was asked, whatever becomes of its seed."""
        try:
            if not self._broken:
                what()
        except Exception:
            self._broken = True
            log.exception("not a seed any more: it could not be told what becomes of the weights")
            self._end()

    def _end(self) -> None:
        try:
            self.instance.close(0.0)
        except Exception:
            log.exception("the seed did not close")


def attach_lifecycle(module: nn.Module, instance: ServedModel) -> WeightLifecycle:
    """Hang an instance's care on its model, and notice whoever loads weights into the model from then on.

    vLLM's users do so from extensions of their own (in reinforcement learning, say), where no worker's method
    is called.
    """
    care = WeightLifecycle(instance)
    setattr(module, ATTRIBUTE, care)
    load: LoadWeights | None = getattr(module, "load_weights", None)
    if load is not None:
        vars(module)["load_weights"] = functools.wraps(load)(functools.partial(_observe_load, care, load))
    return care


def lifecycle_of(module: nn.Module | None) -> WeightLifecycle | None:
    """The care of a model that rfork looks after; None of any other."""
    found = vars(module).get(ATTRIBUTE) if module is not None else None
    return found if isinstance(found, WeightLifecycle) else None


def _observe_load(
    care: WeightLifecycle,
    load: LoadWeights,
    weights: Iterable[tuple[str, torch.Tensor]],
    *rest: object,
    **named: object,
) -> object:
    with care.loading():
        return load(weights, *rest, **named)

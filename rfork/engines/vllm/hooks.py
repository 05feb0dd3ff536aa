"""Worker hooks that notify the served model when vLLM runs a step, changes weights, or puts them to sleep.

Runs in a worker. Methods of the worker class are wrapped once rfork has loaded a model. vLLM's own extension
points are not enough: a worker extension class may not override a method, and a custom worker class would
have to be passed in addition to the load format.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterator
from typing import Any, Final, Protocol, cast

import torch
from torch import nn

from rfork.engines.hook_targets import patch_method
from rfork.engines.identity import version_of_reload
from rfork.engines.vllm.compat import loads_from
from rfork.engines.vllm.draft_tensors import check_shared
from rfork.engines.vllm.worker_steps import DeviceTimer, WorkerSteps
from rfork.engines.weight_lifecycle import WeightLifecycle, lifecycle_of, stop_seeding

STEPS_ATTRIBUTE: Final = "rfork_steps"
"""Attribute of a worker: its WorkerSteps, or None if its model has no lifecycle. Set by its first step."""

UPDATED_ATTRIBUTE: Final = "rfork_updated"
"""Attribute of a worker during an update: the lifecycle of the model that it changes, or None."""

MEASURED: Final = frozenset({"execute_model", "sample_tokens"})
"""Methods whose wrappers only measure."""

CHECK_SHARED: Final = "initialize_from_config"
"""Method that vLLM calls once, between loading the models and serving."""

WORKER_DRAIN_S: Final = 4.0
"""A worker has five seconds to exit (VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS)."""


class Worker(Protocol):
    """The part of vLLM's worker that is used here."""

    model_config: Any
    """vLLM's configuration of the served model."""
    device: torch.device | None
    """Device of the worker, once initialized."""

    def get_model(self) -> nn.Module:
        """Return the served model."""
        ...

    def get_draft_model(self) -> nn.Module | None:
        """Return the speculative draft model."""
        ...


Method = Callable[..., object]


def install(worker_class: type) -> None:
    """Wrap the methods of vLLM's worker class that it has. Idempotent.

    `compat.decide` determines what a missing method means.
    """
    for name, wrapper in WRAPPERS.items():
        if not hasattr(worker_class, name):
            continue
        # Without measured steps the weights may still be served; without any other wrapper they may not.
        patch_method(
            worker_class,
            name,
            wrapper,
            on_failure=stop_seeding if name not in MEASURED else None,
            may_refuse=name == CHECK_SHARED,
        )


def _lifecycles(worker: Worker) -> list[WeightLifecycle]:
    """Return the lifecycles of the model and its draft; empty before they are loaded."""
    if getattr(worker, "model_runner", None) is None:
        return []
    found: list[WeightLifecycle] = []
    for get in (worker.get_model, worker.get_draft_model):
        with contextlib.suppress(AttributeError):  # a runner without a model, or one that never has a draft
            if (lifecycle := lifecycle_of(get())) is not None:
                found.append(lifecycle)
    return found


def _check_shared(method: Method, worker: Worker, *args: object, **kwargs: object) -> object:
    """Check that a draft has the tensors that it shares with its main model. Raises EngineMismatch."""
    draft: nn.Module | None = None
    with contextlib.suppress(AttributeError):  # a runner that never has a draft
        draft = worker.get_draft_model()
    as_expected = draft is None or check_shared(draft, worker.get_model())
    if not as_expected and (lifecycle := lifecycle_of(draft)) is not None:
        lifecycle.stop()
    return method(worker, *args, **kwargs)


def _execute_model(method: Method, worker: Worker, *args: object, **kwargs: object) -> object:
    """Measure the first part of a step. vLLM calls `sample_tokens` next if the result is None."""
    state = vars(worker)
    if STEPS_ATTRIBUTE not in state:
        state[STEPS_ATTRIBUTE] = _steps_of(worker)
    steps: WorkerSteps | None = state[STEPS_ATTRIBUTE]
    if steps is None:
        return method(worker, *args, **kwargs)
    with steps.launching(begins=True):
        output = method(worker, *args, **kwargs)
    if output is not None:
        steps.on_executed(output)
    return output


def _sample_tokens(method: Method, worker: Worker, *args: object, **kwargs: object) -> object:
    steps: WorkerSteps | None = vars(worker).get(STEPS_ATTRIBUTE)
    if steps is None:
        return method(worker, *args, **kwargs)
    with steps.launching():
        output = method(worker, *args, **kwargs)
    steps.on_sampled(output)
    return output


def _steps_of(worker: Worker) -> WorkerSteps | None:
    lifecycle = _main_lifecycle(worker)
    if lifecycle is None:
        return None
    on_gpu = worker.device is not None and worker.device.type == "cuda"
    return WorkerSteps(lifecycle.served, DeviceTimer() if on_gpu else None)


def _sleep(method: Method, worker: Worker, *args: object, **kwargs: object) -> object:
    with _sleeping(worker, kept=_argument(args, kwargs, "level", 1) == 1):
        return method(worker, *args, **kwargs)


def _wake_up(method: Method, worker: Worker, *args: object, **kwargs: object) -> object:
    with contextlib.ExitStack() as stack:
        if _has_weights(_argument(args, kwargs, "tags", None)):
            for lifecycle in _lifecycles(worker):
                stack.enter_context(lifecycle.waking())
        return method(worker, *args, **kwargs)


def _discard(method: Method, worker: Worker, *args: object, **kwargs: object) -> object:
    discards = _has_weights(_argument(args, kwargs, "tags", None))
    with _sleeping(worker, kept=False) if discards else contextlib.nullcontext():
        return method(worker, *args, **kwargs)


def _argument(args: tuple[object, ...], kwargs: dict[str, object], name: str, default: object) -> object:
    """Return the value of a method's first parameter."""
    return args[0] if args else kwargs.get(name, default)


def _has_weights(tags: object) -> bool:
    """Return True if a request with these tags concerns the weights; without tags it concerns all memory."""
    return tags is None or "weights" in cast(Container[object], tags)


@contextlib.contextmanager
def _sleeping(worker: Worker, kept: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for lifecycle in _lifecycles(worker):
            stack.enter_context(lifecycle.sleeping(kept))
        yield


def _reset(method: Method, worker: Worker, *args: object, **kwargs: object) -> object:
    if (lifecycle := _main_lifecycle(worker)) is not None:
        lifecycle.mark_lost()
    return method(worker, *args, **kwargs)


def _reload(method: Method, worker: Worker, *args: Any, **kwargs: Any) -> object:
    """Wrap an update of the model (not its draft) from files, or from tensors of the caller."""
    lifecycle = _main_lifecycle(worker)
    if lifecycle is None:
        return method(worker, *args, **kwargs)
    with lifecycle.updating(_version_of_reload(worker, *args, **kwargs)):
        return method(worker, *args, **kwargs)


def _version_of_reload(
    worker: Worker,
    weights_iterator: object = None,
    weights_path: str | None = None,
    *_: object,
    **__: object,
) -> Callable[[], str | None]:
    """Return a function that names the weights after a call of ``reload_weights`` with these arguments."""
    if weights_iterator is not None:
        return lambda: None
    if weights_path is not None:
        return version_of_reload(weights_path)
    return version_of_reload(*loads_from(worker.model_config))


def _start(method: Method, worker: Worker, *args: object, **kwargs: object) -> object:
    return _begin(method, worker, _main_lifecycle(worker), *args, **kwargs)


def _start_draft(method: Method, worker: Worker, *args: object, **kwargs: object) -> object:
    # A draft that is not served may share tensors with its main model.
    lifecycle = lifecycle_of(worker.get_draft_model()) or _main_lifecycle(worker)
    return _begin(method, worker, lifecycle, *args, **kwargs)


def _begin(
    method: Method, worker: Worker, lifecycle: WeightLifecycle | None, *args: object, **kwargs: object
) -> object:
    if _is_updating(worker):
        if lifecycle is not None:
            lifecycle.served.count_update()  # on ranks where the previous update failed, this one begins
        return method(worker, *args, **kwargs)  # vLLM raises here
    if lifecycle is not None:
        lifecycle.begin_update()
    try:
        result = method(worker, *args, **kwargs)
    except BaseException:
        if lifecycle is not None:
            lifecycle.fail_update()
        raise
    vars(worker)[UPDATED_ATTRIBUTE] = lifecycle
    return result


def _update(method: Method, worker: Worker, *args: object, **kwargs: object) -> object:
    active = _is_updating(worker)
    try:
        return method(worker, *args, **kwargs)
    except BaseException:
        if (lifecycle := _end_update(worker)) is not None and active:
            lifecycle.fail_update()
        raise


def _finish(method: Method, worker: Worker, *args: object, **kwargs: object) -> object:
    active = _is_updating(worker)
    try:
        result = method(worker, *args, **kwargs)
    except BaseException:
        if (lifecycle := _end_update(worker)) is not None and active:
            lifecycle.fail_update()
        raise
    if (lifecycle := _end_update(worker)) is not None and active:
        lifecycle.end_update()
    return result


def _shutdown(method: Method, worker: Worker, *args: object, **kwargs: object) -> object:
    for lifecycle in _lifecycles(worker):
        settings = lifecycle.served.seed.settings
        # A named replica was already drained by `engine_manager`.
        lifecycle.served.close(min(settings.drain_timeout_s, WORKER_DRAIN_S) if settings.replica is None else 0.0)
    return method(worker, *args, **kwargs)


def _is_updating(worker: Worker) -> bool:
    """Return True if vLLM has begun an update that has not ended."""
    return bool(getattr(worker, "_weight_update_active", UPDATED_ATTRIBUTE in vars(worker)))


def _main_lifecycle(worker: Worker) -> WeightLifecycle | None:
    return lifecycle_of(worker.get_model())


def _end_update(worker: Worker) -> WeightLifecycle | None:
    """Forget the update that has begun. Returns the lifecycle of its model; None if rfork does not manage it."""
    lifecycle: WeightLifecycle | None = vars(worker).pop(UPDATED_ATTRIBUTE, None)
    return lifecycle


WRAPPERS: Final[dict[str, Method]] = {
    CHECK_SHARED: _check_shared,
    "execute_model": _execute_model,
    "sample_tokens": _sample_tokens,
    "sleep": _sleep,
    "wake_up": _wake_up,
    "discard": _discard,
    "reset_weights": _reset,
    "reload_weights": _reload,
    "start_weight_update": _start,
    "start_draft_weight_update": _start_draft,
    "update_weights": _update,
    "finish_weight_update": _finish,
    "shutdown": _shutdown,
}

"""Where vLLM's worker works with its weights, changes them, or puts them away: what the seed is told.

Runs in a worker: methods of its class are wrapped once a model is loaded by rfork. vLLM's own extension
points do not reach so far: a worker extension class may not override a method, and a worker class of one's
own would have to be named beside the load format.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final, Protocol

from torch import nn

from rfork.engines.monkeypatch import patch_method
from rfork.engines.version_selection import version_of_reload
from rfork.engines.vllm.compat import loads_from
from rfork.engines.vllm.weight_lifecycle import WeightLifecycle, lifecycle_of

TARGET: Final = "rfork_target"
"""Of a worker: the care of its model, once it has worked."""


class Worker(Protocol):
    """What is used of vLLM's worker."""

    model_config: Any
    """Of the model that it serves: vLLM's."""

    def get_model(self) -> nn.Module:
        """The model that it serves."""
        ...

    def get_draft_model(self) -> nn.Module | None:
        """The speculative draft."""
        ...


Method = Callable[..., object]


def install(worker_class: type) -> None:
    """Wrap the methods of vLLM's worker class. Again is harmless."""
    for name, wrapper in WRAPPERS.items():
        patch_method(worker_class, name, wrapper)


def _lifecycles(worker: Worker) -> list[WeightLifecycle]:
    """Of the model and its draft; none before they are loaded."""
    if getattr(worker, "model_runner", None) is None:
        return []
    found: list[WeightLifecycle] = []
    for get in (worker.get_model, worker.get_draft_model):
        with contextlib.suppress(AttributeError):  # of a runner that has no model, or never has a draft
            if (care := lifecycle_of(get())) is not None:
                found.append(care)
    return found


def _execute_model(method: Method, worker: Worker, *args: object, **named: object) -> object:
    state = vars(worker)
    try:
        care = state[TARGET]
    except KeyError:
        care = state[TARGET] = lifecycle_of(worker.get_model())
    if care is None:
        return method(worker, *args, **named)
    with care.instance.serving():
        return method(worker, *args, **named)


def _sleep(method: Method, worker: Worker, level: int = 1) -> object:
    with _sleeping(worker, kept=level == 1):
        return method(worker, level)


def _wake_up(method: Method, worker: Worker, tags: list[str] | None = None) -> object:
    with contextlib.ExitStack() as stack:
        for care in _lifecycles(worker) if tags is None or "weights" in tags else []:
            stack.enter_context(care.waking())
        return method(worker, tags)


def _discard(method: Method, worker: Worker, tags: tuple[str, ...]) -> object:
    with _sleeping(worker, kept=False) if "weights" in tags else contextlib.nullcontext():
        return method(worker, tags)


@contextlib.contextmanager
def _sleeping(worker: Worker, kept: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for care in _lifecycles(worker):
            stack.enter_context(care.sleeping(kept))
        yield


def _reset(method: Method, worker: Worker) -> object:
    if (care := _main_lifecycle(worker)) is not None:
        care.mark_lost()
    return method(worker)


def _reload(method: Method, worker: Worker, *args: Any, **named: Any) -> object:
    """Update the model (not its draft) from files, or from tensors that the caller has."""
    care = _main_lifecycle(worker)
    if care is None:
        return method(worker, *args, **named)
    with care.updating(_version_of_reload(worker, *args, **named)):
        return method(worker, *args, **named)


def _version_of_reload(
    worker: Worker,
    weights_iterator: object = None,
    weights_path: str | None = None,
    *_: object,
    **__: object,
) -> Callable[[], str | None]:
    """Return what names the weights after a call of ``reload_weights`` with these arguments."""
    if weights_iterator is not None:
        return lambda: None
    if weights_path is not None:
        return version_of_reload(weights_path)
    return version_of_reload(*loads_from(worker.model_config))


def _start(method: Method, worker: Worker) -> object:
    return _begin(method, worker, _main_lifecycle(worker))


def _start_draft(method: Method, worker: Worker) -> object:
    return _begin(method, worker, lifecycle_of(worker.get_draft_model()))


def _begin(method: Method, worker: Worker, care: WeightLifecycle | None) -> object:
    if care is None:
        return method(worker)
    if getattr(worker, "_weight_update_active", False):
        care.instance.count_update()  # on a rank where the update before has failed, this one begins
        return method(worker)  # which raises
    care.begin_update()
    try:
        return method(worker)
    except BaseException:
        care.fail_update()
        raise


def _update(method: Method, worker: Worker, *args: object, **named: object) -> object:
    active, care = getattr(worker, "_weight_update_active", False), _updated(worker)
    try:
        return method(worker, *args, **named)
    except BaseException:
        if active and care is not None:
            care.fail_update()
        raise


def _finish(method: Method, worker: Worker) -> object:
    active, care = getattr(worker, "_weight_update_active", False), _updated(worker)
    if not active or care is None:
        return method(worker)
    try:
        result = method(worker)
    except BaseException:
        care.fail_update()
        raise
    care.end_update()
    return result


def _shutdown(method: Method, worker: Worker) -> object:
    for care in _lifecycles(worker):
        care.close()
    return method(worker)


def _main_lifecycle(worker: Worker) -> WeightLifecycle | None:
    return lifecycle_of(worker.get_model())


def _updated(worker: Worker) -> WeightLifecycle | None:
    """The care of the model that the update under way is of."""
    if getattr(worker, "_weight_update_is_draft", False):
        return lifecycle_of(worker.get_draft_model())
    return _main_lifecycle(worker)


WRAPPERS: Final[dict[str, Method]] = {
    "execute_model": _execute_model,
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

"""Weight cache daemons of the engines, with fake modules in place of the engines."""

from __future__ import annotations

import pickle
import signal
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from rfork.engines import served_model, weight_cache
from rfork.engines.sglang import weight_cache as sglang_cache
from rfork.engines.vllm import weight_cache as vllm_cache
from rfork.engines.weight_lifecycle import attach_lifecycle, lifecycle_of


@pytest.fixture(autouse=True)
def no_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process of the tests is no daemon before and after each test."""
    monkeypatch.setattr(weight_cache, "_holder_id", None)


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> Any:
    """Install a module of an engine, with its parents."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        path = ".".join(parts[:length])
        if length == len(parts) or path not in sys.modules:
            module = ModuleType(path)
            module.__path__ = []
            monkeypatch.setitem(sys.modules, path, module)
    vars(sys.modules[name]).update(content)
    return sys.modules[name]


def test_preload_starts_its_daemons_with_rfork(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function that replaces vLLM's can be sent to a spawned process."""
    module = fake_module(monkeypatch, vllm_cache.DAEMON, _run_daemon=print)
    monkeypatch.setattr(sys, "argv", ["vllm", "preload", "--model", "m"])
    vllm_cache.hook_preload()
    assert vllm_cache.run_daemon is pickle.loads(pickle.dumps(module._run_daemon))


def test_other_commands_of_vllm_are_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of the daemon is not even imported."""
    module = fake_module(monkeypatch, vllm_cache.DAEMON, _run_daemon=print)
    monkeypatch.setattr(sys, "argv", ["vllm", "serve", "m"])
    vllm_cache.hook_preload()
    assert print is module._run_daemon


def test_a_daemon_with_another_load_format_is_vllms(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called with its arguments, and the process is no holder."""
    calls: list[tuple[object, ...]] = []
    fake_module(monkeypatch, vllm_cache.DAEMON, _run_daemon=lambda *args: calls.append(args))
    config = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
    vllm_cache.run_daemon(3, 0, config)
    assert [(3, 0, config)] == calls
    assert None is weight_cache.holder_id()


def test_sglang_starts_its_daemons_with_rfork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooking twice changes nothing more, and the daemon's own function still runs."""
    calls: list[tuple[object, ...]] = []
    module = fake_module(monkeypatch, sglang_cache.DAEMON, run_weight_cache_daemon=lambda *args: calls.append(args))
    fake_module(monkeypatch, "sglang.srt.plugins", load_plugins=lambda: None)
    sglang_cache.hook_launchers()
    sglang_cache.hook_launchers()
    assert sglang_cache.run_daemon is pickle.loads(pickle.dumps(module.run_weight_cache_daemon))
    module.run_weight_cache_daemon("arguments", 1)
    assert [("arguments", 1)] == calls
    assert (weight_cache.holder_id() or "").startswith("sglang-weight-cache-")


class Served(served_model.ServedModel):
    """A served model without a seed."""

    def __init__(self) -> None:
        self.closed: list[float] = []

    def close(self, drain_s: float | None = None) -> None:
        self.closed.append(drain_s if drain_s is not None else -1.0)


@pytest.fixture
def module() -> nn.Module:
    """A model that is served."""
    module = nn.Linear(2, 2)
    served = Served()
    setattr(module, served_model.ATTRIBUTE, served)
    attach_lifecycle(module, served)
    return module


def test_a_release_ends_the_seed_and_its_references(module: nn.Module) -> None:
    """Otherwise the memory would remain allocated."""
    served: Any = served_model.served_model(module)
    weight_cache.release(module)
    assert [0.0] == served.closed
    assert None is served_model.served_model(module)
    assert None is lifecycle_of(module)


def test_a_release_without_a_seed_does_nothing() -> None:
    """A daemon may have loaded its weights without rfork, or released them before."""
    weight_cache.release(None)
    weight_cache.release(nn.Linear(1, 1))


def test_vllms_daemon_stops_serving_before_it_releases(module: nn.Module) -> None:
    """vLLM's handler runs once the seed is closed."""
    served: Any = served_model.served_model(module)
    states: list[list[float]] = []
    daemon: Any = SimpleNamespace(model=module)
    vllm_cache._release(lambda *_: states.append(list(served.closed)), daemon, "connection")
    assert [[0.0]] == states


def test_sigterm_ends_a_daemon_through_its_cleanup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first signal raises SystemExit, the second one is the system's."""
    handlers: dict[int, Any] = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    weight_cache.exit_on_sigterm()
    with pytest.raises(SystemExit) as caught:
        handlers[signal.SIGTERM](signal.SIGTERM, None)
    assert 143 == caught.value.code
    assert signal.SIG_DFL is handlers[signal.SIGTERM]

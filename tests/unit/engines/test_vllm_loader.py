"""vLLM's load format ``rfork`` with versions of vLLM that lack something, tested with fake modules of vLLM."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import nn

from rfork.engines.vllm import compat
from rfork.engines.vllm.compat import VersionDecision
from rfork.errors import ForkFailed

LOADERS = compat.LOADERS
REASON = "vLLM 9.9.9 is incompatible"


@dataclass
class LoadConfig:
    """The part of vLLM's LoadConfig that is used here."""

    load_format: str = "rfork"
    model_loader_extra_config: dict[str, object] = field(default_factory=dict)


class BaseModelLoader:
    """vLLM's base class of loaders."""

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config


class OwnLoader(BaseModelLoader):
    """vLLM's own loader."""

    def load_model(self, **arguments: object) -> nn.Module:
        module = nn.Module()
        vars(module)["loaded"] = (self.load_config, arguments)
        return module


class Builder:
    """The part of `VllmEngine` that the loader calls."""

    rebuild = None

    def load(self) -> str:
        return "loaded by the builder"


@pytest.fixture
def loader_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return `rfork.engines.vllm.loader`, imported with fake modules of vLLM."""
    fakes: dict[str, dict[str, object]] = {
        "vllm": {"__version__": "9.9.9", "envs": SimpleNamespace()},
        "vllm.config": {"replace": replace, **dict.fromkeys(("LoadConfig", "ModelConfig", "VllmConfig"), object)},
        "vllm.model_executor": {},
        LOADERS: {"get_model_loader": OwnLoader},
        f"{LOADERS}.base_loader": {"BaseModelLoader": BaseModelLoader},
    }
    for name, content in fakes.items():
        fake = ModuleType(name)
        vars(fake).update(content, __path__=[])
        monkeypatch.setitem(sys.modules, name, fake)
    name = "rfork.engines.vllm.loader"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    monkeypatch.delitem(sys.modules, name)
    return module


def decide(monkeypatch: pytest.MonkeyPatch, decision: VersionDecision) -> None:
    """Replace the decision on the installed version."""
    monkeypatch.setattr(compat, "decide_installed", lambda version: decision)


def test_an_incompatible_vllm_loads_its_weights_itself(
    loader_module: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own loader gets all arguments, also those that rfork does not know, and not rfork's options."""
    decide(monkeypatch, VersionDecision(no_fork_reason=REASON))
    loader = loader_module.RforkModelLoader(LoadConfig(model_loader_extra_config={"planner": "http://a:1"}))
    module = loader.load_model("config", "model", prefix="draft", strategy="new")
    load_config, arguments = module.loaded
    assert LoadConfig("auto") == load_config
    assert {"vllm_config": "config", "model_config": "model", "prefix": "draft", "strategy": "new"} == arguments
    assert 1 == caplog.text.count(REASON)


def test_a_required_fork_with_an_incompatible_vllm_is_an_error(
    loader_module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the reason."""
    decide(monkeypatch, VersionDecision(no_fork_reason=REASON))
    loader = loader_module.RforkModelLoader(LoadConfig(model_loader_extra_config={"fail_if_not_forked": True}))
    with pytest.raises(ForkFailed, match=REASON):
        loader.load_model("config", "model")


@pytest.mark.parametrize("broken", ["decide_installed", "_builder", "_prepare"])
def test_whatever_fails_before_the_fork_vllm_loads(
    loader_module: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: str
) -> None:
    """A changed name of vLLM is one log line; the builder is used if there is one."""

    def fail(*_: object) -> None:
        raise AttributeError("no attribute 'offload_config'")

    decide(monkeypatch, VersionDecision())
    loader: Any = loader_module.RforkModelLoader(LoadConfig())
    monkeypatch.setattr(loader, "_builder", lambda *_: Builder())
    monkeypatch.setattr(compat if broken == "decide_installed" else loader, broken, fail)
    loaded = loader.load_model("config", "model")
    assert ("loaded by the builder" == loaded) == (broken == "_prepare")
    assert 1 == caplog.text.count("no attribute 'offload_config'")


def test_a_vllm_whose_updates_are_unknown_forks_without_seeding(
    loader_module: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason is passed on; warnings are logged."""
    decide(monkeypatch, VersionDecision(no_seed_reason="unknown methods", warnings=("untested version",)))
    loader: Any = loader_module.RforkModelLoader(LoadConfig())
    monkeypatch.setattr(loader, "_builder", lambda *_: Builder())
    monkeypatch.setattr(loader, "_prepare", lambda *_: None)
    monkeypatch.setattr(loader, "_load_or_fork", lambda *arguments: arguments[-1])
    assert "unknown methods" == loader.load_model("config", "model")
    assert 1 == caplog.text.count("untested version")

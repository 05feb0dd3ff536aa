"""Additions of the plug-in to each process of an SGLang server, with fakes in place of SGLang."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest

from rfork.engines import early_imports
from rfork.engines.hook_targets import Compatibility, HookTarget, Incompatible
from rfork.engines.sglang import compat, hooks, plugin
from rfork.errors import EngineMismatch


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., object]]:
    """The functions that the plug-in registers, by the name of the method that they hook."""
    found: dict[str, Callable[..., object]] = {}
    module = ModuleType("sglang.srt.plugins.hook_registry")
    module.__dict__["HookRegistry"] = SimpleNamespace(
        register=lambda target, hook, hook_type: found.update({target.rpartition(".")[2]: hook})
    )
    module.__dict__["HookType"] = SimpleNamespace(BEFORE="before", AFTER="after")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "9.9")
    plugin.register.cache_clear()
    return found


def missing(*paths: str) -> Incompatible:
    """Return these paths as missing hook targets."""
    return [(HookTarget(path), "does not exist") for path in paths]


FORMATS = ("auto", "dummy")


@pytest.mark.parametrize(
    ("incompatible", "expected", "formats"),
    [
        ((), {"add_cli_args", "from_cli_args", "_verify_load_format"}, (*FORMATS, "rfork")),
        ((compat.VERIFY_LOAD_FORMAT,), {"add_cli_args"}, FORMATS),
        ((compat.FROM_CLI_ARGS, compat.LOAD_FORMATS[0]), {"add_cli_args"}, FORMATS),
        ((compat.ADD_CLI_ARGS,), set(), FORMATS),
        ((compat.REGISTER,), set(), FORMATS),
    ],
)
def test_the_plug_in_adds_what_the_installed_sglang_allows(
    incompatible: tuple[str, ...],
    expected: set[str],
    formats: tuple[str, ...],
    registered: dict[str, Callable[..., object]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """If a hook is missing, its flags only log the reason; without flags, nothing is changed."""
    own = list(FORMATS)
    monkeypatch.setattr(compat, "incompatible_early", lambda: missing(*incompatible))
    monkeypatch.setattr(compat, "load_formats", lambda: own)
    plugin.register()
    assert expected == set(registered)
    assert list(formats) == own
    assert bool(incompatible) == ("rfork is disabled" in caplog.text)
    if incompatible and registered:
        assert plugin._ignore_flags is registered["add_cli_args"]


@pytest.fixture
def without_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """An SGLang that cannot be forked."""
    monkeypatch.setattr(hooks, "install", lambda: Compatibility(core=tuple(missing("sglang.load"))))
    monkeypatch.setattr("importlib.metadata.version", lambda _: "9.9")


@pytest.mark.usefixtures("without_core")
def test_a_scheduler_that_cannot_fork_loads_by_itself(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For example in a server that was started without a command line."""
    monkeypatch.delenv("RFORK_FAIL_IF_NOT_FORKED", raising=False)
    config = SimpleNamespace(load_format="rfork")
    plugin._make_loader(config)
    assert "auto" == config.load_format
    assert 1 == caplog.text.count("falling back to SGLang's own loader")
    assert "sglang.load does not exist" in caplog.text


@pytest.mark.usefixtures("without_core")
def test_a_scheduler_that_must_fork_and_cannot_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what is missing."""
    monkeypatch.setenv("RFORK_FAIL_IF_NOT_FORKED", "1")
    with pytest.raises(EngineMismatch, match="does not exist"):
        plugin._make_loader(SimpleNamespace(load_format="rfork"))


@pytest.mark.usefixtures("without_core")
def test_other_load_formats_are_unaffected() -> None:
    """Nothing is checked for them."""
    config = SimpleNamespace(load_format="dummy")
    plugin._make_loader(config)
    assert "dummy" == config.load_format


def scheduler_class(calls: list[object]) -> type:
    """Return a fake of SGLang's scheduler that records its arguments."""

    class Scheduler:
        def __init__(self, server_args: object, port_args: object) -> None:
            calls.append(port_args)

    return Scheduler


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that are imported early."""
    imports: list[str] = []
    monkeypatch.setattr(early_imports, "import_module", imports.append)
    plugin._early_imports.cache_clear()
    return imports


@pytest.mark.parametrize(("load_format", "expected"), [("auto", ()), ("rfork", early_imports.MODULES)])
def test_a_scheduler_imports_the_modules_of_a_fork_early(
    load_format: str,
    expected: tuple[str, ...],
    early: list[str],
    registered: dict[str, Callable[..., object]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only with load format rfork. The scheduler is created once, with its arguments."""
    calls: list[object] = []
    module = ModuleType(compat.SCHEDULER.rpartition(".")[0])
    vars(module)["Scheduler"] = scheduler_class(calls)
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys.modules["sglang.srt.managers"], "scheduler", module, raising=False)
    monkeypatch.setattr(compat, "incompatible_early", lambda: ())
    monkeypatch.setattr(compat, "load_formats", lambda: ["rfork"])
    plugin.register()
    vars(module)["Scheduler"](SimpleNamespace(load_format=load_format), "ports")
    plugin._early_imports().wait()
    assert list(expected) == early
    assert ["ports"] == calls


def test_the_load_waits_for_the_early_imports(
    monkeypatch: pytest.MonkeyPatch, early: list[str], without_core: None
) -> None:
    """Otherwise two threads would import the same modules."""
    monkeypatch.delenv("RFORK_FAIL_IF_NOT_FORKED", raising=False)
    plugin._import_early(None, SimpleNamespace(load_format="rfork"))
    plugin._make_loader(SimpleNamespace(load_format="rfork"))
    assert list(early_imports.MODULES) == early


def test_modules_are_imported_early_once(early: list[str]) -> None:
    """A second scheduler of the process finds them."""
    for _ in range(2):
        plugin._import_early(None, SimpleNamespace(load_format="rfork"))
    plugin._early_imports().wait()
    assert list(early_imports.MODULES) == early

"""Imports of a fork's modules while the engine initializes its device."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rfork.engines import early_imports as module
from rfork.engines.early_imports import MODULES, early_imports


def test_all_modules_are_imported_when_the_block_ends() -> None:
    """No thread that imports is left, so that the process may fork."""
    script = (
        "import sys, threading\n"
        "from rfork.engines.early_imports import MODULES, early_imports\n"
        "with early_imports(): pass\n"
        "print(set(MODULES) <= sys.modules.keys(), threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "True 1" == done.stdout.strip()


def test_an_import_error_does_not_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's own work proceeds: the fork will report the error."""
    monkeypatch.setattr(module, "MODULES", ("rfork.no_such_module",))
    with early_imports():
        pass


def test_no_engine_is_imported_early() -> None:
    """The engine's own thread may be importing it."""
    assert [] == [name for name in MODULES if name.startswith(("rfork.engines.vllm", "rfork.engines.sglang"))]

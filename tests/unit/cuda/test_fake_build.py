"""Compilation of the fake driver: what a developer reads where it is not possible."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path

import pytest

from tests.fake_libcuda import build


@pytest.fixture(autouse=True)
def _not_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile into an empty folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_without_a_compiler_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests fail with the command that installs one; a skip would hide them."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match="needs a C compiler: apt-get install gcc"):
        build.library_path.__wrapped__()


def test_without_the_header_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's header is in Triton's wheel."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"needs cuda\.h: install the package triton"):
        build.library_path.__wrapped__()


def test_a_compiler_error_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the compiler's output, and nothing is left that a later call would load."""
    wrong = tmp_path / "wrong.c"
    wrong.write_text('#include <cuda.h>\n#error "this is wrong"\n')
    monkeypatch.setattr(build, "SOURCE", wrong)
    with pytest.raises(RuntimeError, match="this is wrong"):
        build.library_path.__wrapped__()
    assert [] == [*tmp_path.glob("*/*")]


def test_a_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process with the same source, header and flags loads the same file."""
    simple = tmp_path / "simple.c"
    simple.write_text("#include <cuda.h>\n")
    monkeypatch.setattr(build, "SOURCE", simple)
    library = build.library_path.__wrapped__()
    compiled_at = library.stat().st_mtime_ns
    assert library == build.library_path.__wrapped__()
    assert compiled_at == library.stat().st_mtime_ns

"""`make demo`, as the README and the quickstart begin: what it runs, run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import StartRfork


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_forks_three_times(rfork_process: StartRfork, tmp_path: Path) -> None:
    """Three forks of the real model end with one SHA-256 and exit code 0, though a relay is killed."""
    pytest.importorskip("gguf")
    result = tmp_path / "demo.json"
    demo = rfork_process("demo", "--json", str(result), "--cache", str(tmp_path / "cache"))
    assert 0 == demo.wait(deadline_s=240)
    assert 1 == len(set(_sums(json.loads(result.read_text()))))


def _sums(found: object) -> list[str]:
    """Every `sha256` in a result."""
    if isinstance(found, dict):
        here = [value for key, value in found.items() if key == "sha256" and isinstance(value, str)]
        return here + [each for value in found.values() for each in _sums(value)]
    return [each for value in found for each in _sums(value)] if isinstance(found, list) else []

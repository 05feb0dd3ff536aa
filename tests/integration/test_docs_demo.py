"""Runs `make demo`, the first command of the README and the quickstart."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_forks_three_times(tmp_path: Path) -> None:
    """Three forks of the real model end with one SHA-256 and exit code 0, although a relay is killed."""
    pytest.importorskip("gguf")
    result = tmp_path / "demo.json"
    options = f"--json {result} --cache {tmp_path / 'cache'}"
    # The environment that `make demo` creates first is the one this test runs in.
    make = ["make", "-o", "venv", "demo", f"BIN={Path(sys.executable).parent}", f"DEMO={options}"]
    done = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr
    assert 1 == len(set(_sums(json.loads(result.read_text()))))


def _sums(found: object) -> list[str]:
    """Return every `sha256` in a result."""
    if isinstance(found, dict):
        here = [value for key, value in found.items() if key == "sha256" and isinstance(value, str)]
        return here + [each for value in found.values() for each in _sums(value)]
    return [each for value in found for each in _sums(value)] if isinstance(found, list) else []

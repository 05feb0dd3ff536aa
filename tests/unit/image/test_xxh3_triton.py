"""The digest kernel under Triton's interpreter; tests/gpu runs it on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
def test_the_interpreted_kernel_is_xxh3() -> None:
    """For any length, address and split, bytes have the hashes of xxhash."""
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("interpreted_kernel.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    assert "" == done.stdout, done.stderr

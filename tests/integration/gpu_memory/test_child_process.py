"""The fake driver in a process of its own: what the program did wrong is in a log file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
from rfork.cuda import library
from tests.fake_libcuda.images import device_image, pattern
from tests.fake_libcuda.install import install

library.STREAM_CAPTURE_MODE_RELAXED = int(sys.argv[1])
image = device_image(install(), [100_000], filled=True, device=1)
with image.readable(0, 100_000) as views:
    assert b"".join(views) == pattern(0, 100_000)
"""


@pytest.mark.parametrize(("mode", "is_forbidden"), [(2, False), (0, True)], ids=["relaxed", "global"])
def test_calls_during_a_capture(tmp_path: Path, mode: int, is_forbidden: bool) -> None:
    """An image is read while another thread captures a CUDA graph, but not by a thread in global mode."""
    log = tmp_path / "log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FAKE_CUDA_CAPTURING": "1", "FAKE_CUDA_LOG": str(log)}
    command = [sys.executable, "-c", PROGRAM, str(mode)]
    program = subprocess.run(command, env=environment, cwd=ROOT, check=False, capture_output=True, text=True)
    assert is_forbidden == (program.returncode != 0), program.stderr
    assert is_forbidden == log.exists()
    assert is_forbidden == ("(900)" in program.stderr)

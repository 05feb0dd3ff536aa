"""A million tensors in 100 GB: cost of a fork's control path on both sides."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.integration.large_layout import LAST_TENSOR

CPU_S = 20
"""The kernel kills a side that uses more CPU time: three times the usual amount on a dedicated core, because
on a shared one the same work is accounted up to twice.
"""
MAX_BYTES = 10**9
"""Peak memory, including torch."""
NEVER_S = 120.0


@contextmanager
def side(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run one side's process under the CPU limit; it ends with the block."""
    command = [sys.executable, "-m", "tests.integration.large_layout", *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            resource.prlimit(process.pid, resource.RLIMIT_CPU, (CPU_S, CPU_S))
            yield process
        finally:
            process.kill()


@pytest.mark.slow  # 100,000 tensors: tests/integration/peer_service/test_calls.py
def test_a_million_tensors() -> None:
    """Layouts are hashed, streamed and compared, and a fork is planned and reported, within 20 s of CPU and 1
    GB per side.
    """
    with side("source") as source_process:
        if source_process.stdout is None:
            raise RuntimeError("started without a pipe")
        source_report = json.loads(source_process.stdout.readline() or "{}")
        assert {"address", "token", "report_bytes", "chunks", "segments"} == source_report.keys()
        with side("target", source_report["address"], source_report["token"]) as target_process:
            target_report, target_cost = (
                json.loads(line) for line in target_process.communicate(timeout=NEVER_S)[0].splitlines()
            )
            assert 0 == target_process.returncode
        source_cost = json.loads(source_process.communicate(timeout=NEVER_S)[0])
        assert 0 == source_process.returncode
    print({"source": source_cost, "target": target_cost})
    assert f"{LAST_TENSOR}: here float16[128, 16]" == target_report["difference"].partition(" stride")[0]
    assert "True" == target_report["differs"]
    assert source_report["chunks"] == target_report["verified"]
    assert 1 == source_report["segments"]  # one-sided endpoints are proportional to the number of memory runs
    # Repeated messages are proportional to the number of chunks, which is 374.
    assert [] == [size for size in (source_report["report_bytes"], target_report["progress_bytes"]) if size > 4096]
    assert [] == [cost for cost in (source_cost, target_cost) if cost["peak_bytes"] > MAX_BYTES]

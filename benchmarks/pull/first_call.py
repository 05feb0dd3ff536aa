"""Duration of the first fork of a process, beyond that of its later ones: imports and set-up.

Measured in processes of their own that have imported torch and built their module, as a program of a user has. Their
byte code is compiled before, as by an installation, regardless of PYTHONDONTWRITEBYTECODE.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from statistics import median

from rfork.errors import RforkError

MODEL = "tiny"
RUNS = 5
TIMEOUT_S = 60.0
SCRIPT = """
import time
from torch import nn
from benchmarks import shapes

module = shapes.tiny()
times = []
for number in range(4):
    began = time.perf_counter()
    import rfork
    report = rfork.fork(module, model="tiny")
    times.append(time.perf_counter() - began)
    if report.outcome != "forked":
        raise SystemExit(report.line())
    report.seed.close()
print(times[0] - sorted(times[1:])[1])
"""


def first_call_seconds(planner: str) -> float:
    """Return the seconds by which a process's first fork is slower than its later ones, `import rfork` included."""
    with tempfile.TemporaryDirectory(prefix="rfork-byte-code-") as byte_code:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("RFORK_", "PYTHON"))}
        environment |= {
            "PYTHONPATH": os.pathsep.join(each for each in sys.path if each),
            "PYTHONPYCACHEPREFIX": byte_code,
            "RFORK_PLANNER": planner,
            "RFORK_TRANSPORTS": "http",
        }
        _run(environment)  # compiles
        return median(_run(environment) for _ in range(RUNS))


def _run(environment: Mapping[str, str]) -> float:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise RforkError(f"the first fork of a process failed: {done.stderr.strip()}")
    return float(done.stdout)

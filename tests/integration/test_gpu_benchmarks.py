"""The GPU benchmarks on a machine without a GPU: the same code at a tiny size."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
# Several processes that each import torch.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


class BenchmarkResult(NamedTuple):
    """Result of a benchmark: rows by contender, and figures."""

    rows: dict[str, dict[str, str | float]]
    figures: dict[str, float]
    settings: dict[str, str | float]


def run(name: str, folder: Path, *arguments: str) -> BenchmarkResult:
    """Run a benchmark with `--device cpu --quick`."""
    file = folder / "result.json"
    command = [sys.executable, "-m", f"benchmarks.gpu.{name}", "--device", "cpu", "--quick", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--json", str(file), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=380
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    document = json.loads(file.read_text())
    rows = {row["contender"]: row for row in document["rows"]}
    return BenchmarkResult(rows, document["figures"], document["settings"])


@pytest.fixture(scope="module")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> BenchmarkResult:
    """A run of `benchmarks.gpu.pull` with an image of 12 MB."""
    return run("pull", tmp_path_factory.mktemp("pull"), "--bytes", "12000000")


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory: pytest.TempPathFactory) -> BenchmarkResult:
    """A run of `benchmarks.gpu.disturb`."""
    return run("disturb", tmp_path_factory.mktemp("disturb"))


@pytest.mark.parametrize("shape", ["dense", "small"])
@pytest.mark.parametrize(
    "contender",
    ["rfork http", "http reads", "limit: device copy", "limit: pinned copy", "digest", "limit: memory read",
     "rfork.load, page cache", "rfork reading engine, page cache", "safetensors load_file"],
)  # fmt: skip
def test_contenders_without_a_gpu_are_measured(pulled: BenchmarkResult, shape: str, contender: str) -> None:
    """Each of these has a row with a rate, for both images."""
    row = pulled.rows[f"{shape}: {contender}"]
    assert float(row["GB/s"]) > 0
    assert "" == row["note"]


def test_contenders_that_cannot_run_have_a_reason(pulled: BenchmarkResult) -> None:
    """CUDA IPC on host memory is a row with a reason, not the end of the benchmark."""
    row = pulled.rows["dense: rfork cuda_ipc"]
    assert "GB/s" not in row
    assert row["note"]


def test_all_bytes_were_right(pulled: BenchmarkResult) -> None:
    """No contender left wrong bytes: the benchmark would have failed."""
    assert 0 == pulled.figures["gpu_wrong_bytes"]
    assert [] == [name for name, row in pulled.rows.items() if row["note"] == "WRONG BYTES"]


def test_figures_with_goals_exist(pulled: BenchmarkResult) -> None:
    """All but those of CUDA IPC, which a CPU lacks."""
    assert {"gpu_h2d_vs_pinned", "gpu_digest_tb_per_s", "gpu_http_vs_pinned"} <= set(pulled.figures)
    assert "gpu_ipc_vs_device_copy" not in pulled.figures


def test_a_seed_is_disturbed_by_each_transport_that_runs(disturbed: BenchmarkResult) -> None:
    """Tokens were generated in every slot, governed and not, and the worst governed transport is the figure."""
    names = ["idle, slot 1", "idle, slot 2", "http, 2 targets, governor off", "http, 2 targets, governor on",
             "kernel copies, 2 targets"]  # fmt: skip
    assert [True] * len(names) == [float(disturbed.rows[name]["tokens/s"]) > 0 for name in names]
    shares = [
        share
        for name, share in disturbed.figures.items()
        if name.startswith("gpu_disturb_tokens_") and name.endswith("_governed_2")
    ]
    assert min(shares) == disturbed.figures["gpu_disturb_tokens_per_s"]


def test_no_slot_needs_cuda(disturbed: BenchmarkResult) -> None:
    """A CPU runs the decoder as it is; CUDA IPC has a row that states why it did not run."""
    assert 0.0 == float(disturbed.settings["cuda_graph"])
    assert True is bool(disturbed.rows["cuda_ipc, 2 targets, governor on"]["note"])

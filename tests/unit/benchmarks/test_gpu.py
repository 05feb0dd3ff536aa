"""Pure parts of the GPU benchmarks: sizes, names, rows, and the handling of failures."""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from benchmarks.disturb.cases import SlotResult
from benchmarks.gpu import packages
from benchmarks.gpu.common import (
    GpuContenders,
    VerificationError,
    dense_shapes,
    error_text,
    module_of,
    rows_of,
    small_shapes,
)
from benchmarks.gpu.disturb import figures as disturb_figures
from benchmarks.gpu.disturb_model import _capture
from benchmarks.gpu.disturb_workers import GpuDisturbCase, GpuOrder, GpuTarget
from benchmarks.gpu.packages import ROOT, base, name_of, optional
from benchmarks.gpu.packages import module_of as imported_as
from benchmarks.gpu.pull import figures
from benchmarks.gpu.pull_target import GpuPullTarget, read_sequentially
from benchmarks.gpu.run import folder_name
from rfork.errors import NotSameHost, RforkError
from rfork.image.capture import capture

MIB = 1 << 20


def size_of(shapes: dict[str, tuple[int, ...]]) -> int:
    """Return the bytes of these bfloat16 tensors."""
    return sum(2 * math.prod(shape) for shape in shapes.values())


@pytest.mark.parametrize("nbytes", [16 << 30, 2 << 30, 256 * MIB, 64 * MIB])
def test_a_dense_image_has_about_the_requested_size(nbytes: int) -> None:
    """The difference is at most one layer, for any width."""
    assert 0.85 < size_of(dense_shapes(nbytes)) / nbytes < 1.15


@pytest.mark.parametrize(("nbytes", "tensors"), [(1 << 30, 20_000), (256 * MIB, 20_000), (8 * MIB, 1024)])
def test_a_small_image_has_very_many_tensors(nbytes: int, tensors: int) -> None:
    """It has 20,000, but fewer if each would have less than a few rows."""
    shapes = small_shapes(nbytes)
    assert tensors == len(shapes)
    assert 0.85 < size_of(shapes) / nbytes < 1.15


def test_modules_of_equal_shapes_have_equal_bytes() -> None:
    """Two modules of the same shapes are the same image."""
    shapes = small_shapes(MIB)
    first, second = (capture(module_of(shapes, torch.device("cpu"))).manifest().weights_id for _ in range(2))
    assert first == second


def failing(error: Exception) -> float:
    """Raise an error, as a contender that fails."""
    raise error


def test_a_failing_contender_is_a_row_and_affects_no_other() -> None:
    """One cannot be prepared, one fails in a round, and one runs."""
    contenders = GpuContenders()
    contenders.add("absent", lambda: failing(NotSameHost("two hosts", hint="use http")))  # type: ignore[arg-type, return-value]
    contenders.add("fails", lambda: lambda: failing(ModuleNotFoundError("No module", name="kvikio")))
    contenders.add("runs", lambda: lambda: 2.0)
    seconds = contenders.run(3)
    assert {"runs": [2.0, 2.0, 2.0]} == seconds
    rows = rows_of(seconds, {"runs": 4_000_000_000}, contenders)
    assert {"runs": "", "absent": "two hosts (use http)", "fails": "not installed: kvikio"} == {
        row["contender"]: row["note"] for row in rows
    }
    assert 2.0 == rows[0]["GB/s"]


def test_wrong_bytes_are_counted() -> None:
    """Wrong bytes are no result, and never just a note."""
    contenders = GpuContenders()
    contenders.add("liar", lambda: lambda: failing(VerificationError("dense")))
    assert {} == contenders.run(2)
    assert 1 == contenders.wrong
    assert {"liar": "WRONG BYTES"} == contenders.notes


def test_every_byte_is_compared() -> None:
    """A copy that copies nothing is detected; one that does is timed."""
    shapes = small_shapes(MIB)
    cpu = torch.device("cpu")
    target = GpuPullTarget("small", shapes, cpu)
    with pytest.raises(VerificationError):
        target.run_checked(lambda: None)()
    assert 0 < target.copy_from(target.original(shapes, cpu))()


def test_slow_contenders_run_in_few_rounds() -> None:
    """They run three rounds after the warm-up round."""
    contenders = GpuContenders()
    contenders.add("slow", lambda: lambda: 1.0, aside=True)
    assert {"slow": [1.0, 1.0, 1.0]} == contenders.run(5)


def test_a_row_has_only_the_first_line_of_an_error() -> None:
    """An error of another process includes its traceback."""
    assert "the seed: no" == error_text(RforkError("the seed: no\nTraceback …"))


def test_figures_are_ratios_of_medians() -> None:
    """They cover the contenders that ran; not the small tensors, where launches bound the limits too."""
    seconds = {
        "dense: cuda_ipc reads": [2.0], "dense: limit: device copy": [1.0, 1.5, 9.0], "dense: digest": [0.5],
        "small: rfork.load, page cache": [4.0], "small: limit: pinned copy": [2.0],
    }  # fmt: skip
    sizes = dict.fromkeys(seconds, 10**12)
    assert {
        "gpu_ipc_vs_device_copy": 0.75,
        "gpu_digest_tb_per_s": 2.0,
    } == figures(seconds, sizes)


def test_the_worst_governed_transport_is_the_figure() -> None:
    """Ungoverned transports and the stand-in for NCCL have separate figures."""
    tokens = {
        GpuDisturbCase("idle", slot=1): 100,
        GpuDisturbCase("idle", slot=2): 100,
        GpuDisturbCase("http", 2): 90,
        GpuDisturbCase("cuda_ipc", 2): 80,
        GpuDisturbCase("http", 2, governed=False): 50,
        GpuDisturbCase("kernel copies", 2): 10,
    }
    results = {case.name: SlotResult(tokens=[0.01] * count, seconds=1.0) for case, count in tokens.items()}
    found = disturb_figures(results, list(tokens))
    assert 0.8 == found["gpu_disturb_tokens_per_s"]
    assert 0.9 == found["gpu_disturb_tokens_http_governed_2"]
    assert 0.1 == found["gpu_disturb_tokens_kernel_copies_2"]
    assert 1.0 == found["gpu_disturb_idle_vs_idle"]


def test_every_chunk_is_read_once() -> None:
    """Several threads share the chunks."""
    chunks = [(index, index + 1) for index in range(50)]
    read: list[tuple[int, int]] = []
    read_sequentially(chunks, read.append)
    assert chunks == sorted(read)


def test_a_failed_read_is_raised() -> None:
    """It is not swallowed on its thread."""

    def read(chunk: tuple[int, int]) -> None:
        raise NotSameHost("no")

    with pytest.raises(NotSameHost):
        read_sequentially([(0, 1)], read)


@pytest.mark.parametrize(
    ("gpus", "cpu", "cores", "expected"),
    [
        (["NVIDIA H100 80GB HBM3"], "AMD EPYC 9554 64-Core Processor", 16, "h100-epyc-16core"),
        (["NVIDIA A100-SXM4-80GB"] * 8, "Intel(R) Xeon(R) Platinum 8480+", 96, "8xa100-xeon-96core"),
        (["NVIDIA GeForce RTX 4090"], "AMD Ryzen 9 7950X", 32, "rtx4090-amd-32core"),
        (["NVIDIA H200"], "Neoverse-V2", 72, "h200-neoverse-72core"),
        ([], "AMD EPYC", 2, "epyc-2core"),
    ],
)
def test_the_results_folder_is_named_after_the_machine(gpus: list[str], cpu: str, cores: int, expected: str) -> None:
    """The name has GPU, CPU and cores."""
    assert expected == folder_name(gpus, cpu, cores)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the installation reads pyproject.toml")
def test_installing_packages_keeps_the_installed_torch() -> None:
    """It installs everything that rfork needs except torch, and the Mooncake wheel for the image's CUDA."""
    assert "torch" not in map(name_of, base())
    assert {"pydantic", "grpcio", "xxhash"} <= set(map(name_of, base()))
    assert ["mooncake-transfer-engine-cuda13"] == optional("13.0")[3:]
    assert ["mooncake-transfer-engine"] == optional("12.6")[3:]
    assert [] == optional(None)[3:]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="the installation reads pyproject.toml")
def test_every_package_has_an_importable_module() -> None:
    """The modules of rfork's requirements are found where they are installed, as here."""
    from importlib.util import find_spec

    modules = [imported_as(name_of(line)) for line in base()]
    assert [] == [name for name in modules if find_spec(name) is None]
    assert (ROOT / "pyproject.toml").exists()


def test_a_captured_graph_owns_its_output_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA graph replays addresses: its tensors live as long as the graph may be replayed."""
    monkeypatch.setattr(torch.cuda, "Stream", Mock())
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Mock())
    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: contextlib.nullcontext())

    def capture_step() -> tuple[Callable[[], None], weakref.ref[torch.Tensor]]:
        buffer = torch.zeros(1)

        def step() -> None:
            buffer.add_(1)

        return _capture(step), weakref.ref(buffer)

    replay, buffer = capture_step()
    gc.collect()
    assert buffer() is not None
    replay()


def test_every_fork_without_bytes_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes the second fork of a slot, whose tensors have the right bytes of the first."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    target = GpuTarget(multiprocessing.Value("q", 0), "http://127.0.0.1:1", "cpu")
    right = [region.clone() for region in target._image.regions]
    forks: list[GpuDisturbCase] = []

    def fork(case: GpuDisturbCase) -> None:
        forks.append(case)
        if len(forks) == 1:
            torch._foreach_copy_(list(target._image.regions), right)
        else:
            target._stopping.set()

    monkeypatch.setattr(target, "_fork", fork)
    target.handle(GpuOrder("start", GpuDisturbCase("http", 1)))
    assert target._thread is not None
    target._thread.join()
    with pytest.raises(RforkError, match="WRONG BYTES"):
        target.handle(GpuOrder("stop"))


def test_a_venv_without_ensurepip_is_made_without_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian without python3-venv leaves half of an environment, which must not be mistaken for a complete
    one.
    """
    venv = tmp_path / "venv"
    commands: list[Sequence[str]] = []

    def quiet(command: Sequence[str], seconds: float) -> str:
        commands.append(command)
        if "--without-pip" not in command:
            (venv / "bin").mkdir(parents=True)
            (venv / "bin" / "python").touch()
            return "ensurepip is not available"
        assert not venv.exists()
        (venv / "lib/python3.11/site-packages").mkdir(parents=True)
        return ""

    monkeypatch.setattr(packages, "VENV", venv)
    monkeypatch.setattr(packages, "_quiet", quiet)
    assert "" == packages._missing_after_install(sys.executable, 60.0)
    assert 2 == len(commands)
    assert packages.is_complete()


def test_a_failed_venv_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run finds no broken bin/python and tries again."""
    venv = tmp_path / "venv"

    def quiet(command: Sequence[str], seconds: float) -> str:
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").touch()
        return "no"

    monkeypatch.setattr(packages, "VENV", venv)
    monkeypatch.setattr(packages, "_quiet", quiet)
    assert "no" == packages._missing_after_install(sys.executable, 60.0)
    assert not venv.exists()
    assert not packages.is_complete()


def test_an_old_python_is_one_clear_error() -> None:
    """The error is one line: the standard library of 3.10 has no tomllib."""
    program = (
        "import sys; sys.modules['tomllib'] = None; import benchmarks.gpu.run as run; "
        "run.sys = type('Old', (), {'version_info': (3, 10, 4), 'executable': 'python3'}); "
        "print(run.main(['first']))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "python3 is Python 3.10; Python 3.11 or newer is required\n1\n" == done.stdout
    assert "" == done.stderr

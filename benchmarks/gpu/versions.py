"""Report versions, driver and devices of this machine: what every other result depends on.

Fails without a device, or if the driver lacks a function that rfork uses. Each fact is a row; one that cannot be
found does not prevent the others.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

from benchmarks.gpu.result_file import ResultFile

PACKAGES = (
    "torch", "triton", "numpy", "safetensors", "transformers", "vllm", "sglang", "nixl", "xxhash", "grpcio", "pydantic",
    "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13", "kvikio-cu12", "kvikio-cu13",
    "runai-model-streamer", "fastsafetensors", "tensorizer",
)  # fmt: skip
VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF", "TRITON_CACHE_DIR", "NCCL_DEBUG", "TORCH_NCCL_NONBLOCKING_TIMEOUT",
)  # fmt: skip
PROGRAMS = ("nvcc", "compute-sanitizer", "ncu", "nsys", "cc")
FILES = ("/proc/driver/nvidia/version", "/proc/meminfo", "/sys/kernel/mm/transparent_hugepage/enabled")
FILE_LINES = 2
COMMANDS = (
    ("nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used,pcie.link.gen.current,"
     "pcie.link.width.current,mig.mode.current", "--format=csv"),
    ("nvidia-smi", "topo", "-m"),
)  # fmt: skip
COMMAND_S = 10.0
Fact = tuple[str, str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write all facts; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    results = ResultFile(options.json)
    problems: list[str] = []
    for find in (system, packages, libcuda, torch_runtime):
        try:
            for name, value in find():
                results.add({"fact": name, "value": value})
        except Exception as error:  # no fact may hide the others
            problems.append(f"{find.__name__}: {type(error).__name__}: {error}")
            results.add({"fact": find.__name__, "value": problems[-1]})
    if options.device == "cuda" and problems:
        print(f"failed: {'; '.join(problems)}")
        return 1
    return 0


def system() -> Iterator[Fact]:
    """Yield Python, kernel, variables, programs and the output of NVIDIA's tools."""
    yield "python", platform.python_version()
    yield "machine", f"{platform.machine()}, {platform.release()}, {len(os.sched_getaffinity(0))} cores"
    for name in VARIABLES:
        if name in os.environ:
            yield name, os.environ[name]
    for name in PROGRAMS:
        yield name, shutil.which(name) or "not found"
    for name in FILES:
        with suppress(OSError):
            yield name, " | ".join(Path(name).read_text().splitlines()[:FILE_LINES])
    infiniband = Path("/sys/class/infiniband")
    yield "RDMA devices", ", ".join(path.name for path in infiniband.glob("*")) or "none"
    for command in COMMANDS:
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S)
            yield " ".join(command[:2]), "\n" + (done.stdout or done.stderr).rstrip()


def packages() -> Iterator[Fact]:
    """Yield the versions of packages."""
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def libcuda() -> Iterator[Fact]:
    """Yield the version of the driver's library. Raises RuntimeError with all functions that it lacks."""
    from rfork.cuda import library
    from rfork.cuda.library import CudaDriverLibrary

    yield "functions of libcuda that rfork uses", str(len(library._SIGNATURES))
    missing = missing_functions(library.LIBRARY_PATH, library._SIGNATURES)
    if missing:
        raise RuntimeError(f"the driver has no {', '.join(missing)}")
    version = CudaDriverLibrary().version()
    yield "newest CUDA of the driver", f"{version // 1000}.{version % 1000 // 10}"


def missing_functions(path: str, names: Iterable[str]) -> list[str]:
    """Return those of the names that a library lacks. Raises OSError if it cannot be loaded."""
    loaded = ctypes.CDLL(path)
    return [name for name in names if not hasattr(loaded, name)]


def torch_runtime() -> Iterator[Fact]:
    """Yield what torch finds. Raises RuntimeError without a device."""
    import torch

    yield "torch", f"{torch.__version__}, CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA device")
    version: Callable[[], object] = torch.cuda.nccl.version
    yield "NCCL", str(version())
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield (
            f"GPU {index}",
            f"{properties.name}, compute capability {properties.major}.{properties.minor}, "
            f"{properties.multi_processor_count} SMs, {free >> 20} of {total >> 20} MiB free, {properties.uuid}",
        )


if __name__ == "__main__":
    raise SystemExit(main())

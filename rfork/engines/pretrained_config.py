"""What a model's config says of how it is built, as transformers reads it. Runs on the target."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from rfork.errors import MissingExtra, ModelError, SettingsError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

SAFETENSORS = "*.safetensors"


@contextmanager
def model_errors(source: str | Path) -> Iterator[None]:
    """Turn what transformers raises for a folder or model that it cannot use into one line."""
    try:
        yield
    except ImportError as error:
        raise MissingExtra("transformers", extra="transformers", why=str(error)) from None
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
        SafetensorError,
    ) as error:
        if isinstance(error, FileNotFoundError) and _lacks_temporary_folder():
            raise SettingsError(
                "this process can write to no temporary folder, which loading a model takes",
                hint="set TMPDIR to a folder that it can write to",
            ) from None
        if str(source).startswith((".", "/")) and not Path(source).exists():
            hint = "name the folder of a Hugging Face model"
            raise ModelError(f"{source} is no folder", hint=hint) from None
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"{source}: {first}") from None


def _lacks_temporary_folder() -> bool:
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return True
    return False


def class_of(config: PreTrainedConfig, *, trust_remote_code: bool) -> type:
    """The class of the model: what its own code names where that may run, else what the config names."""
    import transformers

    auto = "AutoModelForCausalLM"
    theirs: dict[str, str] = getattr(config, "auto_map", None) or {}
    if trust_remote_code and (names := [name for name in theirs if name.startswith("AutoModel")]):
        named: type = getattr(transformers, auto if auto in names else names[0])
        return named
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    default: type = transformers.AutoModelForCausalLM
    return default


def dtype_of(requested: str | torch.dtype, config: PreTrainedConfig, folder: Path) -> torch.dtype:
    """As `from_pretrained` decides: what is asked for, else the config's, else that of the first weight."""
    if requested == "auto":
        requested = config.dtype or _stored_dtype(folder) or torch.get_default_dtype()
    found = getattr(torch, requested.removeprefix("torch."), None) if isinstance(requested, str) else requested
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{requested!r} is no dtype")
    return found


def _stored_dtype(folder: Path) -> torch.dtype | None:
    for path in sorted(folder.glob(SAFETENSORS))[:1]:
        try:
            with safe_open(path, framework="pt") as weights:
                for name in weights.keys():  # noqa: SIM118  # it is no mapping
                    dtype: torch.dtype = weights.get_slice(name)[:0].dtype
                    if dtype.is_floating_point:
                        return dtype
        except (SafetensorError, IndexError):
            return None
    return None

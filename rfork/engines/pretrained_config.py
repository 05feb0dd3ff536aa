"""Reads from a model's config how transformers would build the model. Runs on the target."""

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
    """Convert the exceptions of transformers for an unusable folder or model into one-line errors."""
    try:
        yield
    except ImportError as error:
        raise MissingExtra("transformers", extra="transformers", reason=str(error)) from None
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
                "no writable temporary folder, which loading a model requires",
                hint="set TMPDIR to a writable folder",
            ) from None
        if str(source).startswith((".", "/")) and not Path(source).exists():
            hint = "pass the folder of a Hugging Face model"
            raise ModelError(f"{source} is not a folder", hint=hint) from None
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(
            f"transformers cannot load {source}: {first}",
            hint="pass the folder of a Hugging Face model: it has a config.json and weight files",
        ) from None


def _lacks_temporary_folder() -> bool:
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        return True
    return False


def class_of(config: PreTrainedConfig, *, trust_remote_code: bool) -> type:
    """Return the class of the model: the one its remote code names if that may run, else the one the config names."""
    import transformers

    auto = "AutoModelForCausalLM"
    auto_map: dict[str, str] = getattr(config, "auto_map", None) or {}
    if trust_remote_code and (names := [name for name in auto_map if name.startswith("AutoModel")]):
        named: type = getattr(transformers, auto if auto in names else names[0])
        return named
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
            return found
    default: type = transformers.AutoModelForCausalLM
    return default


def dtype_of(requested: str | torch.dtype, config: PreTrainedConfig, folder: Path) -> torch.dtype:
    """Return the dtype of `from_pretrained`: the requested one, else the config's, else that of the first weight."""
    if requested == "auto":
        requested = config.dtype or _stored_dtype(folder) or torch.get_default_dtype()
    found = getattr(torch, requested.removeprefix("torch."), None) if isinstance(requested, str) else requested
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{requested!r} is not a dtype")
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

"""What transformers' `from_pretrained` would build, from the config alone. Runs on the target.

The model is built by `from_pretrained` itself, which is given weights that nobody has read yet: memory as the
allocator gives it. So all that it does beside reading is done: types, tied weights, what a model computes for
itself (rotary tables), where the tensors lie.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from rfork.engines.pretrained_config import SAFETENSORS, class_of, dtype_of, model_errors
from rfork.errors import ModelError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

MAIN = "main"
"""The revision that the hub gives to who asks for none."""
WEIGHTS = (SAFETENSORS, "*.bin", "*.gguf")
"""Names of the files that transformers reads weights from."""


@dataclass(frozen=True)
class MetaModel:
    """One model as `from_pretrained` would be asked for it. Make it by `of`."""

    source: str
    revision: str
    folder: Path
    """Where its config.json lies: the folder itself, or that of the hub's cache."""
    config: PreTrainedConfig
    model_class: type
    """A model's class, or one of transformers' Auto classes."""
    dtype: torch.dtype
    device: torch.device
    attn_implementation: str | None
    trust_remote_code: bool

    @classmethod
    def of(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        model_class: type | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        attn_implementation: str | None = None,
        trust_remote_code: bool = False,
    ) -> MetaModel:
        """Read the config of a folder, or of a model of the hub (``HF_HUB_OFFLINE``: of its cache).

        The class is that which the config names (`architectures`), unless one is given. Raises ModelError.
        """
        if isinstance(source, Path) and not (source / "config.json").is_file():
            what = "holds no config.json" if source.is_dir() else "is no folder"
            raise ModelError(f"{source} {what}", hint="name the folder of a Hugging Face model")
        named = str(source)
        with model_errors(named):
            from transformers import AutoConfig
            from transformers.utils.hub import cached_file

            at = cached_file(named, "config.json", revision=revision or MAIN)
            config = AutoConfig.from_pretrained(named, revision=revision or MAIN, trust_remote_code=trust_remote_code)
            if at is None:
                raise OSError("it has no config.json")
            folder = Path(at).parent
            return cls(
                named,
                revision or MAIN,
                folder,
                config,
                model_class or class_of(config, trust_remote_code=trust_remote_code),
                dtype_of(dtype, config, folder),
                torch.device(device if device is not None else "cpu"),
                attn_implementation,
                trust_remote_code,
            )

    @property
    def loadable(self) -> bool:
        """Whether files of weights lie beside the config, or can be fetched from the hub."""
        from huggingface_hub.constants import HF_HUB_OFFLINE

        there = any(True for pattern in WEIGHTS for _ in self.folder.glob(pattern))
        return there or not (Path(self.source).is_dir() or HF_HUB_OFFLINE)

    def empty(self) -> PreTrainedModel:
        """The model with its weights allocated, but neither read nor initialised, in eval mode.

        Raises ModelError where it cannot be built in the state that `from_pretrained` would leave it in:
        quantised models, and those whose weights have no place of their own by name.
        """
        if self._quantised:
            raise ModelError(f"{self.source} is quantised: its layout is known once its quantiser has read the weights")
        with model_errors(self.source), _no_progress_bar():
            abstract = self._build_on_meta()
            built: object = type(abstract).from_pretrained(
                None,
                config=self.config,
                state_dict=_unread(abstract, self.device),
                output_loading_info=True,
                **self._options,
            )
            model, loading_info = cast("tuple[PreTrainedModel, Mapping[str, Collection[object]]]", built)
            # It was told of no place; who saves the model has it in the names of its kind.
            model.__dict__.pop("_weight_conversions", None)
            model.name_or_path = model.config.name_or_path = self.source
            if model.can_generate():
                model.generation_config = self._generation_config()
        for what in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if found := sorted(map(str, loading_info.get(what, ()))):
                raise ModelError(
                    f"{self.source} cannot be built without its weights: {what.replace('_', ' ')}: {found[0]}"
                )
        return model

    def loaded(self) -> PreTrainedModel:
        """The model with its weights, by `from_pretrained`. Raises ModelError."""
        with model_errors(self.source):
            code = {"trust_remote_code": True} if self.trust_remote_code else {}
            model: PreTrainedModel = self.model_class.from_pretrained(  # type: ignore[attr-defined]
                self.source, revision=self.revision, **self._options, **code
            )
            return model

    def loads_as_stored(self, model: PreTrainedModel) -> bool:
        """Whether transformers reads the weights of such a model as they lie in their files.

        Some it turns, merges or sorts, and what comes of that may have the name and the shape of before.
        """
        try:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import WeightRenaming
        except ImportError:
            return False
        return all(isinstance(step, WeightRenaming) for step in get_model_conversion_mapping(model))

    @property
    def _quantised(self) -> bool:
        parts = [self.config, *(getattr(self.config, key, None) for key in self.config.sub_configs)]
        return any(getattr(part, "quantization_config", None) is not None for part in parts)

    @property
    def _options(self) -> dict[str, Any]:
        """What both ways of building tell `from_pretrained`."""
        options: dict[str, Any] = {"dtype": self.dtype}
        if self.device.type != "cpu":
            options["device_map"] = {"": self.device}
        if self.attn_implementation is not None:
            options["attn_implementation"] = self.attn_implementation
        return options

    def _build_on_meta(self) -> PreTrainedModel:
        """The model without memory."""
        with torch.device("meta"):
            if hasattr(self.model_class, "from_config"):
                code = {"trust_remote_code": True} if self.trust_remote_code else {}
                model: PreTrainedModel = self.model_class.from_config(self.config, dtype=self.dtype, **code)
            else:
                model = self.model_class._from_config(self.config, dtype=self.dtype)  # type: ignore[attr-defined]
        model.tie_weights()  # early versions of transformers leave that, where there is no memory
        return model

    def _generation_config(self) -> GenerationConfig:
        from transformers import GenerationConfig

        try:
            return GenerationConfig.from_pretrained(self.source, revision=self.revision)
        except OSError:  # there is none: what the model's config says of it
            return GenerationConfig.from_pretrained(
                self.source,
                config_file_name="config.json",
                revision=self.revision,
                _from_model_config=True,
            )


class _LazySlice:
    """A tensor of a checkpoint as transformers sees it, a slice that is read when it is asked for."""

    def __init__(self, like: torch.Tensor, device: torch.device) -> None:
        self._like = like
        self._device = device

    def __getitem__(self, _: object) -> torch.Tensor:
        """All of it, and nothing in it."""
        return torch.empty_strided(self._like.shape, self._like.stride(), dtype=self._like.dtype, device=self._device)


def _unread(abstract: PreTrainedModel, device: torch.device) -> dict[str, _LazySlice]:
    """Every weight of the model under its first name: those that are tied are tied by transformers."""
    found: dict[int, str] = {}
    weights: dict[str, _LazySlice] = {}
    for name, tensor in abstract.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and found.setdefault(id(tensor), name) == name:
            weights[name] = _LazySlice(tensor, device)
    return weights


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """No progress bar for a load that reads nothing."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]

"""Builds the model that transformers' `from_pretrained` would build, from the config alone. Runs on the target.

The model is built by `from_pretrained` itself, with uninitialised memory in place of the weights. So
everything except reading is done: dtypes, tied weights, computed buffers (rotary tables), device placement.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from pickle import UnpicklingError
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from rfork.engines.tensor_parallel import TensorParallel, local_tensor, shard_of
from rfork.errors import MissingExtra, ModelError, SettingsError

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel


SAFETENSORS = "*.safetensors"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHT_FILES = (SINGLE, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Names that transformers reads weights from: the first that exists."""


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
        requested = config.dtype or _stored_dtype(folder, config) or torch.get_default_dtype()
    found = getattr(torch, requested.removeprefix("torch."), None) if isinstance(requested, str) else requested
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{requested!r} is not a dtype")
    return found


def weights_file(folder: Path, config: PreTrainedConfig) -> Path | None:
    """Return the file in a folder, or the index of files, that transformers reads weights from; None without one."""
    named: str | None = getattr(config, "transformers_weights", None)
    names = WEIGHT_FILES if named is None else (named,)
    return next((folder / name for name in names if (folder / name).is_file()), None)


def _stored_dtype(folder: Path, config: PreTrainedConfig) -> torch.dtype | None:
    """Return the dtype that transformers derives from the weights; None if they cannot be read."""
    path = weights_file(folder, config)
    if path is None:
        return None
    try:
        if path.suffix == ".json":
            index = json.loads(path.read_bytes())
            declared = index.get("metadata", {}).get("dtype")
            if declared is not None:
                return cast("torch.dtype", getattr(torch, declared))
            path = folder / min(index["weight_map"].values())
        return next(filter(_may_be_default, _dtypes_in(path)), None)
    # The loader that reads the file names the problem.
    except (SafetensorError, UnpicklingError, OSError, EOFError, ValueError, LookupError, AttributeError, RuntimeError):
        return None


def _dtypes_in(path: Path) -> Iterator[torch.dtype]:
    if path.suffix != ".safetensors":
        for value in torch.load(path, map_location="meta", weights_only=True).values():
            yield value.dtype
        return
    with safe_open(path, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118  # it is no mapping
            part = weights.get_slice(name)
            yield (part[:0] if part.get_shape() else part[...]).dtype  # a scalar has no empty slice


def _may_be_default(dtype: torch.dtype) -> bool:
    """Return True if a model can be built in a dtype."""
    return dtype.is_floating_point and dtype.itemsize > 1


MAIN = "main"
"""Default revision on the hub."""
WEIGHTS = (SAFETENSORS, "*.bin", "*.gguf")
"""Names of the files that transformers reads weights from."""


@dataclass(frozen=True)
class MetaModel:
    """One model as requested from `from_pretrained`. Create it with `of`."""

    source: str
    revision: str
    folder: Path
    """Folder of its config.json: the given folder, or the one in the hub's cache."""
    config: PreTrainedConfig
    model_class: type
    """A model class, or one of transformers' Auto classes."""
    dtype: torch.dtype
    device: torch.device
    attn_implementation: str | None
    trust_remote_code: bool
    parallel: TensorParallel | None = None
    """Rank of this process if the model is sharded."""

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
        """Read the config of a folder or of a hub model (with ``HF_HUB_OFFLINE``, from the hub's cache).

        Without `model_class`, the class is the one named by the config (`architectures`). Raises ModelError.
        """
        if isinstance(source, Path) and not (source / "config.json").is_file():
            problem = "contains no config.json" if source.is_dir() else "is not a folder"
            raise ModelError(f"{source} {problem}", hint="pass the folder of a Hugging Face model")
        named = str(source)
        with model_errors(named):
            from transformers import AutoConfig
            from transformers.utils.hub import cached_file

            config_path = cached_file(named, "config.json", revision=revision or MAIN)
            own_config = getattr(model_class, "config_class", None)
            if own_config is not None:  # it may be unknown to AutoConfig, or a part of the config in the folder
                config = own_config.from_pretrained(named, revision=revision or MAIN)
            else:
                config = AutoConfig.from_pretrained(
                    named, revision=revision or MAIN, trust_remote_code=trust_remote_code
                )
            if config_path is None:
                raise OSError("it has no config.json")
            folder = Path(config_path).parent
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

    def sharded(self, parallel: TensorParallel) -> MetaModel:
        """Return one rank of the same model."""
        return replace(self, parallel=parallel, device=parallel.device)

    @property
    def loadable(self) -> bool:
        """True if weight files exist next to the config or can be downloaded from the hub."""
        from huggingface_hub.constants import HF_HUB_OFFLINE

        has_weights = any(True for pattern in WEIGHTS for _ in self.folder.glob(pattern))
        return has_weights or not (Path(self.source).is_dir() or HF_HUB_OFFLINE)

    @property
    def has_checkpoint(self) -> bool:
        """True if transformers reads the same safetensors files of the folder as rfork, which prefers an index."""
        folder = self.folder
        preferred = next((folder / name for name in (INDEX, SINGLE) if (folder / name).is_file()), None)
        return preferred is not None and preferred == weights_file(folder, self.config)

    def empty(self) -> PreTrainedModel:
        """Return the model in eval mode with its weights allocated, but neither read nor initialised.

        Raises ModelError if it cannot be built in the state that `from_pretrained` would leave it in, as for
        quantised models, models whose weights cannot be addressed by name, and classes with their own
        `from_pretrained`.
        """
        if self._quantised:
            raise ModelError(
                f"{self.source} is quantised: its layout is known only after the quantiser has read the weights"
            )
        with model_errors(self.source):
            abstract = self._build_on_meta()
            if _has_own_loader(type(abstract)):
                named = type(abstract).__name__
                raise ModelError(f"{named} has its own from_pretrained, which may read other files or change weights")
            weights = _unread_weights(abstract, self.device)
        return self._with_weights(abstract, weights)

    def on_meta(self) -> PreTrainedModel:
        """Return the model on the meta device. Raises ModelError."""
        with model_errors(self.source):
            if self.parallel is not None:
                return self.parallel.on_meta(self.config, lambda config: replace(self, config=config)._build_on_meta())
            return self._build_on_meta()

    def _with_weights(
        self, abstract: PreTrainedModel, weights: Mapping[str, _LazySlice | torch.Tensor]
    ) -> PreTrainedModel:
        """Return the model that `from_pretrained` builds from these weights. Raises ModelError."""
        with model_errors(self.source), _no_progress_bar(), self._meshes:
            built: object = type(abstract).from_pretrained(
                None,
                config=self.config,
                state_dict=weights,
                output_loading_info=True,
                **self._options,
            )
            model, loading_info = cast("tuple[PreTrainedModel, Mapping[str, Collection[object]]]", built)
            # No weights were converted here, so saving must use the model's own names.
            model.__dict__.pop("_weight_conversions", None)
            model.name_or_path = model.config.name_or_path = self.source
            if model.can_generate():
                model.generation_config = self._generation_config()
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if found := sorted(map(str, loading_info.get(problem, ()))):
                raise ModelError(
                    f"{self.source} cannot be built without its files: {problem.replace('_', ' ')}: {found[0]}"
                )
        return model

    def loaded(self) -> PreTrainedModel:
        """Return the model with its weights, loaded by `from_pretrained`. Raises ModelError."""
        with model_errors(self.source), self._meshes:
            code = {"trust_remote_code": True} if self.trust_remote_code else {}
            model: PreTrainedModel = self.model_class.from_pretrained(  # type: ignore[attr-defined]
                self.source, revision=self.revision, **self._options, **code
            )
            return model

    def loads_as_stored(self, model: PreTrainedModel) -> bool:
        """Return True if transformers loads the weights of such a model unchanged from its files.

        For some models it transposes, merges or permutes weights; the result may have the same name and
        shape. transformers 4 never does.
        """
        if _is_transformers_4():
            return True
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
        """Return the arguments of `from_pretrained` that `empty` and `loaded` share."""
        options: dict[str, Any] = {"dtype": self.dtype}
        if self.parallel is not None:
            options |= self.parallel.options
        elif self.device.type != "cpu":
            options["device_map"] = {"": self.device}
        if self.attn_implementation is not None:
            options["attn_implementation"] = self.attn_implementation
        return options

    @property
    def _meshes(self) -> AbstractContextManager[None]:
        return nullcontext() if self.parallel is None else self.parallel.same_meshes()

    def _build_on_meta(self) -> PreTrainedModel:
        """Return the model on the meta device."""
        config = deepcopy(self.config)  # some models append to their config's lists each time they are built
        with torch.device("meta"):
            if hasattr(self.model_class, "from_config"):
                code = {"trust_remote_code": True} if self.trust_remote_code else {}
                model: PreTrainedModel = self.model_class.from_config(config, dtype=self.dtype, **code)
            else:
                model = self.model_class._from_config(config, dtype=self.dtype)  # type: ignore[attr-defined]
        model.tie_weights()  # early versions of transformers skip this on the meta device
        return model

    def _generation_config(self) -> GenerationConfig:
        from transformers import GenerationConfig

        try:
            return GenerationConfig.from_pretrained(self.source, revision=self.revision)
        except OSError:  # the file is missing: use the model's config
            return GenerationConfig.from_pretrained(
                self.source,
                config_file_name="config.json",
                revision=self.revision,
                _from_model_config=True,
            )


def _is_transformers_4() -> bool:
    from transformers import __version__

    return __version__.startswith("4.")


class _LazySlice:
    """Stand-in for a safetensors slice, from which transformers reads a tensor on demand."""

    def __init__(self, like: torch.Tensor, device: torch.device) -> None:
        self._like = like
        self._device = device

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return a tensor of the shape that the index selects, with any content."""
        shape = self._like.detach()[index].shape
        if shape == self._like.shape:
            return self.tensor()
        return self._create(torch.empty, shape)

    def get_shape(self) -> list[int]:
        """Return the full shape."""
        return list(self._like.shape)

    def tensor(self) -> torch.Tensor:
        """Return a tensor with any content."""
        return self._create(torch.empty_strided, self._like.shape, self._like.stride())

    def _create(self, create: Callable[..., torch.Tensor], *shape: Sequence[int]) -> torch.Tensor:
        """Return an uninitialised tensor, but zeros for integers: leftover memory may contain addresses of the model's
        own memory, which a capture refuses.
        """
        tensor = create(*shape, dtype=self._like.dtype, device=self._device)
        if not self._like.dtype.is_floating_point:
            tensor.data.zero_()  # without counting as a change of the weight
        return tensor


def _has_own_loader(model_class: type) -> bool:
    from transformers import PreTrainedModel

    bases = model_class.__mro__
    return any("from_pretrained" in vars(base) for base in bases[: bases.index(PreTrainedModel)])


def overwritten_weight(model: nn.Module) -> str | None:
    """Return a weight that transformers changes in place after it was read; None if there is none.

    `model` is one of `MetaModel.empty`, to which nothing else has been written. Some models set the row of the padding
    token to zero, whatever the checkpoint has.
    """
    tensors = stored_tensors(model).items()
    return next((name for name, tensor in tensors if local_tensor(tensor)._version), None)


def stored_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and persistent buffers of a model; tied ones under each of their names."""
    state = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}


def load_shards(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy checkpoint tensors into one rank of a model that transformers loads as stored.

    Weights that the model does not have are ignored. Raises ModelError if one is missing.
    """
    own, first = stored_tensors(model), _first_names(model)
    missing = set(first.values())
    with torch.no_grad():
        for name, tensor in weights:
            if name in own:
                local_tensor(own[name]).copy_(shard_of(own[name], tensor))
                missing.discard(first[name])
    if missing:
        raise ModelError(f"there is no weight for {min(missing)}")


def stores_each_once(folder: Path, model: nn.Module) -> bool:
    """Return True if a folder's safetensors files have each weight of a model under one of its names only.

    Of a weight with several names, transformers compares the values, and ties them only if they are equal.
    """
    first_names, found = _first_names(model), set[str]()
    for path in folder.glob(SAFETENSORS):
        try:
            with safe_open(path, framework="pt") as opened:
                names = [first_names.get(name, name) for name in opened.keys()]  # noqa: SIM118  # it is no mapping
        except (OSError, SafetensorError):
            return True  # the loader that reads it names the problem
        if len(names) != len({*names} - found):
            return False
        found.update(names)
    return True


def collective_load_reason(blueprint: MetaModel, model: nn.Module) -> str | None:
    """Return why `from_pretrained` needs all ranks of a model to load one of them; None if it does not.

    It compares weights that a checkpoint has under several names, and initialises missing ones, on all ranks at once.
    """
    if not blueprint.loadable:
        return None
    first = _first_names(model)
    stored = _stored_names(blueprint.folder)
    if stored is None:
        tied = next((name for name, other in first.items() if name != other), None)
        return None if tied is None else f"{tied} is tied, and the checkpoint is not in local safetensors files"
    if not stores_each_once(blueprint.folder, model):
        return "the checkpoint has a tied weight under several names, whose values all ranks compare"
    missing = {*first.values()} - {first[name] for name in stored if name in first}
    if missing and blueprint.loads_as_stored(cast("PreTrainedModel", model)):
        return f"{min(missing)} is not in the checkpoint, and all ranks initialise it"
    return None


def _stored_names(folder: Path) -> set[str] | None:
    """Return the names in a folder's safetensors files. None if there are none, or one cannot be read."""
    names: set[str] = set()
    for path in folder.glob(SAFETENSORS):
        try:
            with safe_open(path, framework="pt") as opened:
                names.update(opened.keys())
        except (OSError, SafetensorError):
            return None
    return names or None


def _first_names(model: nn.Module) -> dict[str, str]:
    """Return the first name of each weight, by each of its names."""
    found: dict[int, str] = {}
    return {name: found.setdefault(id(tensor), name) for name, tensor in stored_tensors(model).items()}


def _unread_weights(abstract: PreTrainedModel, device: torch.device) -> dict[str, _LazySlice | torch.Tensor]:
    """Return a lazy slice for each weight under its first name; transformers ties the tied ones.

    transformers 4 reads no slices: it gets uninitialised tensors, which it assigns.
    """
    lazy, tensors = not _is_transformers_4(), stored_tensors(abstract)
    weights: dict[str, _LazySlice | torch.Tensor] = {}
    for name in dict.fromkeys(_first_names(abstract).values()):
        weight = _LazySlice(tensors[name], device)
        weights[name] = weight if lazy else weight.tensor()
    return weights


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Hide the progress bar of a load that reads nothing."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]

"""SGLang models that cannot be forked, tensors excluded from images, and configuration facts."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from rfork.engines.hidden_state import HiddenState
from rfork.engines.hook_targets import Compatibility, HookTarget, Incompatible
from rfork.engines.sglang import compat, identity
from rfork.image.capture import capture


class RadioModel(nn.Module):
    """Has the name of an unsupported SGLang class."""


class Vision(RadioModel):
    """Subclass of an unsupported class."""


def test_models_whose_loading_sets_more_than_tensors_are_rejected() -> None:
    """They are rejected by class name, wherever the class or a subclass occurs in the model."""
    assert identity.unsupported_model(nn.Sequential(nn.Linear(2, 2))) is None
    reason = identity.unsupported_model(nn.Sequential(nn.Linear(2, 2), nn.Sequential(Vision())))
    assert "loading the weights of RadioModel sets more than tensors: whether it embeds videos" == reason


def test_scratch_is_excluded_from_images() -> None:
    """Tensors overwritten by each forward pass and addresses are excluded; strides and weights are not."""

    class Fp8MoEMethod:
        """Has tensors like those of SGLang's fp8 method for experts."""

        def __init__(self) -> None:
            for key in ("ab_strides1", "workspace", "a_ptr", "b_scales_ptr", "expert_offsets"):
                setattr(self, key, torch.ones(4))
            self.problem_sizes1 = torch.ones(4, 3)

    Fp8MoEMethod.__module__ = "sglang.srt.layers.quantization.fp8"
    module = nn.Sequential(nn.Linear(2, 2))
    vars(module[0])["quant_method"] = Fp8MoEMethod()
    vars(module[0])["workspace"] = torch.zeros(8)
    HiddenState(module, (), ("sglang",))
    names = [spec.name for spec in capture(module, exclude=compat.SCRATCH).layout.tensors]
    kept = {name.rpartition(".")[2] for name in names if name.startswith(("0.", "rfork.hidden."))}
    assert {"weight", "bias", "ab_strides1"} == kept


def test_weights_are_not_scratch() -> None:
    """Names of weights in models match no pattern."""
    for name in ("model.layers.0.mlp.experts.w13_weight_scale_inv", "lm_head.weight", "a.g_idx", "a.w_kc"):
        assert not any(fnmatchcase(name, pattern) for pattern in compat.SCRATCH)


def test_a_model_is_rejected_by_its_class_before_it_is_built() -> None:
    """The class of the complete model is known without a model."""
    assert identity.unsupported_class(nn.Linear) is None
    assert "RadioModel" in str(identity.unsupported_class(Vision))


class SpawnedRanks(SimpleNamespace):
    """Ranks of SGLang's processes since 0.5.21."""

    dp_rank = 1


@pytest.mark.parametrize(
    ("parallel", "dp_size", "is_rejected"),
    [
        (SimpleNamespace(attn_dp_size=1), 1, False),
        (SimpleNamespace(attn_dp_size=2), 2, False),
        (SimpleNamespace(attn_dp_size=1), 2, True),
        (SpawnedRanks(attn_dp_size=1), 2, False),
    ],
)
def test_replicas_of_one_server_without_distinct_names_are_rejected(
    parallel: SimpleNamespace, dp_size: int, is_rejected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before 0.5.21, a loader cannot find the data-parallel rank of its process."""
    monkeypatch.setattr(identity, "version", lambda _: "0.5.16")
    assert is_rejected == (identity.unsupported_parallelism(parallel, dp_size) is not None)


def install_fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> None:
    """Install a fake module in place of SGLang's."""
    module = ModuleType(name)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("present", "found"),
    [
        (("engine_of_tests.new", "engine_of_tests.old"), "engine_of_tests.new.thing"),
        (("engine_of_tests.old",), "engine_of_tests.old.thing"),
        ((), "engine_of_tests.new.thing"),
    ],
)
def test_a_moved_name_is_found_where_it_is(
    present: tuple[str, ...], found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its alternatives the first that exists; without any, the first is reported as missing."""
    package = ModuleType("engine_of_tests")
    monkeypatch.setitem(sys.modules, package.__name__, package)
    for name in present:
        install_fake_module(monkeypatch, name, thing="value")
        setattr(package, name.rpartition(".")[2], sys.modules[name])
    compat.first_of.cache_clear()
    assert found == compat.first_of("engine_of_tests.new.thing", "engine_of_tests.old.thing")
    compat.first_of.cache_clear()


def config_leaf(name: str) -> str:
    """Return a published argument, as SGLang does since 0.5.18."""
    if name != "attention_backend":
        raise ValueError(f"{name!r} is not a config leaf")
    return "published"


ARGUMENTS = SimpleNamespace(attention_backend="requested", dtype="auto")


@pytest.mark.parametrize(
    ("context", "name", "value"),
    [
        (SimpleNamespace(server_args=ARGUMENTS), "attention_backend", "requested"),
        (SimpleNamespace(server_args=ARGUMENTS, config_leaf=config_leaf), "attention_backend", "published"),
        (SimpleNamespace(server_args=ARGUMENTS, config_leaf=config_leaf), "dtype", "auto"),
        (SimpleNamespace(server_args=ARGUMENTS, config_leaf=config_leaf), "colour", "default"),
    ],
)
def test_options_are_resolved_ones(
    context: SimpleNamespace, name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The options that SGLang has published come first; before 0.5.18 it resolves its arguments in place."""
    install_fake_module(monkeypatch, "sglang.srt.runtime_context", get_context=lambda: context)
    assert value == compat.option(name, "default")


def test_an_option_that_sglang_does_not_have_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it has a default."""
    context = SimpleNamespace(server_args=ARGUMENTS)
    install_fake_module(monkeypatch, "sglang.srt.runtime_context", get_context=lambda: context)
    with pytest.raises(AttributeError, match="no server argument colour"):
        compat.option("colour")


class Updater:
    """Weight updater of an SGLang."""

    def update_weights_from_disk(self, model_path: str) -> None:
        """Change weights, as in all versions."""

    def destroy_weights_update_group(self) -> None:
        """Change no weights."""


class NewUpdater(Updater):
    """Weight updater of a later SGLang."""

    def update_weights_from_orbit(self) -> None:
        """Change weights unnoticed."""


@pytest.mark.parametrize(
    ("updater", "missing", "reason"),
    [
        (Updater, (), None),
        (NewUpdater, (), "NewUpdater of this SGLang may change weights in update_weights_from_orbit"),
        (Updater, ((HookTarget("engine.sleep", tier="lifecycle"), "does not exist"),), "engine.sleep does not exist"),
    ],
)
def test_weights_that_may_change_unnoticed_are_not_served(
    updater: type, missing: Incompatible, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method that a new SGLang adds, and a hook that it lacks, end seeding."""
    monkeypatch.setattr(compat, "WEIGHTS", f"{__name__}.{updater.__name__}")
    monkeypatch.setattr(compat, "MANAGER", "no_such_package.Manager")
    monkeypatch.setattr("importlib.metadata.version", lambda _: "9.9")
    found = compat.no_seed_reason(Compatibility(lifecycle=missing))
    assert (reason is None) == (found is None)
    assert (reason or "") in (found or "")


@pytest.mark.parametrize(
    ("value", "expected"), [(None, False), ("", False), ("0", False), ("false", False), ("1", True), ("True", True)]
)
def test_quantisation_on_the_cpu_is_detected(
    value: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's loader without weights takes other steps then."""
    for name in compat.CPU_QUANTIZATION:
        monkeypatch.delenv(name, raising=False)
    if value is not None:
        monkeypatch.setenv(compat.CPU_QUANTIZATION[1], value)
    assert expected == compat.is_quantized_on_cpu()


def test_every_target_of_a_weight_change_ends_seeding_if_it_is_missing() -> None:
    """None of them is core, with which nothing could be forked, or only logged."""
    paths = [target for target in compat.scheduling() if target.path.startswith((compat.WEIGHTS, compat.MANAGER))]
    assert {"lifecycle"} == {target.tier for target in paths}
    assert 13 == len(paths)


class Config:
    """A model's configuration like that of transformers."""

    def __init__(self, **values: object) -> None:
        self._values = values

    def to_dict(self) -> dict[str, object]:
        """Return all values."""
        return self._values


def test_configurations_are_compared_by_content() -> None:
    """Another rotary base is another configuration; another folder or library version is not."""
    original = Config(rope_theta=1e4, text=Config(a=1), _name_or_path="/a", transformers_version="4", file="/a/x")
    moved = Config(file="/b/x", _name_or_path="/b", transformers_version="5", text=Config(a=1), rope_theta=1e4)
    changed = Config(rope_theta=1e6, text=Config(a=1), file="/b/x")
    assert compat.digest(original, "/a") == compat.digest(moved, "/b")
    assert compat.digest(moved, "/b") != compat.digest(changed, "/b")
    assert compat.digest({"x": object()}) == compat.digest({"x": object()})


def test_the_quantisation_method_and_kernel_options_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """They belong to the facts in which source and target must agree, like the configuration."""
    context = SimpleNamespace(server_args=SimpleNamespace(fp8_gemm_runner_backend="deep_gemm"))
    install_fake_module(monkeypatch, "sglang.srt.runtime_context", get_context=lambda: context)
    config = Config(quantization_config={"bits": 4})
    config.quantization_config = {"bits": 4}  # type: ignore[attr-defined]
    facts = list(compat.facts(SimpleNamespace(model_path="/a", hf_config=config)))
    assert [
        f"config {compat.digest(config)}",
        f"quantization_config {compat.digest({'bits': 4})}",
        "fp8_gemm_runner_backend deep_gemm",
    ] == facts

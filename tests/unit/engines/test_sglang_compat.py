"""SGLang models that cannot be forked, tensors excluded from images, and configuration facts."""

from __future__ import annotations

import sys
from fnmatch import fnmatchcase
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from rfork.engines.hidden_state import HiddenState
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


@pytest.mark.parametrize(
    ("is_draft", "algorithm", "is_rejected"),
    [
        (False, "EAGLE", False),
        (True, "STANDALONE", False),
        (True, "EAGLE", True),
        (True, "EAGLE3", True),
        (True, "FROZEN_KV_MTP", True),
        (True, None, True),
    ],
)
def test_drafts_that_share_tensors_are_rejected(is_draft: bool, algorithm: str | None, is_rejected: bool) -> None:
    """Only a standalone draft is forked: an update of the main model would change the tensors of other drafts."""
    assert is_rejected == (identity.unsupported_draft(is_draft, algorithm) is not None)


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
    modules: dict[str, dict[str, object]] = {
        "sglang.srt.runtime_context": {"get_server_args": lambda: None},
        "sglang.srt.arg_groups.overrides": {
            "resolving_view": lambda _: SimpleNamespace(fp8_gemm_runner_backend="deep_gemm")
        },
    }
    for name, content in modules.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, module)
    config = Config(quantization_config={"bits": 4})
    config.quantization_config = {"bits": 4}  # type: ignore[attr-defined]
    facts = list(compat.facts(SimpleNamespace(model_path="/a", hf_config=config)))
    assert [
        f"config {compat.digest(config)}",
        f"quantization_config {compat.digest({'bits': 4})}",
        "fp8_gemm_runner_backend deep_gemm",
    ] == facts

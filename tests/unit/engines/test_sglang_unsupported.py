"""What the SGLang plug-in does not fork, what it leaves out of images, and what it says of configurations."""

from __future__ import annotations

import logging
import sys
from fnmatch import fnmatchcase
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from rfork.engines.hidden_state import HiddenState
from rfork.engines.sglang import compat, unsupported
from rfork.engines.sglang.ranks import cap_deadline
from rfork.image.capture import capture
from rfork.settings import InstanceSettings


class RadioModel(nn.Module):
    """By its name, of SGLang's."""


class Vision(RadioModel):
    """One of its kind."""


def test_models_whose_loading_sets_more_than_tensors() -> None:
    """They are refused by the name of a class, wherever in the model it is, and of what is derived of it."""
    assert unsupported.unsupported_model(nn.Sequential(nn.Linear(2, 2))) is None
    assert (
        "RadioModel sets by its weights more than tensors: whether it embeds videos"
    ) == unsupported.unsupported_model(nn.Sequential(nn.Linear(2, 2), nn.Sequential(Vision())))


@pytest.mark.parametrize(
    ("is_draft", "algorithm", "is_refused"),
    [
        (False, "EAGLE", False),
        (True, "STANDALONE", False),
        (True, "EAGLE", True),
        (True, "EAGLE3", True),
        (True, "FROZEN_KV_MTP", True),
        (True, None, True),
    ],
)
def test_drafts_that_share_tensors(is_draft: bool, algorithm: str | None, is_refused: bool) -> None:
    """Only a draft that stands alone is forked: of others, an update of the target would change tensors."""
    assert is_refused == (unsupported.unsupported_draft(is_draft, algorithm) is not None)


def test_scratch_is_left_out_of_images() -> None:
    """What each forward pass of a kernel writes, and addresses, are left out; strides and weights are not."""

    class Method:
        """SGLang's fp8 method for experts, as far as its tensors go."""

        def __init__(self) -> None:
            for key in ("ab_strides1", "workspace", "a_ptr", "b_scales_ptr", "expert_offsets"):
                setattr(self, key, torch.ones(4))
            self.problem_sizes1 = torch.ones(4, 3)

    Method.__module__ = "sglang.srt.layers.quantization.fp8"
    module = nn.Sequential(nn.Linear(2, 2))
    vars(module[0])["quant_method"] = Method()
    vars(module[0])["workspace"] = torch.zeros(8)
    HiddenState(module, (), ("sglang",))
    names = [spec.name for spec in capture(module, exclude=unsupported.SCRATCH).layout.tensors]
    kept = {name.rpartition(".")[2] for name in names if name.startswith(("0.", "rfork.hidden."))}
    assert {"weight", "bias", "ab_strides1"} == kept


def test_weights_are_no_scratch() -> None:
    """Names that models give to weights match no pattern."""
    for name in ("model.layers.0.mlp.experts.w13_weight_scale_inv", "lm_head.weight", "a.g_idx", "a.w_kc"):
        assert not any(fnmatchcase(name, pattern) for pattern in unsupported.SCRATCH)


class Config:
    """A model's configuration, as transformers has it."""

    def __init__(self, **values: object) -> None:
        self._values = values

    def to_dict(self) -> dict[str, object]:
        """All of it."""
        return self._values


def test_configurations_are_equal_by_what_they_say() -> None:
    """Another base of the rotary embedding is another configuration; another folder or version is none."""
    one = Config(rope_theta=1e4, text=Config(a=1), _name_or_path="/a", transformers_version="4", file="/a/x")
    same = Config(file="/b/x", _name_or_path="/b", transformers_version="5", text=Config(a=1), rope_theta=1e4)
    other = Config(rope_theta=1e6, text=Config(a=1), file="/b/x")
    assert compat.digest(one, "/a") == compat.digest(same, "/b")
    assert compat.digest(same, "/b") != compat.digest(other, "/b")
    assert compat.digest({"x": object()}) == compat.digest({"x": object()})


def test_quantisation_and_kernels_are_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quantised form and what kernels want of it are facts, too."""
    for name, content in (
        ("sglang.srt.runtime_context", {"get_server_args": lambda: None}),
        (
            "sglang.srt.arg_groups.overrides",
            {"resolving_view": lambda _: SimpleNamespace(fp8_gemm_runner_backend="deep_gemm")},
        ),
    ):
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


def test_a_deadline_that_other_ranks_would_not_wait_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fork takes half of what SGLang's ranks wait for one another, at most; that is told."""
    name = "sglang.srt.model_executor.model_runner_components"
    module = ModuleType(name)
    module.__dict__["load_model_utils"] = SimpleNamespace(UNBALANCED_MODEL_LOADING_TIMEOUT_S=480)
    monkeypatch.setitem(sys.modules, name, module)
    with caplog.at_level(logging.INFO, "rfork"):
        assert 100 == cap_deadline(InstanceSettings(deadline_s=100)).deadline_s
        assert "" == caplog.text
        assert 240 == cap_deadline(InstanceSettings(deadline_s=600)).deadline_s
    assert 1 == caplog.text.count("ranks wait for one another deadline_s=240")

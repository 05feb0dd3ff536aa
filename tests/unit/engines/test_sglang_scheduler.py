"""Ranks, steps and the end of an SGLang scheduler, with fakes in SGLang's place."""

from __future__ import annotations

import logging
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from rfork.engines.served_model import ServedModel
from rfork.engines.sglang import compat, drain_on_sigterm, hooks, ranks, weight_updates
from rfork.engines.sglang.ranks import subject_of
from rfork.errors import SourceBusy
from rfork.schema import Rank
from rfork.settings import InstanceSettings


@dataclass(eq=False)
class RecordingServedModel:
    """An instance, and its seed, that write down what they are told."""

    calls: list[str] = field(default_factory=list)
    settings: InstanceSettings = field(default_factory=lambda: InstanceSettings(drain_timeout_s=60))

    @property
    def seed(self) -> RecordingServedModel:
        """Itself."""
        return self

    def serving(self) -> AbstractContextManager[None]:
        """Told."""
        self.calls.append("serving")
        return nullcontext()

    def observe(self, seconds: float) -> None:
        """Told."""
        self.calls.append("observe")

    def suspend(self) -> None:
        """Told."""
        self.calls.append("suspend")

    def renew(self, *, updated: bool, version: str | None) -> None:
        """Told."""
        self.calls.append("renew")

    def close(self, drain_s: float) -> None:
        """Told."""
        self.calls.append(f"close {drain_s:g}")


@pytest.fixture
def instance(monkeypatch: pytest.MonkeyPatch) -> RecordingServedModel:
    """The instance of every model here: a model is its instance."""
    for module in (hooks, weight_updates):
        monkeypatch.setattr(module, "instance_of", lambda model: cast(ServedModel, model))
    return RecordingServedModel()


def scheduler(model: RecordingServedModel, *, overlap: bool = False, generates: bool = True) -> SimpleNamespace:
    """One that serves the model, and a draft of it."""
    runner = SimpleNamespace(model=model)
    worker = SimpleNamespace(model_runner=runner, weight_update_runners=lambda: [("target", runner)])
    draft = SimpleNamespace(weight_update_runners=lambda: [("draft", runner)])
    return SimpleNamespace(
        tp_worker=worker,
        draft_worker=draft,
        enable_overlap=overlap,
        is_generation=generates,
        disaggregation_mode=SimpleNamespace(value="null"),
    )


def batch(*, decode: bool) -> SimpleNamespace:
    """One that decodes, or fills the cache."""
    return SimpleNamespace(forward_mode=SimpleNamespace(is_decode=lambda: decode))


@pytest.mark.parametrize(
    ("overlap", "generates", "decode", "expected"),
    [
        (False, True, True, ["serving"]),
        (True, True, True, ["observe"]),
        (False, True, False, []),
        (True, True, False, []),
        (False, False, False, ["serving"]),
    ],
)
def test_decode_steps_are_the_work(
    overlap: bool, generates: bool, decode: bool, expected: list[str], instance: RecordingServedModel
) -> None:
    """Each decode step is told, when it ends; of a server that never decodes, each batch."""
    serves, step = scheduler(instance, overlap=overlap, generates=generates), batch(decode=decode)
    result = hooks._run_batch(lambda *_: SimpleNamespace(), serves, step)
    hooks._process_result(serves, step, result)
    assert expected == instance.calls


def test_the_end_waits_for_readers_but_not_for_long(instance: RecordingServedModel) -> None:
    """A scheduler that ends closes all of its models, before SGLang would kill it."""
    hooks._on_exit(scheduler(instance))
    assert [f"close {hooks.EXIT_TIMEOUT_S:g}"] * 2 == instance.calls


@pytest.mark.parametrize(
    ("tags", "saver", "backup", "expected"),
    [
        (["kv_cache"], True, False, []),
        (["weights"], True, False, ["suspend"]),
        (None, True, True, ["suspend", "renew"]),
        (["weights", "kv_cache"], False, False, ["suspend", "renew"]),
    ],
)
def test_memory_that_is_released(
    tags: list[str] | None,
    saver: bool,
    backup: bool,
    expected: list[str],
    instance: RecordingServedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights are let go of before their memory goes; what comes back is given only if it is what went."""
    features = SimpleNamespace(
        enable_memory_saver=saver, enable_weights_cpu_backup=backup, enable_draft_weights_cpu_backup=False
    )
    install_fake_module(monkeypatch, "sglang.srt.constants", GPU_MEMORY_TYPE_WEIGHTS="weights")
    install_fake_module(monkeypatch, "sglang.srt.runtime_context", get_exec=lambda: SimpleNamespace(features=features))
    manager = SimpleNamespace(_select_runners=lambda: [("target", SimpleNamespace(model=instance))])
    request = SimpleNamespace(tags=tags)
    updates = weight_updates.WeightUpdateHooks()
    assert "released" == updates.release(lambda *_: "released", manager, request)
    updates.resume(None, manager, request)
    assert expected == instance.calls


def test_memory_that_is_not_released_after_all(instance: RecordingServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SGLang refuses to release the memory, the weights are given again."""
    install_fake_module(monkeypatch, "sglang.srt.constants", GPU_MEMORY_TYPE_WEIGHTS="weights")
    manager = SimpleNamespace(_select_runners=lambda: [("target", SimpleNamespace(model=instance))])

    def busy(*_: object) -> None:
        raise AssertionError("only when the server is idle")

    with pytest.raises(AssertionError, match="idle"):
        weight_updates.WeightUpdateHooks().release(busy, manager, SimpleNamespace(tags=["weights"]))
    assert ["suspend", "renew"] == instance.calls


@pytest.mark.parametrize(
    ("served", "draft", "settings", "expected"),
    [
        ("org/model", False, InstanceSettings(), ("org/model", "target")),
        ("nice-name", False, InstanceSettings(), ("nice-name", "target")),
        ("nice-name", True, InstanceSettings(), ("org/draft", "speculative")),
        ("nice-name", True, InstanceSettings(model="mine"), ("mine", "speculative")),
    ],
)
def test_ranks_by_the_engines_own_state(
    served: str,
    draft: bool,
    settings: InstanceSettings,
    expected: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler's coordinates are SGLang's; a draft is an image of its own, under its own name."""
    parallel = SimpleNamespace(
        tp_rank=3, tp_size=4, pp_rank=1, pp_size=2, moe_ep_rank=1, moe_ep_size=2, attn_dp_size=2,
        attn_dp_rank=1, dp_rank=None, attn_tp_size=2, attn_cp_size=1, moe_dp_size=1,
    )  # fmt: skip
    moe = SimpleNamespace(init_expert_location="trivial", ep_num_redundant_experts=0, moe_runner_backend="auto")
    exec_ = SimpleNamespace(moe=moe, kernel=SimpleNamespace(attention_backend="triton"))
    install_fake_module(
        monkeypatch,
        "sglang.srt.runtime_context",
        get_model=lambda: SimpleNamespace(model_path="org/model"),
        get_serving=lambda: SimpleNamespace(served_model_name=served),
        get_parallel=lambda: parallel,
        get_exec=lambda: exec_,
        get_server_args=lambda: None,
    )
    install_fake_module(
        monkeypatch,
        "sglang.srt.arg_groups.overrides",
        resolving_view=lambda _: SimpleNamespace(kv_cache_dtype="fp8_e4m3"),
    )
    monkeypatch.setattr(ranks, "version", lambda _: "0.5.23")
    monkeypatch.setattr(ranks, "type_name", lambda _: "Model")
    subject = subject_of(
        SimpleNamespace(
            model_path="org/draft" if draft else "org/model",
            revision=None,
            is_draft_model=draft,
            dtype="torch.bfloat16",
            quantization="fp8",
            hf_config={"rope_theta": 1e4},
        ),
        SimpleNamespace(draft_model_idx=None),
        SimpleNamespace(device="cpu"),
        settings,
    )
    assert expected == (subject.model, subject.rank.role)
    assert Rank(
        tp=3, tp_size=4, pp=1, pp_size=2, ep=1, ep_size=2, dp=1, role=subject.rank.role
    ) == subject.rank  # fmt: skip
    assert {
        "engine sglang 0.5.23", "device cpu", "dtype bfloat16", "quantization fp8",
        f"config {compat.digest({'rope_theta': 1e4})}", "kv_cache_dtype fp8_e4m3",
    } < set(subject.facts)  # fmt: skip


def test_readers_may_finish_before_the_schedulers_are_asked_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On SIGTERM the server's instances are drained; its last word to the schedulers waits for that."""
    drained: list[str] = []

    class ShutdownReq:
        """SGLang's."""

    def drain(client: object, replica: str, *, wait_s: float, force: bool) -> list[object]:
        drained.append(f"{replica} {wait_s:g} {force}")
        return []

    install_fake_module(monkeypatch, "sglang.srt.managers.io_struct", ShutdownReq=ShutdownReq)
    monkeypatch.setattr(drain_on_sigterm, "drain_replica", drain)
    one = drain_on_sigterm.SigtermDrain(
        InstanceSettings(planner="http://127.0.0.1:9", replica="sglang-1", drain_timeout_s=30)
    )
    one.before_dispatch(SimpleNamespace(), ShutdownReq())
    one.on_sigterm(None, SimpleNamespace())
    one.on_sigterm(None, SimpleNamespace())
    one.before_dispatch(SimpleNamespace(), ShutdownReq())
    assert ["sglang-1 30 True"] == drained


def test_a_planner_that_does_not_know_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is wrong, the server ends, and one line of its log says that nobody drained it."""

    def busy(*_: object, **__: object) -> list[object]:
        raise SourceBusy("still read")

    monkeypatch.setattr(drain_on_sigterm, "drain_replica", busy)
    one = drain_on_sigterm.SigtermDrain(InstanceSettings(planner="http://127.0.0.1:9", replica="sglang-1"))
    with caplog.at_level(logging.INFO, "rfork"):
        one._drain()
    assert one._drained.is_set()
    assert 1 == caplog.text.count("the server ends undrained because=")


def install_fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> None:
    """Put a module in SGLang's place."""
    module = ModuleType(name)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)

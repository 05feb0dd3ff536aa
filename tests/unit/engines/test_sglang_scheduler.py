"""Ranks, steps and the exit of an SGLang scheduler, with fakes in place of SGLang."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest

from rfork.engines import launch
from rfork.engines.served_model import ServedModel
from rfork.engines.sglang import compat, hooks, identity, launcher
from rfork.engines.weight_lifecycle import WeightLifecycle
from rfork.errors import SourceBusy
from rfork.schema import Rank
from rfork.settings import InstanceSettings


@dataclass(eq=False)
class RecordingServedModel:
    """Records the calls made on a served model and its seed."""

    calls: list[str] = field(default_factory=list)
    settings: InstanceSettings = field(default_factory=lambda: InstanceSettings(drain_timeout_s=60))

    @property
    def seed(self) -> RecordingServedModel:
        """Return itself."""
        return self

    @property
    def steps(self) -> RecordingServedModel:
        """Return itself."""
        return self

    def begin(self) -> int:
        """Record the call."""
        self.calls.append("begin")
        return 7

    def end(self, step: int, *, counted: bool) -> None:
        """Record the call."""
        self.calls.append(f"end {step} {'counted' if counted else 'not counted'}")

    def cancel(self, step: int) -> None:
        """Record the call."""
        self.calls.append(f"cancel {step}")

    def suspend(self) -> None:
        """Record the call."""
        self.calls.append("suspend")

    def renew(self, *, updated: bool, version: str | None) -> None:
        """Record the call."""
        self.calls.append("renew")

    def close(self, drain_s: float) -> None:
        """Record the call."""
        self.calls.append(f"close {drain_s:g}")


@pytest.fixture
def instance(monkeypatch: pytest.MonkeyPatch) -> RecordingServedModel:
    """The served model of every model here: a model is its own served model."""
    lifecycles: dict[int, WeightLifecycle] = {}

    def lifecycle_of(model: ServedModel) -> WeightLifecycle:
        return lifecycles.setdefault(id(model), WeightLifecycle(model))

    monkeypatch.setattr(hooks, "served_model", lambda model: cast(ServedModel, model))
    monkeypatch.setattr(hooks, "lifecycle_of", lifecycle_of)
    return RecordingServedModel()


def manager_of(model: RecordingServedModel, draft: RecordingServedModel | None = None) -> SimpleNamespace:
    """Return SGLang's manager of weight updates for a model and its draft, as before 0.5.21."""
    drafts = SimpleNamespace(draft_runners=[SimpleNamespace(model=draft)] if draft is not None else [])
    return SimpleNamespace(
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=model)),
        draft_worker=SimpleNamespace(draft_worker=drafts) if draft is not None else None,
    )


def scheduler(model: RecordingServedModel, *, generates: bool = True) -> SimpleNamespace:
    """Return a scheduler that serves the model and a draft of it."""
    runner = SimpleNamespace(model=model)
    worker = SimpleNamespace(model_runner=runner, weight_update_runners=lambda: [("target", runner)])
    draft = SimpleNamespace(weight_update_runners=lambda: [("draft", runner)])
    return SimpleNamespace(
        tp_worker=worker,
        draft_worker=draft,
        is_generation=generates,
        disaggregation_mode=SimpleNamespace(value="null"),
    )


def batch(mode: str) -> SimpleNamespace:
    """Return a batch with this forward mode."""
    modes = ("decode", "extend", "prebuilt", "split_prefill")
    return SimpleNamespace(forward_mode=SimpleNamespace(**{f"is_{name}": (lambda n=name: n == mode) for name in modes}))


@dataclass
class Event:
    """Completion of the copy of a result."""

    calls: list[str]

    def synchronize(self) -> None:
        """Record the call."""
        self.calls.append("synchronize")


STEPS: list[tuple[str, bool, str, list[str]]] = [
    ("a decode step ends after the wait", True, "decode", ["begin", "run", "synchronize", "end 7 counted", "process"]),
    ("a prefill ends uncounted", True, "extend", ["begin", "run", "synchronize", "end 7 not counted", "process"]),
    ("without overlap SGLang waits itself", False, "decode", ["begin", "run", "process", "end 7 counted"]),
    ("a prebuilt batch is no step", True, "prebuilt", ["run", "process"]),
    ("a split prefill is no step", False, "split_prefill", ["run", "process"]),
]


@pytest.mark.parametrize(("overlap", "mode", "expected"), [row[1:] for row in STEPS], ids=[row[0] for row in STEPS])
def test_a_step_ends_when_the_device_has_finished(
    overlap: bool, mode: str, expected: list[str], instance: RecordingServedModel
) -> None:
    """Kernels are only launched by `run_batch`; in overlap mode the next batch is launched before the result."""
    result = SimpleNamespace(copy_done=Event(instance.calls) if overlap else None)
    serves, step = scheduler(instance), batch(mode)

    def run(*_: object) -> SimpleNamespace:
        instance.calls.append("run")
        return result

    assert result is hooks._run_batch(run, serves, step)
    copied = SimpleNamespace(forward_mode=step.forward_mode)  # SGLang copies batches in overlap mode
    hooks._process_result(lambda *_: instance.calls.append("process"), serves, copied if overlap else step, result)
    assert expected == instance.calls


def test_a_step_ends_if_its_result_is_replaced(instance: RecordingServedModel) -> None:
    """A pipeline stage processes the result of the last stage."""
    serves, step = scheduler(instance), batch("decode")
    hooks._run_batch(lambda *_: SimpleNamespace(), serves, step)
    hooks._process_result(lambda *_: None, serves, step, SimpleNamespace(copy_done=None))
    assert ["begin", "end 7 counted"] == instance.calls


def test_every_batch_counts_on_a_server_that_never_decodes(instance: RecordingServedModel) -> None:
    """An embedding server runs only prefills."""
    serves, step = scheduler(instance, generates=False), batch("extend")
    result = hooks._run_batch(lambda *_: SimpleNamespace(), serves, step)
    hooks._process_result(lambda *_: None, serves, step, result)
    assert ["begin", "end 7 counted"] == instance.calls


def test_a_failed_batch_is_no_step(instance: RecordingServedModel) -> None:
    """Its launch raises."""

    def run(*_: object) -> None:
        raise ValueError("out of memory")

    with pytest.raises(ValueError, match="memory"):
        hooks._run_batch(run, scheduler(instance), batch("decode"))
    assert ["begin", "cancel 7"] == instance.calls


def test_an_exiting_scheduler_waits_briefly_for_readers(instance: RecordingServedModel) -> None:
    """It closes all of its models before SGLang would kill it."""
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
def test_released_memory_is_not_served(
    tags: list[str] | None,
    saver: bool,
    backup: bool,
    expected: list[str],
    instance: RecordingServedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serving stops before memory is released, and resumes only if the content is restored."""
    options = {
        "enable_memory_saver": saver,
        "enable_weights_cpu_backup": backup,
        "enable_draft_weights_cpu_backup": False,
    }
    install_fake_module(monkeypatch, "sglang.srt.constants", GPU_MEMORY_TYPE_WEIGHTS="weights")
    monkeypatch.setattr(compat, "option", options.__getitem__)
    manager = manager_of(instance)
    request = SimpleNamespace(tags=tags)
    updates = hooks.WeightUpdateHooks()
    assert "released" == updates.release(lambda *_: "released", manager, request)
    updates.resume(None, manager, request)
    assert expected == instance.calls


def test_a_backup_of_drafts_does_not_restore_the_main_model(
    instance: RecordingServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a CPU backup of draft weights only, the draft is served after the resume and the main model is not."""
    options = {
        "enable_memory_saver": True,
        "enable_weights_cpu_backup": False,
        "enable_draft_weights_cpu_backup": True,
    }
    install_fake_module(monkeypatch, "sglang.srt.constants", GPU_MEMORY_TYPE_WEIGHTS="weights")
    monkeypatch.setattr(compat, "option", options.__getitem__)
    draft = RecordingServedModel()
    manager, request = manager_of(instance, draft), SimpleNamespace(tags=["weights"])
    updates = hooks.WeightUpdateHooks()
    updates.release(lambda *_: None, manager, request)
    updates.resume(None, manager, request)
    assert ["suspend"] == instance.calls
    assert ["suspend", "renew"] == draft.calls


def test_weights_are_served_again_if_the_release_fails(
    instance: RecordingServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang may refuse to release the memory."""
    install_fake_module(monkeypatch, "sglang.srt.constants", GPU_MEMORY_TYPE_WEIGHTS="weights")
    manager = manager_of(instance)

    def busy(*_: object) -> None:
        raise AssertionError("only when the server is idle")

    with pytest.raises(AssertionError, match="idle"):
        hooks.WeightUpdateHooks().release(busy, manager, SimpleNamespace(tags=["weights"]))
    assert ["suspend", "renew"] == instance.calls


@pytest.mark.parametrize(
    ("served", "draft", "settings", "expected"),
    [
        ("org/model", False, InstanceSettings(), ("org/model", "main")),
        ("nice-name", False, InstanceSettings(), ("nice-name", "main")),
        ("nice-name", True, InstanceSettings(), ("org/draft", "speculative")),
        ("nice-name", True, InstanceSettings(model="mine"), ("mine", "speculative")),
    ],
)
def test_ranks_follow_the_engines_own_state(
    served: str,
    draft: bool,
    settings: InstanceSettings,
    expected: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scheduler's coordinates are SGLang's; a draft is a separate image with its own name."""
    parallel = SimpleNamespace(
        tp_rank=3, tp_size=4, pp_rank=1, pp_size=2, moe_ep_rank=1, moe_ep_size=2, attn_dp_size=2,
        attn_dp_rank=1, dp_rank=None, attn_tp_size=2, attn_cp_size=1, moe_dp_size=1,
    )  # fmt: skip
    arguments = SimpleNamespace(
        model_path="org/model", served_model_name=served, attention_backend="triton", moe_runner_backend="auto",
        init_expert_location="trivial", ep_num_redundant_experts=0, kv_cache_dtype="fp8_e4m3",
    )  # fmt: skip
    context = SimpleNamespace(server_args=arguments)
    install_fake_module(
        monkeypatch, "sglang.srt.runtime_context", get_parallel=lambda: parallel, get_context=lambda: context
    )
    monkeypatch.setattr(identity, "version", lambda _: "0.5.23")
    monkeypatch.setattr(identity, "model_class", lambda _: RecordingServedModel)
    found = identity.identity_of(
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
    assert expected == (found.model, found.rank.role)
    assert Rank(
        tp=3, tp_size=4, pp=1, pp_size=2, ep=1, ep_size=2, dp=1, role=found.rank.role
    ) == found.rank  # fmt: skip
    assert {
        "engine sglang 0.5.23", "device cpu", "dtype bfloat16", "quantization fp8",
        f"config {compat.digest({'rope_theta': 1e4})}", "kv_cache_dtype fp8_e4m3",
    } < set(found.facts)  # fmt: skip


def test_readers_may_finish_before_the_schedulers_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """On SIGTERM the server's instances are drained before its schedulers are stopped."""
    drained: list[str] = []

    class ShutdownReq:
        """SGLang's message."""

    def drain(client: object, replica: str, *, wait_s: float, force: bool, stop: object) -> list[object]:
        drained.append(f"{replica} {wait_s:g} {force}")
        return []

    install_fake_module(monkeypatch, "sglang.srt.managers.io_struct", ShutdownReq=ShutdownReq)
    monkeypatch.setattr(launch, "drain_replica", drain)
    one = launcher.SigtermDrain(InstanceSettings(planner="http://127.0.0.1:9", replica="sglang-1", drain_timeout_s=30))
    one.before_dispatch(SimpleNamespace(), ShutdownReq())
    one.on_sigterm(None, SimpleNamespace())
    one.on_sigterm(None, SimpleNamespace())
    one.before_dispatch(SimpleNamespace(), ShutdownReq())
    assert ["sglang-1 30 True"] == drained


def test_a_failed_drain_does_not_prevent_the_exit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server exits whatever fails, and logs one line about the missing drain."""

    def busy(*_: object, **__: object) -> list[object]:
        raise SourceBusy("still read")

    monkeypatch.setattr(launch, "drain_replica", busy)
    one = launcher.SigtermDrain(InstanceSettings(planner="http://127.0.0.1:9", replica="sglang-1"))
    with caplog.at_level(logging.INFO, "rfork"):
        one._drain()
    assert one._drained.is_set()
    assert 1 == caplog.text.count("failed to drain the seeds reason=")


def install_fake_module(monkeypatch: pytest.MonkeyPatch, name: str, **content: object) -> None:
    """Install a fake module in place of SGLang's."""
    module = ModuleType(name)
    module.__dict__.update(content)
    monkeypatch.setitem(sys.modules, name, module)

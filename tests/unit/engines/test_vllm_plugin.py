"""Parts of the vLLM plug-in that do not need vLLM: names, options, facts, hook targets and shutdown."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rfork.engines import early_imports, launch
from rfork.engines.hook_targets import Compatibility, HookTarget
from rfork.engines.vllm import compat, engine_manager, hooks, methods, plugin
from rfork.engines.vllm.compat import model_name, settings_of
from rfork.errors import EngineMismatch, SettingsError


@pytest.mark.parametrize(
    ("model", "configured_name", "draft", "expected"),
    [
        ("org/model", None, False, "org/model"),
        ("org/model", "mine", False, "mine"),
        ("org/draft", "mine", True, "mine/org/draft"),
        ("org/draft", None, True, "org/draft"),
    ],
)
def test_a_hub_id_is_the_model_name(model: str, configured_name: str | None, draft: bool, expected: str) -> None:
    """A hub id is kept; a setting names the main model and distinguishes drafts."""
    assert expected == model_name(model, configured_name, draft)


def test_command_line_options_are_settings() -> None:
    """They override the environment; an unknown name is one clear error."""
    parsed = settings_of(SimpleNamespace(model_loader_extra_config={"planner": "http://a:1", "drain_timeout_s": 3}))
    assert "http://a:1" == parsed.planner
    assert 3.0 == parsed.drain_timeout_s
    with pytest.raises(SettingsError, match="unknown rfork setting 'planer'") as caught:
        settings_of(SimpleNamespace(model_loader_extra_config={"planer": "http://a:1"}))
    assert "did you mean 'planner'?" == caught.value.hint
    with pytest.raises(SettingsError, match="RFORK_DRAIN_TIMEOUT_S"):
        settings_of(SimpleNamespace(model_loader_extra_config={"drain_timeout_s": -1}))


@pytest.mark.parametrize(
    ("name", "is_weight"),
    [
        ("model.layers.0.self_attn.attn.kv_cache.0", False),
        ("model.layers.0.self_attn.rotary_emb.cos_sin_cache", False),
        ("deepstack_input_embeds.0", False),
        ("per_layer_embeddings", False),
        ("model.positions", False),
        ("language_model.model.hidden_states", False),
        ("language_model.model.per_layer_inputs", False),
        ("model.layers.3.self_attn.indexer.topk_indices_buffer", False),
        ("model.layers.3.self_attn.impl._topk_indices_buffer", False),
        ("model.candidate_block_buffer", False),
        ("model._mtp_hidden_buffer", False),
        ("_ds_buffers.1", False),
        ("model.embed_positions.weight", True),
        ("model.embed_tokens_per_layer.weight", True),
        ("model.layers.0.per_layer_projection.weight", True),
        ("visual.deepstack_merger_list.0.norm.weight", True),
        ("model.layers.0.self_attn.qkv_proj.weight", True),
    ],
)
def test_tensors_overwritten_by_forward_passes_are_not_weights(name: str, is_weight: bool) -> None:
    """The names are those of vLLM 0.32, and similar names of weights."""
    assert is_weight == (not any(fnmatchcase(name, pattern) for pattern in compat.NON_WEIGHT_PATTERNS))


class Configuration:
    """The part of a model's configuration that is used here."""

    def __init__(self, **values: object) -> None:
        self.hf_config = self
        self._values = values

    def to_dict(self) -> dict[str, object]:
        return self._values


TEXT = {"_name_or_path": "/a", "id2label": {0: "a"}}
PLAIN = {"rope_theta": 1e4, "_name_or_path": "/a", "text_config": TEXT}


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (PLAIN, True),
        (dict(reversed(PLAIN.items())), True),
        ({**PLAIN, "_name_or_path": "/b", "transformers_version": "9"}, True),
        ({**PLAIN, "text_config": {**TEXT, "_name_or_path": "/b"}}, True),
        ({**PLAIN, "rope_theta": 1e6}, False),
        ({**PLAIN, "text_config": {"id2label": {0: "b"}}}, False),
    ],
)
def test_the_configuration_is_a_fact(other: dict[str, object], same: bool) -> None:
    """Overrides by --hf-overrides distinguish two images; the location of a configuration does not."""
    known = compat.configuration(Configuration(**PLAIN))
    assert same == (known == compat.configuration(Configuration(**other)))
    opaque = [Configuration(value=object()) for _ in range(2)]
    assert 1 == len({compat.configuration(config) for config in opaque})


def test_kernel_options_are_facts() -> None:
    """They come from vLLM's variables and from its configuration."""

    def kernel_facts(deep: bool, moe: str) -> str:
        config = SimpleNamespace(kernel_config=SimpleNamespace(moe_backend=moe))
        return compat.kernels(config, SimpleNamespace(VLLM_USE_DEEP_GEMM=deep))

    assert kernel_facts(True, "auto") == kernel_facts(True, "auto")
    assert 3 == len({kernel_facts(True, "auto"), kernel_facts(False, "auto"), kernel_facts(True, "marlin")})


CORE = HookTarget("vllm.loader.get_model_loader")
SLEEP = HookTarget("vllm.worker.Worker.sleep", ("level",), "lifecycle")
STEP = HookTarget("vllm.worker.Worker.execute_model", (), "comfort")
MISSING = "does not exist"


@pytest.mark.parametrize(
    ("version", "compatibility", "unknown", "no_fork", "no_seed", "warnings"),
    [
        ("1.2.3+cpu", Compatibility(), (), None, None, ()),
        (
            "9.9.9",
            Compatibility(core=[(CORE, MISSING)], lifecycle=[(SLEEP, MISSING)]),
            ("swap_weights",),
            "vLLM 9.9.9 is incompatible with this rfork (tested: 1.2.3): vllm.loader.get_model_loader does not exist",
            None,
            (),
        ),
        (
            "1.2.3",
            Compatibility(lifecycle=[(SLEEP, MISSING)]),
            ("swap_weights",),
            None,
            "vLLM 1.2.3 is incompatible with this rfork (tested: 1.2.3): vllm.worker.Worker.sleep does not exist",
            (),
        ),
        (
            "1.2.3",
            Compatibility(comfort=[(STEP, MISSING)]),
            (),
            None,
            None,
            ("some features of rfork are off with vLLM 1.2.3: vllm.worker.Worker.execute_model does not exist",),
        ),
        (
            "9.9.9",
            Compatibility(),
            ("move_weights", "swap_weights"),
            None,
            "vLLM 9.9.9 may change weights in unknown worker methods: move_weights, swap_weights",
            ("untested vLLM version 9.9.9 (tested: 1.2.3)",),
        ),
    ],
    ids=["tested", "core", "lifecycle", "comfort", "unknown methods"],
)
def test_a_version_is_judged_by_what_it_lacks(
    version: str,
    compatibility: Compatibility,
    unknown: Sequence[str],
    no_fork: str | None,
    no_seed: str | None,
    warnings: Sequence[str],
) -> None:
    """Without a core target vLLM loads; without one of the lifecycle, or with an unknown method, it does not seed."""
    decision = compat.decide(version, compatibility, unknown, tested=("1.2.3",))
    assert no_fork == decision.no_fork_reason
    assert no_seed == decision.no_seed_reason
    assert tuple(warnings) == decision.warnings


def test_every_wrapped_method_is_a_hook_target() -> None:
    """Methods that change weights are checked as such; the others only measure or drain."""
    tiers = {
        target.path.rpartition(".")[2]: target.tier for target in compat.HOOK_TARGETS if compat.WORKER in target.path
    }
    assert hooks.WRAPPERS.keys() <= tiers.keys()
    comfort = {name for name in hooks.WRAPPERS if tiers[name] == "comfort"}
    assert hooks.MEASURED | {"shutdown"} == comfort


def worker_type(*bases: type, module: str = "vllm.v1.worker.gpu_worker", **methods: str) -> type:
    """Return a class of that module with methods of these names."""
    content = dict.fromkeys(methods, lambda self: None)
    return type("Worker", bases, {**content, "__module__": module})


def test_a_new_method_that_may_change_weights_is_found() -> None:
    """Known methods, other names, and methods of a worker extension do not count."""
    extension = worker_type(module="mine.extension", update_params="")
    found = worker_type(extension, sleep="", add_lora="", profile="", quick_reload="", swap_layers="", _load="")
    assert ["quick_reload", "swap_layers"] == compat.unknown_weight_methods(found)


def test_names_that_an_older_vllm_lacks_have_fallbacks() -> None:
    """Without vLLM's timeout there is no limit; without its context, kernels are not rebuilt."""
    assert math.inf == compat.load_timeout_s(SimpleNamespace())
    assert 600.0 == compat.load_timeout_s(SimpleNamespace(VLLM_ENGINE_READY_TIMEOUT_S=600))
    assert not compat.can_skip_dummy_weights()
    with pytest.raises(EngineMismatch, match="cannot rebuild kernels"):
        compat.weights_already_processed()


def test_a_quantised_model_of_an_unknown_vllm_counts_as_quantised_online() -> None:
    """The class that identifies it does not exist here; an unquantised model is never quantised."""
    assert not compat.is_quantised_online(SimpleNamespace(quant_config=None))
    assert compat.is_quantised_online(SimpleNamespace(quant_config=object()))


class Manager:
    """The part of vLLM's manager that is wrapped."""

    def __init__(self, vllm_config: SimpleNamespace) -> None:
        self.stopped: list[float | None] = []
        self.name_of_children = os.environ.get("RFORK_REPLICA")

    def finished_procs(self) -> dict[str, int]:
        return {}

    def shutdown(self, timeout: float | None = None, *, force: bool = False) -> None:
        self.stopped.append(timeout)
        self.forced = force


def test_a_servers_seeds_are_drained_before_its_engines_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drain runs once, with the replica name of its engines; servers with another load format are unaffected."""
    utils = ModuleType("vllm.v1.engine.utils")
    manager_class = type("CoreEngineProcManager", (Manager,), dict(vars(Manager)))
    vars(utils)["CoreEngineProcManager"] = manager_class
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.setenv("RFORK_REPLICA", "")
    seen: list[str | None] = []
    monkeypatch.setattr(launch, "drain_server", lambda settings, remove: seen.append(settings.replica))
    engine_manager.hook_engine_manager()
    engine_manager.hook_engine_manager()

    def config(load_format: str) -> SimpleNamespace:
        load = SimpleNamespace(load_format=load_format, model_loader_extra_config={})
        return SimpleNamespace(load_config=load)

    other = manager_class(vllm_config=config("auto"))
    other.shutdown(timeout=1.0)
    ours = manager_class(vllm_config=config("rfork"))
    second = manager_class(vllm_config=config("rfork"))
    ours.shutdown(2.0)
    ours.shutdown()
    assert [1.0] == other.stopped
    assert [2.0, None] == ours.stopped
    assert [ours.name_of_children] == seen
    second.shutdown()
    assert [ours.name_of_children, second.name_of_children] == seen
    assert [True, True] == [str(name).startswith("vllm-") for name in seen]
    assert 2 == len(set(seen))
    assert "" == os.environ["RFORK_REPLICA"]


def test_the_engines_exit_whatever_fails_in_the_drain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A manager of another vLLM, which lacks a method, still stops its engines; invalid options still end the start."""
    utils = ModuleType("vllm.v1.engine.utils")
    content = {name: vars(Manager)[name] for name in ("__init__", "shutdown")}
    manager_class = type("CoreEngineProcManager", (), content)
    vars(utils)["CoreEngineProcManager"] = manager_class
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    engine_manager.hook_engine_manager()
    load = SimpleNamespace(load_format="rfork", model_loader_extra_config={})
    manager = manager_class(vllm_config=SimpleNamespace(load_config=load))
    manager.shutdown(timeout=2.0)
    assert [2.0] == manager.stopped
    assert "finished_procs" in caplog.text
    load.model_loader_extra_config = {"drain_timeout_s": -1}
    with pytest.raises(SettingsError, match="RFORK_DRAIN_TIMEOUT_S"):
        manager_class(vllm_config=SimpleNamespace(load_config=load))


def test_a_changed_configuration_does_not_stop_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The engines start without a common name, and one log line has the reason."""
    utils = ModuleType("vllm.v1.engine.utils")
    manager_class = type("CoreEngineProcManager", (), {"__init__": vars(Manager)["__init__"]})
    vars(utils)["CoreEngineProcManager"] = manager_class
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    monkeypatch.delenv("RFORK_REPLICA", raising=False)
    engine_manager.hook_engine_manager()
    manager = manager_class(vllm_config=SimpleNamespace(load_config=SimpleNamespace()))
    assert None is manager.name_of_children
    assert "no attribute 'load_format'" in caplog.text


def test_the_drain_survives_an_unreachable_planner() -> None:
    """A server exits whether or not its planner responds."""
    extra_config = {
        "planner": "http://127.0.0.1:0",
        "planner_timeout_s": 0.2,
        "replica": "mine",
        "drain_timeout_s": 0,
    }
    launch.drain_server(settings_of(SimpleNamespace(model_loader_extra_config=extra_config)))


def layer_of(module: str, name: str, *bases: type, declared: bool = True) -> nn.Module:
    """Return a layer with a method of that module of vLLM that defines the step after loading."""
    content: dict[str, Any] = {"supports_pre_processed_weights": declared}
    content["process_weights_after_loading"] = lambda self, layer: None
    method = type(name, bases, content | {"__module__": f"vllm.model_executor.layers.{module}"})
    layer = nn.Linear(2, 2)
    vars(layer)["quant_method"] = method()
    return layer


@pytest.mark.parametrize(
    ("layer", "device_type", "refused", "rebuilt"),
    [
        (layer_of("linear", "UnquantizedLinearMethod"), "cuda", False, False),
        (layer_of("quantization.fp8", "Fp8LinearMethod"), "cuda", False, True),
        (layer_of("quantization.fp8", "Fp8LinearMethod", declared=False), "cuda", True, False),
        (layer_of("quantization.fp8", "Fp8LinearMethod"), "cpu", True, False),
        (layer_of("quantization.online", "Fp8LinearMethod"), "cuda", True, False),
        (layer_of("quantization.mxfp4", "Mxfp4MoEMethod"), "cuda", True, False),
        (nn.Linear(2, 2), "cuda", False, False),
    ],
)
def test_methods_are_forked_if_their_state_is_known(
    layer: nn.Module, device_type: str, refused: bool, rebuilt: bool
) -> None:
    """A kernel of a GPU is rebuilt where vLLM declares that it can be; any other method must have been checked."""
    assert refused == (methods.unsupported_method(nn.Sequential(layer), device_type) is not None)
    assert rebuilt == methods.is_rebuilt(layer, device_type)


def test_the_refusal_names_the_layer_and_the_check() -> None:
    """The user may run the check, and accept the method."""
    model = nn.Sequential(layer_of("quantization.mxfp4", "Mxfp4MoEMethod"))
    reason = methods.unsupported_method(model, "cuda")
    assert (
        "Mxfp4MoEMethod has not passed the golden check on cuda: `rfork doctor --engine vllm` runs it (at 0)" == reason
    )
    assert methods.unsupported_method(model, "cuda", ("Mxfp4MoEMethod",)) is None


def cpu_layer(weight: torch.Tensor, kernel: object) -> nn.Module:
    """Return a layer as vLLM leaves it on a CPU, with the function that computes its outputs."""
    layer = nn.Module()
    layer.weight = nn.Parameter(weight)
    vars(layer)["cpu_linear"] = kernel
    return nn.Sequential(layer)


def test_weights_in_kernel_handles_are_refused() -> None:
    """The parameter is empty, and a function of vLLM has the weight."""
    reason = compat.unsupported_model(cpu_layer(torch.empty(0), lambda inputs, weight, bias: inputs))
    assert "the weight of 0 was packed into a kernel handle" == reason


@pytest.mark.parametrize("kernel", [torch.nn.functional.linear, lambda inputs, weight, bias: inputs])
def test_weights_that_are_kept_are_served(kernel: object) -> None:
    """A parameter with values is in the image, whatever computes with it."""
    assert compat.unsupported_model(cpu_layer(torch.ones(2, 2), kernel)) is None


def test_layers_that_are_never_called_are_served() -> None:
    """Latent attention drops the weight of a layer, from which it has derived its own tensors."""
    assert compat.unsupported_model(cpu_layer(torch.empty(0), torch.nn.functional.linear)) is None


def test_a_forks_modules_are_imported_while_the_device_is_initialized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only in a worker whose load format is rfork; the engine's method runs once, with its arguments."""
    imports, calls = list[str](), list[tuple[object, ...]]()
    worker_base = ModuleType("vllm.v1.worker.worker_base")

    class WorkerWrapperBase:
        def __init__(self, load_format: str) -> None:
            self.vllm_config = SimpleNamespace(load_config=SimpleNamespace(load_format=load_format))

        def init_device(self, *args: object) -> str:
            calls.append(args)
            return "done"

    vars(worker_base)["WorkerWrapperBase"] = WorkerWrapperBase
    monkeypatch.setitem(sys.modules, worker_base.__name__, worker_base)
    monkeypatch.setattr(early_imports, "import_module", imports.append)
    plugin._hook_workers()
    assert "done" == WorkerWrapperBase("auto").init_device(1)
    assert [] == imports
    assert "done" == WorkerWrapperBase("rfork").init_device(2)
    assert list(early_imports.MODULES) == imports
    assert [(1,), (2,)] == calls


def test_a_vllm_without_that_class_is_not_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fork then imports its modules itself."""
    monkeypatch.delitem(sys.modules, "vllm.v1.worker.worker_base", raising=False)
    plugin._hook_workers()

"""Every attribute that rfork uses on an engine's object exists in the installed engine.

Engines have no types, and unit tests replace their objects by fakes, so that a wrong name would otherwise be
found only by a real server.
"""

from __future__ import annotations

import ast
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.engines.engine_server import ROOT, engine_python

VLLM = {
    "worker": ("vllm.v1.worker.gpu_worker.Worker",),
    "output": ("vllm.v1.outputs.ModelRunnerOutput", "vllm.v1.outputs.AsyncModelRunnerOutput"),
    "manager": ("vllm.v1.engine.utils.CoreEngineProcManager",),
    "vllm_config": ("vllm.config.VllmConfig",),
    "_vllm_config": ("vllm.config.VllmConfig",),
    "config": ("vllm.config.VllmConfig",),
    "model_config": ("vllm.config.ModelConfig",),
    "_model_config": ("vllm.config.ModelConfig",),
    "load_config": ("vllm.config.LoadConfig",),
    "parallel": ("vllm.config.ParallelConfig",),
    "parallel_config": ("vllm.config.ParallelConfig",),
    "parallel_state": ("vllm.distributed.parallel_state",),
    "offload": ("vllm.config.OffloadConfig",),
    "uva": ("vllm.config.UVAOffloadConfig",),
    "prefetch": ("vllm.config.PrefetchOffloadConfig",),
    "device_config": ("vllm.config.DeviceConfig",),
    "cache_config": ("vllm.config.CacheConfig",),
    "speculative": ("vllm.config.SpeculativeConfig",),
    "compilation": ("vllm.config.CompilationConfig",),
    "chosen": ("vllm.config.KernelConfig",),
    "tensor": ("vllm.distributed.parallel_state.GroupCoordinator",),
    "pipeline": ("vllm.distributed.parallel_state.GroupCoordinator",),
    "experts": ("vllm.distributed.parallel_state.GroupCoordinator",),
    "method": (
        "vllm.model_executor.layers.quantization.base_config.QuantizeMethodBase",
        "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod",
    ),
    "envs": ("vllm.envs",),
    "custom_ops": ("vllm._custom_ops",),
    "layer_utils": ("vllm.model_executor.layers.utils",),
    "current_platform": ("vllm.platforms.interface.Platform",),
}
"""Variables and attributes in `rfork/engines/vllm` that refer to objects of vLLM, with their classes."""
NOT_VLLM = {("method", "__mro__"), ("tensor", "numel")}

SGLANG_SRT = "sglang.srt"
WEIGHT_UPDATER = f"{SGLANG_SRT}.model_executor.model_runner_components.weight_updater.WeightUpdater"
MODEL_RUNNER = f"{SGLANG_SRT}.model_executor.model_runner.ModelRunner"
SGLANG = {
    "scheduler": (f"{SGLANG_SRT}.managers.scheduler.Scheduler",),
    "tp_worker": (f"{SGLANG_SRT}.managers.tp_worker.TpModelWorker",),
    "worker": (
        f"{SGLANG_SRT}.managers.tp_worker.TpModelWorker",
        f"{SGLANG_SRT}.speculative.base_spec_worker.BaseSpecWorker",
    ),
    "drafts": (f"{SGLANG_SRT}.speculative.base_spec_worker.EagleDraftWorkerBase",),
    "model_runner": (MODEL_RUNNER,),
    "runner": (WEIGHT_UPDATER, MODEL_RUNNER),
    "manager": (f"{SGLANG_SRT}.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager",),
    "batch": (f"{SGLANG_SRT}.managers.schedule_batch.ScheduleBatch",),
    "forward_mode": (f"{SGLANG_SRT}.model_executor.forward_batch_info.ForwardMode",),
    "result": (
        f"{SGLANG_SRT}.managers.utils.GenerationBatchResult",
        f"{SGLANG_SRT}.managers.io_struct.UpdateWeightFromDiskReqOutput",
    ),
    "recv_req": (
        f"{SGLANG_SRT}.managers.io_struct.UpdateWeightFromDiskReqInput",
        f"{SGLANG_SRT}.managers.io_struct.ReleaseMemoryOccupationReqInput",
        f"{SGLANG_SRT}.managers.io_struct.CheckWeightsReqInput",
    ),
    "model_config": (f"{SGLANG_SRT}.configs.model_config.ModelConfig",),
    "_model_config": (f"{SGLANG_SRT}.configs.model_config.ModelConfig",),
    "load_config": (f"{SGLANG_SRT}.configs.load_config.LoadConfig",),
    "device_config": (f"{SGLANG_SRT}.configs.device_config.DeviceConfig",),
    "context": (f"{SGLANG_SRT}.runtime_context.RuntimeContext",),
    "HookRegistry": (f"{SGLANG_SRT}.plugins.hook_registry.HookRegistry",),
    "HookType": (f"{SGLANG_SRT}.plugins.hook_registry.HookType",),
    "arguments": (f"{SGLANG_SRT}.server_args.ServerArgs",),
}
"""The same for SGLang."""
NOT_SGLANG = {("arguments", "get"), ("_model_config", "modelopt_quant")}
"""The second is optional: SGLang's own loaders read it only if it exists."""


def used_attributes(folder: Path, objects: Mapping[str, object]) -> set[tuple[str, str]]:
    """Return (variable or attribute, name of what is read from it) for these objects in the modules of a folder."""
    return {
        (owner, name)
        for module in folder.glob("*.py")
        for owner, name in _reads(ast.parse(module.read_text()))
        if owner in objects
    }


def _reads(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name):
                yield owner, name
            case ast.Call(
                func=ast.Name(id="getattr"),
                args=[ast.Name(id=owner) | ast.Attribute(attr=owner), ast.Constant(value=str(name)), *_],
            ):
                yield owner, name
            case _:
                pass


@pytest.mark.parametrize(
    ("engine", "objects", "others"), [("vllm", VLLM, NOT_VLLM), ("sglang", SGLANG, NOT_SGLANG)], ids=["vllm", "sglang"]
)
def test_attributes_of_the_engines_objects_exist(
    engine: str, objects: Mapping[str, tuple[str, ...]], others: set[tuple[str, str]]
) -> None:
    """Each is defined, declared or set by the class of the installed engine."""
    used = sorted(used_attributes(ROOT / "rfork" / "engines" / engine, objects) - others)
    assert used
    run = subprocess.run(
        [engine_python(engine), "-m", "tests.engines.engine_attributes_probe"],
        input=json.dumps([[objects[owner], name] for owner, name in used]),
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, run.stderr
    assert [] == json.loads(lines[-1].removeprefix("RESULT "))

"""The plug-in in the installed vLLM: its hook targets, and the configurations that it does not support."""

from __future__ import annotations

import json
import subprocess

from tests.engines.engine_server import ROOT, engine_python

PROBE = """
import json
from types import SimpleNamespace as Some
from vllm import __version__
from torch import nn
from rfork.engines import shared_tensors
from rfork.engines.vllm import compat, identity, plugin
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as loaders

decision = compat.decide_installed(__version__)
plugin.register()
first = loaders["rfork"]
plugin.register()

def reason(
    device="cuda", quantization=None, is_moe=False, method=None, gigabytes=0, architectures=(), **parallel,
):
    shape = dict(
        worker_cls="vllm.v1.worker.gpu_worker.Worker", enable_eplb=False, enable_elastic_ep=False,
        decode_context_parallel_size=1, world_size_across_dp=1, pipeline_parallel_size=1,
    )
    model = Some(quantization=quantization, is_moe=is_moe, hf_config=Some(architectures=architectures))
    config = Some(
        parallel_config=Some(**{**shape, **parallel}),
        offload_config=Some(uva=Some(cpu_offload_gb=gigabytes), prefetch=Some(offload_group_size=0)),
        device_config=Some(device_type=device),
        speculative_config=Some(method=method, draft_model_config=model) if method else None,
        quant_config=None,
    )
    return identity.unsupported_config(config, model)

result = {
    "no_fork": decision.no_fork_reason, "no_seed": decision.no_seed_reason, "warnings": decision.warnings,
    "skips_dummy_weights": compat.can_skip_dummy_weights(),
    "same": loaders["rfork"] is first,
    "supported": [
        reason(), reason("cpu"), reason(quantization="fp8"), reason(is_moe=True), reason(method="draft_model"),
        reason("cpu", "fp8"), reason("cpu", is_moe=True),
    ],
    "unsupported": {
        "worker": reason(worker_cls="mine.Worker"), "device": reason("xpu"),
        "offload": reason(gigabytes=1), "eplb": reason(enable_eplb=True),
        "elastic": reason(enable_elastic_ep=True), "context": reason(decode_context_parallel_size=2),
        "draft": reason(method="medusa"),
        "rules": reason(method="mtp", architectures=["Gemma4MTPModel"]),
        "main": reason(method="eagle"),
        "stages": reason(method="eagle", pipeline_parallel_size=2),
    },
}
main = nn.Linear(1, 1)
shared_tensors.remember_main(main)
result["supported"] += [reason(method=method) for method in ("eagle", "eagle3", "mtp")]
print("RESULT " + json.dumps(result))
"""


def test_the_installed_vllm_is_compatible() -> None:
    """All hook targets match, registering is idempotent, and each unsupported configuration has its reason."""
    run = subprocess.run([engine_python("vllm"), "-c", PROBE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = [line for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, run.stderr
    result = json.loads(lines[-1].removeprefix("RESULT "))
    assert None is result["no_fork"]
    assert None is result["no_seed"]
    assert [] == result["warnings"]
    assert result["skips_dummy_weights"]
    assert result["same"]
    assert [None] * 10 == result["supported"]
    words = {
        "worker": "worker class", "device": "xpu",
        "offload": "offloaded", "eplb": "balancing", "elastic": "elastic", "context": "context parallelism",
        "draft": "medusa", "rules": "Gemma4MTPModel", "main": "main model", "stages": "pipeline stages",
    }  # fmt: skip
    assert words.keys() == {name for name, reason in result["unsupported"].items() if words[name] in reason}

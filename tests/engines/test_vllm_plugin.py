"""The plug-in beside the vLLM that is installed: its hook points, and which servers it leaves alone."""

from __future__ import annotations

import json
import subprocess

from tests.engines.engine_server import ROOT, engine_python

PROBE = """
import json
from types import SimpleNamespace as Some
from vllm import __version__
from rfork.engines.vllm import plugin, points, refusing
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as loaders

points.check(__version__)
plugin.register()
first = loaders["rfork"]
plugin.register()

def why(device="cuda", quantization=None, is_moe=False, method=None, gigabytes=0, **parallel):
    shape = dict(
        worker_cls="vllm.v1.worker.gpu_worker.Worker", enable_eplb=False, enable_elastic_ep=False,
        decode_context_parallel_size=1, world_size_across_dp=1,
    )
    model = Some(quantization=quantization, is_moe=is_moe)
    config = Some(
        parallel_config=Some(**{**shape, **parallel}),
        offload_config=Some(uva=Some(cpu_offload_gb=gigabytes), prefetch=Some(offload_group_size=0)),
        device_config=Some(device_type=device),
        speculative_config=Some(method=method, draft_model_config=model) if method else None,
        quant_config=None,
    )
    return refusing.reason(config, model)

told = {
    "moved": [wrong for _, wrong in points.moved(points.POINTS)],
    "same": loaders["rfork"] is first,
    "plain": [why(), why("cpu"), why(quantization="fp8"), why(is_moe=True), why(method="draft_model")],
    "refused": {
        "worker": why(worker_cls="mine.Worker"), "device": why("xpu"), "quantised": why("cpu", "fp8"),
        "experts": why("cpu", is_moe=True), "offload": why(gigabytes=1), "eplb": why(enable_eplb=True),
        "elastic": why(enable_elastic_ep=True), "context": why(decode_context_parallel_size=2),
        "draft": why(method="eagle"),
    },
}
print("TOLD " + json.dumps(told))
"""


def test_installed_vllm_is_as_it_was_tested() -> None:
    """No hook point has moved, registering twice is registering once, and each refusal has its reason."""
    run = subprocess.run([engine_python("vllm"), "-c", PROBE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    lines = [line for line in run.stdout.splitlines() if line.startswith("TOLD ")]
    assert lines, run.stderr
    result = json.loads(lines[-1].removeprefix("TOLD "))
    assert ([], True, [None] * 5) == (result["moved"], result["same"], result["plain"])
    words = {
        "worker": "worker class", "device": "xpu", "quantised": "packed", "experts": "experts",
        "offload": "offloaded", "eplb": "balancing", "elastic": "elastic", "context": "context parallelism",
        "draft": "eagle",
    }  # fmt: skip
    assert words.keys() == {name for name, why in result["refused"].items() if words[name] in why}

"""Runs one engine with one model in the engine's own Python and prints the measurements as JSON.

``python -m benchmarks.engines.engine_process ENGINE '{"arguments": {…}, "began": …, "stays": false}'``. It
prints one line ``BENCH {…}`` with an `EngineRun` and ends; with `stays` it ends when its standard input
closes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

PROMPT = "The capital of France is"
TOKENS = 4
LOADING: Mapping[str, str] = MappingProxyType({"vllm": "BENCH_LOADS", "sglang": "Load weight begin"})
"""Output of each engine's process at the moment from which its weights' time counts."""
ELAPSED = re.compile(r"Load weight end\. elapsed=([0-9.]+) s")


def main() -> None:
    """Run the case that the command line describes."""
    engine, options = sys.argv[1], json.loads(sys.argv[2])
    run = _vllm if engine == "vllm" else _sglang
    run(options)


def _vllm(options: dict[str, Any]) -> None:
    from vllm import LLM, SamplingParams
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.v1.worker import cpu_model_runner

    seconds: list[float] = []
    get_model = cpu_model_runner.get_model

    @functools.wraps(get_model)
    def timed(**keywords: Any) -> Any:
        get_model_loader(keywords["vllm_config"].load_config)  # imported before the clock starts
        print(LOADING["vllm"], flush=True)
        began = time.monotonic()
        model = get_model(**keywords)
        seconds.append(time.monotonic() - began)
        return model

    cpu_model_runner.get_model = timed
    llm = LLM(**options["arguments"])
    greedy = SamplingParams(temperature=0, max_tokens=1)
    first = llm.generate([PROMPT], greedy, use_tqdm=False)
    generated = time.monotonic()
    read = _read_bytes()
    if folder := options.get("tensorize"):
        _write_tensorizer(llm, Path(folder))
    more = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=TOKENS), use_tqdm=False)
    tokens = list(more[0].outputs[0].token_ids)
    if list(first[0].outputs[0].token_ids) != tokens[:1]:
        raise RuntimeError("two greedy responses differ")
    _print_result(sum(seconds), generated - options["began"], read, tokens)
    _serve_until_stopped(options)


def _write_tensorizer(llm: Any, folder: Path) -> None:
    """Write the model in vLLM's own tensorizer format.

    vLLM writes the tensors of a model in a local folder, then fails to fetch the folder's other files from a
    hub.
    """
    from vllm.model_executor.model_loader.tensorizer import TensorizerConfig

    config = TensorizerConfig(tensorizer_uri=str(folder / "model.tensors"))
    with contextlib.suppress(ValueError):
        llm.collective_rpc("save_tensorized_model", kwargs={"tensorizer_config": config.to_serializable()})


def _sglang(options: dict[str, Any]) -> None:
    import sglang

    engine = sglang.Engine(**options["arguments"])
    parameters = {"temperature": 0, "max_new_tokens": 1}
    engine.generate(PROMPT, parameters)
    generated = time.monotonic()
    read = _read_bytes()
    output = engine.generate(PROMPT, {**parameters, "max_new_tokens": TOKENS})
    found = ELAPSED.search(Path(options["log"]).read_text(errors="replace"))
    if found is None:
        raise RuntimeError("SGLang did not log the load time of its weights")
    _print_result(float(found[1]), generated - options["began"], read, list(output["output_ids"]))
    _serve_until_stopped(options)
    engine.shutdown()


def _read_bytes() -> int:
    """Return the bytes that this process and its children read from block devices."""
    family, added = {os.getpid()}, True
    parents = {int(entry.name): _parent(entry) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    while added:
        new = {pid for pid, parent in parents.items() if parent in family} - family
        family |= new
        added = bool(new)
    return sum(_io(pid) for pid in family)


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _io(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    except OSError:
        return 0
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def _print_result(weights_s: float, first_token_s: float, read_bytes: int, tokens: list[int]) -> None:
    result = {
        "weights_s": weights_s,
        "first_token_s": first_token_s,
        "read_bytes": read_bytes,
        "tokens": tokens,
    }
    print(f"BENCH {json.dumps(result)}", flush=True)


def _serve_until_stopped(options: dict[str, Any]) -> None:
    if options.get("stays"):
        sys.stdin.read()


if __name__ == "__main__":
    main()

"""vLLM's part of the matrix of versions (`tests.engines.matrix`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self

from rfork.engines.hook_targets import HookTarget
from rfork.engines.vllm import compat
from tests.engines.matrix import ROOT
from tests.engines.model_folders import copy_without_weights, make_tiny
from tests.engines.planner_process import PlannerProcess
from tests.engines.queries import PROMPTS, TOKENS, wait_serving
from tests.engines.reference_digests import fused_digests
from tests.engines.wheel_sources import WheelSources
from tests.models import make_tiny_llama

RESULT = "RESULT "


class ModelProcess:
    """vLLM in one process with one model (`tests.engines.vllm_model`), which executes commands one by one."""

    def __init__(self, python: Path, model: Path, log: Path, **options: object) -> None:
        """`options` are arguments of vLLM's `LLM`."""
        self._log_file = log
        self._log = log.open("w")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RFORK_")}
        environment |= {
            **{"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"},
            **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            **{"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}", "PYTHONPATH": str(ROOT)},
        }
        self._process = subprocess.Popen(
            [python, "-m", "tests.engines.vllm_model", model, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment, cwd=ROOT, text=True,
        )  # fmt: skip

    def call(self, command: str, *arguments: object) -> Any:
        """Execute a command and return its result. RuntimeError with the end of its log if the process has ended."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the process has no pipes")
        self._process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(RESULT):
                return json.loads(line.removeprefix(RESULT))
            self._log.write(line)
        self._log.flush()
        lines = self._log_file.read_text(errors="replace").splitlines()
        raise RuntimeError(f"{lines[-1] if lines else 'it ended'}\n" + "\n".join(lines[-80:]))

    def content(self) -> Mapping[str, Any]:
        """Return its greedy tokens, and the SHA-256 of its tensors by name."""
        return {"tokens": self.call("tokens", PROMPTS, TOKENS), "tensors": self.call("digests")}

    def log(self) -> str:
        """Return its output so far."""
        self._log.flush()
        return self._log_file.read_text(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


class VllmMatrix:
    """Forks one tiny model between two processes of one vLLM version."""

    name = "vllm"
    versions: Sequence[str] = ("0.26.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")
    without_cpu_build: Mapping[str, str] = {"0.33.0": "no CPU build exists"}

    def distribution(self, version: str) -> str:
        return f"vllm=={version}"

    def hook_targets(self, sources: WheelSources) -> Sequence[HookTarget]:
        return compat.HOOK_TARGETS

    def check_methods(self, sources: WheelSources) -> Sequence[str]:
        names = sources.public_methods(compat.WORKER)
        return [name for name in names if compat.WEIGHT_METHODS.search(name) and name not in compat.KNOWN_METHODS]

    def fork(self, version: str, python: Path, scratch: Path) -> str:
        """Compare a fork with vLLM's own load, and a fork of weights updated in place with the updated seed."""
        make_tiny_llama(scratch / "tokenizer")
        first, second = (scratch / name / "tiny-llama" for name in ("first", "second"))
        for seed, folder in enumerate((first, second)):
            make_tiny(folder, scratch / "tokenizer", "llama", seed=seed)
        bare = copy_without_weights(first, scratch)
        with ModelProcess(python, first, scratch / "own.log", load_format="auto") as own:
            require("version", version, own.call("version"))
            expected = own.content()
        with PlannerProcess() as planner:
            options = {"load_format": "rfork", "model_loader_extra_config": {"planner": planner.url}}
            with ModelProcess(python, first, scratch / "seed.log", **options) as source:
                compare(source, expected, "fallback")
                with ModelProcess(python, bare, scratch / "fork.log", **options) as target:
                    compare(target, expected, "forked")
                source.call("reload", str(second))
                updated = source.content()
                if updated["tokens"] == expected["tokens"]:
                    raise AssertionError("an update in place did not change the tokens")
                for name, digest in fused_digests(second).items():
                    require(f"updated {name}", digest, updated["tensors"][name])
                wait_serving(planner, 1)
                with ModelProcess(python, bare, scratch / "updated.log", **options) as target:
                    compare(target, updated, "forked")
                warnings = [line for line in source.log().splitlines() if "features of rfork are off" in line]
        return "; ".join(("forked; forked after an update in place", *warnings[:1]))


def compare(process: ModelProcess, expected: Mapping[str, object], outcome: str) -> None:
    """Raise AssertionError unless a process got its weights in this way, and has the expected tokens and tensors."""
    if (found := process.call("outcome")) != outcome:
        raise AssertionError(f"expected {outcome}, found {found}\n{process.log()}")
    for name, value in process.content().items():
        require(name, expected[name], value)


def require(what: str, expected: object, found: object) -> None:
    """Raise AssertionError unless both are equal."""
    if expected != found:
        raise AssertionError(f"{what} differ: expected {expected!r}, found {found!r}")

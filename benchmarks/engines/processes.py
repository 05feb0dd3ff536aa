"""Processes of the benchmark: a planner, long-running seeds, and children that load once and end."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx

from benchmarks.engines.cases import RFORK, EngineCase, EngineName, EngineRun
from benchmarks.engines.engine_process import LOADING
from benchmarks.memory_reserve import MemoryReserve
from rfork.errors import RforkError

ROOT = Path(__file__).parents[2]
SET_UP = ROOT / "tests" / "engines" / "setup"
PYTHONS: Mapping[EngineName, str] = {"vllm": "RFORK_TEST_VLLM_PYTHON", "sglang": "RFORK_TEST_SGLANG_PYTHON"}
START_S = 300.0
POLL_INTERVAL_S = 0.02
RESERVED_IMAGES = 2
"""Memory kept for a run, in images: for its weights, and for the page cache of its files."""
COMMON: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
VARIABLES: Mapping[EngineName, Mapping[str, str]] = {
    "vllm": {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    },
    "sglang": {
        "SGLANG_USE_CPU_ENGINE": "1",
        "MOONCAKE_PROTOCOL": "tcp",
        "MC_TRANSFER_TIMEOUT": "100",
        "SGLANG_HOST_IP": "127.0.0.1",
    },
}
ARGUMENTS: Mapping[EngineName, Mapping[str, object]] = {
    "vllm": {
        "dtype": "bfloat16",
        "max_model_len": 512,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.3,
        "disable_log_stats": True,
    },
    "sglang": {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "dtype": "bfloat16",
        "max_total_tokens": 2048,
        "context_length": 512,
        "log_level": "info",
        # Otherwise an idle seed takes a core from its readers.
        "sleep_on_idle": True,
    },
}
FOLDER: Mapping[EngineName, str] = {"vllm": "model", "sglang": "model_path"}


class EngineFailed(RforkError):
    """An engine's process ended without a response; the message has the end of its log."""


def python_of(engine: EngineName) -> Path | None:
    """Return the engine's own Python: that of `make test-engines`, or of a variable; None if there is none."""
    found = Path(os.environ.get(PYTHONS[engine]) or ROOT / f".venv-{engine}/bin/python")
    return found if found.is_file() else None


def inherited_environment() -> dict[str, str]:
    """Return this process's variables without settings of rfork, for a process with cached bytecode.

    An installed package has bytecode. Compiling rfork's modules in each process would take as long as a fork.
    """
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RFORK_") and name != "PYTHONDONTWRITEBYTECODE"
    }


class EngineProcesses:
    """Context manager that starts the processes; `folder` has ``model``, ``bare`` and the logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.image_bytes = 0
        """Size of the model: children find that much memory that was not returned to the host."""
        self.planner = ""
        self._stack = contextlib.ExitStack()
        self._count = 0

    def run(self, case: EngineCase, variables: Mapping[str, str]) -> EngineRun:
        """Run one child from start to end. Raises EngineFailed."""
        with self.child(case, variables, keep_running=False) as (_, run):
            return run

    @contextlib.contextmanager
    def child(
        self,
        case: EngineCase,
        variables: Mapping[str, str],
        *,
        keep_running: bool,
        options: Mapping[str, object] | None = None,
    ) -> Iterator[tuple[int, EngineRun]]:
        """Run a child that has loaded, for the block or until it ends; yields its process id and its
        `EngineRun`.
        """
        python = python_of(case.engine)
        if python is None:
            raise EngineFailed(f"{case.engine} is not installed", hint="make test-engines")
        self._count += 1
        reserve = MemoryReserve()
        reserve.acquire(RESERVED_IMAGES * self.image_bytes)
        log = self.folder / f"{self._count:03}-{case.engine}.log"
        arguments = {**ARGUMENTS[case.engine], FOLDER[case.engine]: str(self.folder / self._arguments(case))}
        body = json.dumps(
            {
                "arguments": {**arguments, **case.arguments},
                "began": time.monotonic(),
                "stays": keep_running,
                "log": str(log),
                **(options or {}),
            }
        )
        with log.open("wb") as output:
            process = subprocess.Popen(
                [python, "-m", "benchmarks.engines.engine_process", case.engine, body],
                cwd=ROOT,
                env=self._environment(case, variables),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process.pid, _wait_for_result(process, log, case, reserve)
            if process.stdin is not None:
                process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        finally:
            reserve.release()
            _end(process)

    def start_planner(self) -> None:
        """Replace the planner with an empty one."""
        port = _free_port()
        process = self._stack.enter_context(
            _running(
                [sys.executable, "-m", "rfork", "planner", "--port", str(port)],
                {**os.environ, "RFORK_LOG_LEVEL": "error"},
                self.folder / "planner.log",
            )
        )
        self.planner = f"http://127.0.0.1:{port}"
        _wait_healthy(process, f"{self.planner}/healthz", self.folder / "planner.log")

    @contextlib.contextmanager
    def seed(self, engine: EngineName) -> Iterator[None]:
        """Run an engine that has loaded the model and serves it, for the block."""
        case = EngineCase(engine, "the seed", "disk", arguments=RFORK)
        with self.child(case, {"RFORK_PLANNER": self.planner}, keep_running=True):
            yield

    def tensorize(self, to: str) -> None:
        """Write the model in vLLM's tensorizer format into the folder `to`. Raises EngineFailed."""
        shutil.copytree(self.folder / "bare" / "model", self.folder / to)
        options = {"tensorize": str(self.folder / to)}
        with self.child(EngineCase("vllm", "tensorize"), {}, keep_running=False, options=options):
            pass

    @contextlib.contextmanager
    def stock_seed(self) -> Iterator[Mapping[str, object]]:
        """Run SGLang's own R-Fork seed for the block; yields the arguments of its clients."""
        python, port = python_of("sglang"), _free_port()
        if python is None:
            raise EngineFailed("sglang is not installed", hint="make test-engines")
        log = self.folder / "stock-seed.log"
        flags = {**ARGUMENTS["sglang"], "model_path": str(self.folder / "model"), "port": port}
        command = [str(python), "-m", "sglang.launch_server", "--host", "127.0.0.1"]
        for name, value in flags.items():
            command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        command.append("--remote-instance-weight-loader-start-seed-via-transfer-engine")
        case = EngineCase("sglang", "stock seed")
        with _running(command, self._environment(case, {}), log) as process:
            _wait_healthy(process, f"http://127.0.0.1:{port}/health", log)
            yield {
                "remote_instance_weight_loader_seed_instance_ip": "127.0.0.1",
                "remote_instance_weight_loader_seed_instance_service_port": port,
            }

    def drop_cache(self, *names: str) -> None:
        """Drop the files below these folders from the page cache."""
        for name in names:
            for file in (self.folder / name).rglob("*"):
                if file.is_file():
                    with file.open("rb") as opened:
                        os.fsync(opened.fileno())
                        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _arguments(self, case: EngineCase) -> str:
        # One name for both folders; the planner would take them for two models otherwise.
        return f"bare/{case.checkpoint}" if case.is_bare else case.checkpoint

    def _environment(self, case: EngineCase, variables: Mapping[str, str]) -> dict[str, str]:
        path = [str(SET_UP / "stock_on_cpu"), str(ROOT)]
        own = {"PYTHONPATH": os.pathsep.join(path), "RFORK_MODEL": "bench"}
        return {**inherited_environment(), **COMMON, **VARIABLES[case.engine], **own, **case.environment, **variables}

    def __enter__(self) -> EngineProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _wait_for_result(
    process: subprocess.Popen[bytes], log: Path, case: EngineCase, reserve: MemoryReserve
) -> EngineRun:
    """Return the result, and release the reserve when the engine begins to load."""
    until = time.monotonic() + case.limit_s
    while True:
        ended = process.poll() is not None
        output = log.read_text(errors="replace")
        if LOADING[case.engine] in output:
            reserve.release()
        for line in output.splitlines():
            if line.startswith("BENCH "):
                result = json.loads(line.removeprefix("BENCH "))
                return EngineRun(**{**result, "tokens": tuple(result["tokens"])})
        if ended or time.monotonic() > until:
            tail = log.read_text(errors="replace")[-2000:]
            raise EngineFailed(f"{case.key}: {'ended' if ended else 'still running'} without a response\n{tail}")
        time.sleep(POLL_INTERVAL_S)


@contextlib.contextmanager
def _running(command: list[str], environment: Mapping[str, str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and the workers in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(15)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _wait_healthy(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=5).status_code == 200:
                return
        if process.poll() is not None:
            break
        time.sleep(POLL_INTERVAL_S)
    raise EngineFailed(f"{url} does not respond\n{log.read_text(errors='replace')[-2000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

"""Hosts and processes of the benchmark: a planner, a seed, and the host whose engine is started and measured."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

from typing_extensions import Self

from benchmarks.engines.cases import EngineName
from benchmarks.engines.processes import (
    COMMON,
    RESERVED_IMAGES,
    ROOT,
    VARIABLES,
    EngineFailed,
    inherited_environment,
    python_of,
)
from benchmarks.memory_reserve import MemoryReserve
from benchmarks.netlab import NetworkLab
from benchmarks.ready.cases import OPEN, Link, ReadyCase
from benchmarks.ready.phases import Start, marks_of, start_of
from rfork.errors import RforkError

PLANNER, SEED, TARGET = "planner", "seed", "target"
"""Hosts, each in a network namespace: two processes share memory only within one."""
PLANNER_PORT, SERVER_PORT = 7500, 8000
START_S: Final = 600.0
"""A busy machine imports an engine in minutes."""
INSTANCE_TTL_S: Final = 5
"""Seconds after which the planner forgets a killed server."""
GET: Final = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"
POLL_INTERVAL_S: Final = 0.05
PROMPT: Final = "The capital of France is"
TOKENS: Final = 4
MODEL: Final = "bench"
HOLDER_MEMORY: Final = "8GB"
MARKS = Path(__file__).parent / "start_marks"
LOADS: Final = '"name": "loads"'
"""Part of the mark of the moment at which an engine begins to load."""
RFORK: Final = (sys.executable, "-m", "rfork")

OPTIONS: Mapping[EngineName, Sequence[str]] = {
    "vllm": (
        *("--served-model-name", MODEL, "--dtype", "bfloat16", "--max-model-len", "512", "--max-num-seqs", "8"),
        *("--kv-cache-memory-bytes", str(256 << 20), "--enforce-eager"),
    ),
    "sglang": (
        *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
        *("--dtype", "bfloat16", "--max-total-tokens", "2048", "--context-length", "512", "--sleep-on-idle"),
    ),
}
ENVIRONMENTS: Mapping[EngineName, Mapping[str, str]] = {
    "vllm": {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1", "DO_NOT_TRACK": "1"},
    "sglang": {},
}


@dataclass(frozen=True, slots=True)
class FirstToken:
    """Result of `benchmarks.ready.first_token`."""

    listening: float
    first_token: float
    response: object


class ReadyLab:
    """Context manager for the hosts; `folder` has ``model``, ``bare/model`` (without weights) and the logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.image_bytes = 0
        """Size of the model: engines find that much memory that was not returned to the host."""
        self._reserve = MemoryReserve()
        self._lab = NetworkLab([PLANNER, SEED, TARGET])
        self._count = 0
        self._holder: subprocess.Popen[str] | None = None
        self._planner: subprocess.Popen[str]
        self._planner_log: Path

    def __enter__(self) -> Self:
        self._lab.__enter__()
        try:
            self._start_planner()
        except BaseException:
            self._lab.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reserve.release()
        self._lab.__exit__(error_type, error, trace)

    def shape(self, link: Link) -> None:
        """Limit the links of both hosts, in each direction."""
        rate = None if link.bytes_per_s is None else link.bytes_per_s * 8
        self._lab.shape(SEED, rate=rate)
        self._lab.shape(TARGET, rate=rate)

    def transfer_seconds(self, link: Link, size: int) -> float:
        """Return the seconds in which one TCP connection sends `size` bytes from the seed's host to the target's."""
        self.shape(link)
        program = [sys.executable, "-S", "-m", "benchmarks.ready.link"]
        address = self._lab.address(SEED)
        log = self._log("link")
        sender = self._lab.start(SEED, [*program, "send", address, str(size)])
        with log.open("w") as output:
            receiver = self._lab.start(TARGET, [*program, "receive", address, str(size)], output=output)
        receiver.wait(START_S)
        sender.wait(START_S)
        try:
            return float(log.read_text())
        except ValueError:
            raise RforkError(f"the link sent nothing: {log.read_text()}") from None

    @contextlib.contextmanager
    def seed(self, engine: EngineName) -> Iterator[None]:
        """Run an engine that has loaded the model and serves it, on its own host, for the block."""
        log = self._log(f"{engine}-seed")
        command = [*RFORK, "launch", "--", *self._command(engine, "model")]
        try:
            with log.open("w") as output:
                process = self._lab.start(SEED, command, self._environment(engine, SEED), output)
            self._first_token(engine, SEED, process, log)
            yield
        finally:
            self._end(SEED)

    @contextlib.contextmanager
    def holder(self) -> Iterator[None]:
        """Run a holder on the target's host, for the block, once it has the image."""
        log = self._log("holder")
        command = [*RFORK, "hold", "--models", MODEL, "--memory", HOLDER_MEMORY]
        environment = self._environment("vllm", TARGET)
        with log.open("w") as output:
            self._holder = self._lab.start(TARGET, command, environment, output)
        try:
            _wait(
                lambda: any(mark.name == "fork" for mark in marks_of(log.read_text())), self._holder, log, "the holder"
            )
            yield
        finally:
            holder, self._holder = self._holder, None
            self._lab.stop(holder)

    def start(self, case: ReadyCase) -> Start:
        """Start the case's server, request its first tokens, and kill it. Raises EngineFailed."""
        self.shape(case.link or OPEN)
        if case.cold:
            self._drop_cache()
        log = self._log(case.engine)
        is_rfork = case.weights not in ("none", "disk")
        command = self._command(case.engine, "bare/model" if case.weights != "disk" else "model")
        environment = self._environment(case.engine, TARGET)
        if case.weights == "none":
            command += ["--load-format", "dummy"]
            environment["BENCH_NO_WEIGHTS"] = "1"
        if is_rfork:
            command = [*RFORK, "launch", "--", *command]
            environment["RFORK_PREFETCH"] = "auto" if case.weights == "prefetch" else "off"
        known = self._instances(TARGET)
        self._reserve.acquire(RESERVED_IMAGES * self.image_bytes)
        try:
            with log.open("w") as output:
                began = time.monotonic()
                process = self._lab.start(TARGET, command, environment, output)
            result = self._first_token(case.engine, TARGET, process, log)
        finally:
            self._end(TARGET)
            # Otherwise the plan of the next start might contain this one.
            _wait(lambda: self._instances(TARGET) <= known, self._planner, self._planner_log, "the planner")
        marks = marks_of(log.read_text(errors="replace"))
        return start_of(marks, began, result.listening, result.first_token, _text(case.engine, result.response))

    # -- processes --------------------------------------------------------------------------------------

    def _start_planner(self) -> None:
        self._planner_log = log = self._log("planner")
        environment = {
            **inherited_environment(),
            "RFORK_PLANNER_BIND": self._lab.address(PLANNER),
            "RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "1",
            "RFORK_PLANNER_INSTANCE_TTL_S": str(INSTANCE_TTL_S),
            "PYTHONUNBUFFERED": "1",
        }
        command = [*RFORK, "planner", "--port", str(PLANNER_PORT), "--json"]
        with log.open("w") as output:
            self._planner = self._lab.start(PLANNER, command, environment, output)
        _wait(lambda: '"ready"' in log.read_text(), self._planner, log, "the planner")

    def _instances(self, host: str) -> frozenset[str]:
        """Return the ids of the instances on a host that the planner knows."""
        url = f"{self._planner_url}/v1/instances?host={host}"
        command = ["ip", "netns", "exec", self._lab.namespace(PLANNER), sys.executable, "-S", "-c", GET, url]
        page = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        return frozenset(item["report"]["instance_id"] for item in page["items"])

    @property
    def _planner_url(self) -> str:
        return f"http://{self._lab.address(PLANNER)}:{PLANNER_PORT}"

    def _command(self, engine: EngineName, folder: str) -> list[str]:
        python = python_of(engine)
        if python is None:
            raise EngineFailed(f"{engine} is not installed", hint="make test-engines")
        model = str(self.folder / folder)
        if engine == "vllm":
            start = [str(python.parent / "vllm"), "serve", model]
        else:
            start = [str(python), "-m", "sglang.launch_server", "--model-path", model]
        return [*start, *OPTIONS[engine], "--host", "127.0.0.1", "--port", str(SERVER_PORT)]

    def _environment(self, engine: EngineName, host: str) -> dict[str, str]:
        engine_variables = {
            name: value for name, value in VARIABLES[engine].items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"
        }
        rfork = {
            "RFORK_PLANNER": self._planner_url,
            "RFORK_BIND": self._lab.address(host),
            "RFORK_NODE_NAME": host,
            "RFORK_MODEL": MODEL,
            "RFORK_TRANSPORTS": "shared_memory,http",
        }
        temporary = self.folder / "tmp"  # killed servers remove nothing
        temporary.mkdir(exist_ok=True)
        path = {"PYTHONPATH": f"{MARKS}{os.pathsep}{ROOT}", "TMPDIR": str(temporary)}
        return {**inherited_environment(), **COMMON, **engine_variables, **ENVIRONMENTS[engine], **path, **rfork}

    def _first_token(self, engine: EngineName, host: str, process: subprocess.Popen[str], log: Path) -> FirstToken:
        """Return the result of `benchmarks.ready.first_token` on the server's host."""
        path = "/v1/completions" if engine == "vllm" else "/generate"
        bodies = {"first": _body(engine, 1), "more": _body(engine, TOKENS)}
        program = [sys.executable, "-S", "-m", "benchmarks.ready.first_token"]
        answers = log.with_suffix(".token")
        with answers.open("w") as output:
            client = self._lab.start(
                host, [*program, f"http://127.0.0.1:{SERVER_PORT}{path}", json.dumps(bodies)], output=output
            )

        def has_answered() -> bool:
            if LOADS in log.read_text(errors="replace"):
                self._reserve.release()
            return client.poll() is not None

        _wait(has_answered, process, log, f"{engine} on {host}")
        return FirstToken(**json.loads(answers.read_text()))

    def _end(self, host: str) -> None:
        """Kill all processes of a host except the holder."""
        kept = _family(self._holder.pid) if self._holder is not None else frozenset[int]()
        until = time.monotonic() + START_S
        while pids := self._pids(host) - kept:
            if time.monotonic() > until:
                raise RforkError(f"processes of {host} do not end: {sorted(pids)}")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_INTERVAL_S)

    def _pids(self, host: str) -> frozenset[int]:
        command = ["ip", "netns", "pids", self._lab.namespace(host)]
        listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return frozenset(pid for pid in map(int, listed) if not _is_zombie(pid))

    def _log(self, name: str) -> Path:
        self._count += 1
        return self.folder / f"{self._count:03}-{name}.log"

    def _drop_cache(self) -> None:
        for file in (self.folder / "model").rglob("*"):
            if file.is_file():
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
                    os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _body(engine: EngineName, tokens: int) -> dict[str, object]:
    if engine == "vllm":
        return {"model": MODEL, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}}


def _text(engine: EngineName, response: object) -> str:
    """Return the text of a response."""
    match response:
        case {"choices": [{"text": str(text)}]} if engine == "vllm":
            return text
        case {"text": str(text)} if engine == "sglang":
            return text
    raise RforkError(f"unexpected response of {engine}: {response}")


def _wait(condition: Callable[[], bool], process: subprocess.Popen[str], log: Path, what: str) -> None:
    """Return once `condition` is true. Raises EngineFailed with the end of the log if `process` ends before."""
    until = time.monotonic() + START_S
    while not condition():
        ended = process.poll() is not None
        if ended or time.monotonic() > until:
            state = "ended early" if ended else f"is not ready after {START_S:g} s"
            raise EngineFailed(f"{what} {state}\n{log.read_text(errors='replace')[-3000:]}")
        time.sleep(POLL_INTERVAL_S)


def _family(pid: int) -> frozenset[int]:
    """Return a process and its descendants."""
    family = {pid}
    for child in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        chain, parent = [child], _parent(child)
        while parent > 1 and parent not in family:
            chain.append(parent)
            parent = _parent(parent)
        if parent in family:
            family.update(chain)
    return frozenset(family)


def _stat(pid: int) -> list[str]:
    """Return state, parent and further fields of a process; none if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def _parent(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _is_zombie(pid: int) -> bool:
    return _stat(pid)[:1] == ["Z"]

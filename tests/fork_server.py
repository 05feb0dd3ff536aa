"""Starts Python processes for tests by forking a process that has already imported torch, rfork and the planner.

`PythonProcess` is a `subprocess.Popen` for ``python -m MODULE``, ``python -c CODE`` and ``python FILE``. A real start
imports torch for seconds; a fork takes milliseconds. The child is a child of the test's process: the fork server forks
twice, and the orphan is adopted by the test's process, which is then its reaper, so `wait`, signals and exit codes are
those of the kernel. A process that needs another interpreter state (see `_request`) is really started.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import pkgutil
import random
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, AnyStr, TextIO, TypedDict, cast

ROOT = Path(__file__).resolve().parents[1]
PRELOADED_PACKAGES = ("rfork", "planner")
PRELOADED_MODULES = (
    "torch",
    "torch.distributed",
    "transformers.models.llama.modeling_llama",
    "transformers.models.auto.tokenization_auto",
    "safetensors.torch",
    "grpc",
    "uvicorn",
    "fastapi",
)
NOT_PRELOADED = (
    *("__main__", "rfork.engines.sglang", "rfork.engines.vllm"),
    *(("planner.integrations.kubernetes",) if sys.version_info < (3, 11) else ()),
)
"""Parts of module names: entry points, plugins that import an engine, and what needs Python 3.11."""
START_PREFIXES = ("PYTHON", "LD_", "OMP_", "MKL_", "KMP_", "HF_", "TRANSFORMERS_", "TORCH_", "COV", "GRPC_", "MALLOC_")
"""Variables that are read while modules are imported."""
REPRODUCED_VARIABLES = {"PYTHONUNBUFFERED", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "PYTHONPATH"}
"""Variables of `START_PREFIXES` that the fork server or the child reproduces."""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in REPRODUCED_VARIABLES}
"""Environment of the fork server: that of the tests, before a test changes it."""
PR_SET_CHILD_SUBREAPER = 36
REQUEST_TIMEOUT_S = 120.0


class ProcessRequest(TypedDict):
    """Describes a process to fork."""

    options: list[str]
    """Interpreter options before the program."""
    program: list[str]
    """``-m MODULE``, ``-c CODE`` or ``FILE``, then arguments."""
    environment: dict[str, str]
    folder: str
    session: bool


class ForkServer:
    """The fork server of this process: started by the first `fork`, ended when this process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def fork(self, request: ProcessRequest, descriptors: Sequence[int]) -> int:
        """Fork a process with these standard descriptors; return its process id."""
        with self._lock:
            channel = self._connected()
            body = json.dumps(request).encode()
            socket.send_fds(channel, [len(body).to_bytes(8, "big")], list(descriptors))
            # The child's parent ends at once. Only now does this process adopt orphans: processes that the tests'
            # own processes leave behind belong to init, as without the fork server.
            _set_subreaper(True)
            try:
                channel.sendall(body)
                answer = channel.recv(8)
            finally:
                _set_subreaper(False)
            if len(answer) != 8:
                raise ChildProcessError("the fork server has ended")
            return int.from_bytes(answer, "big")

    def _connected(self) -> socket.socket:
        if self._channel is None:
            own, other = socket.socketpair()
            own.settimeout(REQUEST_TIMEOUT_S)
            self._process = subprocess.Popen(
                [sys.executable, "-c", "from tests.fork_server import main; main()", str(other.fileno())],
                env={**ENVIRONMENT, "HF_HUB_OFFLINE": "1", "OPENBLAS_NUM_THREADS": "1"},
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
            )
            other.close()
            self._channel = own
            atexit.register(self._close)
        return self._channel

    def _close(self) -> None:
        if self._channel is not None and self._process is not None:
            self._channel.close()
            self._process.wait(REQUEST_TIMEOUT_S)


_SERVER = ForkServer()


class PythonProcess(subprocess.Popen[AnyStr]):
    """A process of this Python, forked from the fork server where possible."""

    def _execute_child(self, *positional: Any) -> None:
        # The parameters of `subprocess.Popen._execute_child`, in its order.
        args, _, preexec, _, pass_fds, cwd, env, _, _, shell, stdin, _, _, stdout, _, stderr, *rest = positional
        _, gid, gids, uid, umask, session, *group = rest  # Python 3.10 has no process group here
        unusual = preexec or pass_fds or shell or umask >= 0 or any(each >= 0 for each in group)
        unusual = unusual or (gid, gids, uid) != (None, None, None)
        request = None if unusual else _request(args, env, cwd, session)
        if request is None:
            super()._execute_child(*positional)  # type: ignore[misc]
            return
        chosen = zip((stdin, stdout, stderr), (0, 1, 2), strict=True)
        self.pid = _SERVER.fork(request, [default if number == -1 else number for number, default in chosen])
        self._child_created = True
        self._close_pipe_fds(*positional[10:16])  # type: ignore[attr-defined]


def run_python(arguments: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run` with text and captured output, for ``python ARGUMENTS``."""
    timeout = options.pop("timeout", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    with PythonProcess([sys.executable, *arguments], text=True, **pipes) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


def _request(
    command: Sequence[str], environment: Mapping[str, str] | None, folder: str | None, session: bool
) -> ProcessRequest | None:
    """Return the request for this command, or None if it needs a real start."""
    environment = dict(os.environ if environment is None else environment)
    if not isinstance(command, list) or command[0] != sys.executable:
        return None
    if _start_variables(environment) != _start_variables(ENVIRONMENT):
        return None
    if not all(map(_reproduces, _module_folders(environment))):
        return None
    if environment.get("HF_HUB_OFFLINE", "1") != "1":
        return None
    options: list[str] = []
    rest = [str(argument) for argument in command[1:]]
    while rest[:2] == ["-X", "faulthandler"]:
        options, rest = [*options, *rest[:2]], rest[2:]
    if not rest or (rest[0].startswith("-") and (rest[0] not in ("-m", "-c") or len(rest) < 2)):
        return None
    folder = os.fspath(folder) if folder is not None else os.getcwd()
    return ProcessRequest(options=options, program=rest, environment=environment, folder=folder, session=session)


def _start_variables(environment: Mapping[str, str]) -> dict[str, str]:
    found = {name: value for name, value in environment.items() if name.startswith(START_PREFIXES)}
    return {name: value for name, value in found.items() if name not in REPRODUCED_VARIABLES}


def _module_folders(environment: Mapping[str, str]) -> list[str]:
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


def _reproduces(folder: str) -> bool:
    """Return whether this folder of PYTHONPATH hides no module that was imported; it may have a startup patch."""
    if folder == str(ROOT):
        return True
    return {path.name for path in Path(folder).glob("*") if path.is_dir() or path.suffix == ".py"} <= {
        "sitecustomize.py"
    }


def _set_subreaper(adopts: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(adopts), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


# The rest runs in the fork server and in the processes that it forks.


def main() -> None:
    """Import everything, then fork a process for each request until the channel is closed."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal
    for name in PRELOADED_MODULES:
        importlib.import_module(name)
    for package in PRELOADED_PACKAGES:
        _import_all(package)
    gc.collect()
    gc.freeze()
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a preloaded module has started a thread")
    run = _serve(channel)
    if run is not None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _become(*run)


def _import_all(package: str) -> None:
    for found in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
        if not any(part in found.name for part in NOT_PRELOADED):
            importlib.import_module(found.name)


def _serve(channel: socket.socket) -> tuple[ProcessRequest, list[int]] | None:
    """Return the request in each process that was forked for one, and None in the server at its end."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(channel, 8, 3)
        if len(head) < 8:
            return None
        body = bytearray()
        while len(body) < int.from_bytes(head, "big"):
            body += channel.recv(1 << 20)
        (read, write), (adopted, not_adopted) = os.pipe(), os.pipe()
        if (parent := os.fork()) == 0:
            if child := os.fork():
                os.write(write, child.to_bytes(8, "big"))
                os._exit(0)
            os.close(not_adopted)
            os.read(adopted, 1)
            return cast(ProcessRequest, json.loads(body)), descriptors
        os.waitpid(parent, 0)  # the child has its new parent now
        channel.sendall(os.read(read, 8))
        for descriptor in (read, write, adopted, not_adopted, *descriptors):
            os.close(descriptor)


def _become(request: ProcessRequest, descriptors: list[int]) -> None:
    """Turn this forked process into the one that a real start would have made, and run its program."""
    environment, program = request["environment"], request["program"]
    high = [os.dup(descriptor) for descriptor in descriptors]  # none is 0, 1 or 2 now
    for number, descriptor in enumerate(high):
        os.dup2(descriptor, number)
    os.closerange(3, 1024)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(request["folder"])
    if request["session"]:
        os.setsid()
    _open_streams(unbuffered="PYTHONUNBUFFERED" in environment)
    random.seed()
    tempfile.tempdir = None
    if request["options"]:
        faulthandler.enable()
    if threads := environment.get("OMP_NUM_THREADS"):
        importlib.import_module("torch").set_num_threads(int(threads))
    sys.orig_argv = [sys.executable, *request["options"], *program]
    folders = _module_folders(environment)
    sys.path[:1] = ["", *folders, str(ROOT)]
    del sys.modules["tests.fork_server"]
    if any(Path(folder, "sitecustomize.py").exists() for folder in folders):
        importlib.import_module("sitecustomize")
    try:
        _run(program)
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise  # the interpreter prints it
        _exit(end.code or 0)
    _exit(0)


def _run(program: list[str]) -> None:
    if program[0] == "-m":
        sys.path[0] = os.getcwd()
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    elif program[0] == "-c":
        sys.argv = ["-c", *program[2:]]
        exec(compile(program[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(program[0]))
        sys.argv = program
        runpy.run_path(program[0], run_name="__main__")


def _exit(code: int) -> None:
    """End this process as the interpreter does, but do not destroy its modules: they share memory with the fork
    server, and to copy that takes longer than most programs.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _open_streams(unbuffered: bool) -> None:
    """Replace the standard streams by streams of the new descriptors, with the modes that Python selects."""
    _set_stream("stdin", open(0, closefd=False))  # noqa: SIM115
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        binary = open(number, "wb", buffering=0 if unbuffered else -1, closefd=False)  # noqa: SIM115
        lines = number == 2 or os.isatty(number)
        _set_stream(name, io.TextIOWrapper(binary, errors=errors, line_buffering=lines, write_through=unbuffered))


def _set_stream(name: str, stream: TextIO) -> None:
    setattr(sys, name, stream)
    setattr(sys, f"__{name}__", stream)

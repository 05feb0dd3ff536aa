"""A process that the fork server made behaves like one that Python started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

from tests.fork_server import PythonProcess, run_python
from tests.processes import startup_patch

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, os, signal, sys
print(json.dumps({
    "name": __name__,
    "arguments": sys.argv,
    "path": sys.path[0],
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "parent": os.getppid(),
    "leads_session": os.getsid(0) == os.getpid(),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "descriptors": [number for number in (3, 4, 5, 6) if os.path.exists(f"/proc/self/fd/{number}/.")],
    "input": sys.stdin.read(),
}))
"""
Description = dict[str, object]


def described_by(process: subprocess.Popen[str]) -> Description:
    with process:
        output, _ = process.communicate("some input")
    return cast(Description, json.loads(output))


def is_forked(environment: dict[str, str]) -> bool:
    code = "import sys; print('torch' in sys.modules)"
    return run_python(["-c", code], env={**os.environ, **environment}).stdout == "True\n"


@pytest.mark.parametrize(
    ("program", "session"),
    [
        ("-m", True),
        ("-c", False),
        pytest.param("-m", False, marks=pytest.mark.slow),
        pytest.param("-c", True, marks=pytest.mark.slow),
        pytest.param("file", True, marks=pytest.mark.slow),
        pytest.param("file", False, marks=pytest.mark.slow),
    ],
)
def test_a_program_sees_what_it_sees_after_a_real_start(program: str, session: bool, tmp_path: Path) -> None:
    """Arguments, module path, folder, environment, parent, session, signal handler and descriptors are equal."""
    (tmp_path / "described.py").write_text(PROGRAM)
    start = {"-c": ["-c", PROGRAM], "-m": ["-m", "described"], "file": [str(tmp_path / "described.py")]}[program]
    descriptions = [
        described_by(
            kind(
                [sys.executable, *start, "--option", "word"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                env={**os.environ, "SOME_VARIABLE": "a value"},
                start_new_session=session,
            )
        )
        for kind in (subprocess.Popen, PythonProcess)
    ]
    assert descriptions[0] == descriptions[1]


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(3)",
        "1 / 0",
        pytest.param("pass", marks=pytest.mark.slow),
        pytest.param("raise SystemExit('a message')", marks=pytest.mark.slow),
        pytest.param("raise KeyboardInterrupt", marks=pytest.mark.slow),
        pytest.param("import os; os.abort()", marks=pytest.mark.slow),
        pytest.param("import os; os.kill(os.getpid(), 9)", marks=pytest.mark.slow),
    ],
)
def test_exit_codes_are_those_of_a_real_process(code: str) -> None:
    """An exit code, an exception or a signal ends both with the same code."""
    real = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, check=False)
    forked = run_python(["-c", code])
    assert real.returncode == forked.returncode
    assert real.stderr.splitlines()[-1:] == forked.stderr.splitlines()[-1:]


def test_a_process_is_stopped_continued_and_ended_by_signals() -> None:
    """The tests' process is its parent: it waits for its stop and its end."""
    code = "import sys; print('ready', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code]
    with PythonProcess(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "ready\n" == process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        stopped = os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert stopped is not None
        assert signal.SIGSTOP == stopped.si_status
        process.send_signal(signal.SIGCONT)
        assert process.poll() is None
        process.terminate()
        assert -signal.SIGTERM == process.wait()


def test_a_process_is_forked_with_a_startup_patch(tmp_path: Path) -> None:
    """The patch runs first."""
    patch = startup_patch(tmp_path / "patch", "import os\nos.environ['PATCHED'] = '1'\n")
    code = "import os, sys; print(os.environ['PATCHED'], 'torch' in sys.modules)"
    assert "1 True\n" == run_python(["-c", code], env={**os.environ, **patch}).stdout


def test_a_process_that_needs_another_interpreter_is_really_started(tmp_path: Path) -> None:
    """Variables that Python or a library reads at its start, and modules that hide others."""
    (tmp_path / "module.py").touch()
    assert is_forked({})
    assert not is_forked({"PYTHONHASHSEED": "0"})
    assert not is_forked({"PYTHONPATH": str(tmp_path)})
    assert not is_forked({"LD_PRELOAD": ""})


def test_random_numbers_differ() -> None:
    """Two processes draw different numbers."""
    code = "import random, tempfile, uuid; print(random.random(), uuid.uuid4(), next(tempfile._get_candidate_names()))"
    first, second = (run_python(["-c", code]).stdout.split() for _ in range(2))
    assert set() == set(first) & set(second)

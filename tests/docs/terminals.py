"""Shells in which a page's commands are run as its reader would: one for the page, one for each server."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

from typing_extensions import Self

from tests.docs.pages import PageBlock, Step, first_missing_line, steps

MAX_COMMAND_S: Final = 150.0
"""Timeout of one command on a busy machine."""
POLL_INTERVAL_S: Final = 0.05
PORT: Final = "8700"
"""The planner's port in the pages: tests use a free one in its place."""
MACHINE_FOLDERS: Final = re.compile(r"(?<![\w/:.])(?=/(?:models|checkpoints)/)")
"""Before the folders of a machine that pages name: in tests they lie in the page's own."""


class CommandFailed(Exception):
    """A command of a page did not behave as the page states."""


class Terminals:
    """The shells of one page, in one folder; all that they started is ended with them."""

    def __init__(self, folder: Path, environment: Mapping[str, str], port: int) -> None:
        self.folder = folder
        self.environment = {**environment, "RFORK_PLANNER_PORT": str(port)}
        self._port = port
        self._shells: list[subprocess.Popen[str]] = []
        self._written = 0
        self._shared_blocks: list[PageBlock] = []
        self._main_shell = self._start_shell()

    def run(self, block: PageBlock) -> None:
        """Run a block. Raises Failed with what it wrote."""
        if "before" in block.directives:
            self._run_step(Step(block.directives["before"]), block, self._main_shell, "0")
        if block.language == "python":
            script = self.folder / f"line{block.line}.py"
            script.write_text(self._with_local_paths(block.text))
            self._run_step(Step(f"{sys.executable} {script.name}"), block, self._main_shell, "0")
            return
        shell = self._main_shell
        if "everywhere" in block.directives:
            self._shared_blocks.append(block)
        elif "terminal" in block.directives:
            shell = self._start_shell()
            for earlier in self._shared_blocks:
                for step in steps(earlier):
                    self._run_step(step, earlier, shell, "0")
        for step in steps(block):
            self._run_step(step, block, shell, block.directives.get("exit", "0"))

    def transcript(self) -> str:
        """All that was written so far, in the order of the commands."""
        return "\n".join((self.folder / f".{at}.output").read_text() for at in range(1, self._written + 1))

    def _run_step(self, step: Step, block: PageBlock, shell: subprocess.Popen[str], code: str) -> None:
        self._written += 1
        output, ended = (self.folder / f".{self._written}.{name}" for name in ("output", "ended"))
        script = self.folder / f".{self._written}.sh"
        # A shell that dies of a failing command is seen; what a block exports has to outlive it.
        strict = ("set -e\n", "\nset +e\n") if code == "0" else ("", "")
        script.write_text(strict[0] + self._with_local_paths(step.command) + strict[1])
        if shell.stdin is None:
            raise CommandFailed("a shell without input")
        shell.stdin.write(f"source {script} > {output} 2>&1; echo $? > {ended}.part; mv {ended}.part {ended}\n")
        shell.stdin.flush()
        expected_text = block.directives.get("terminal")
        until = time.monotonic() + MAX_COMMAND_S
        while not ended.exists():
            if expected_text is not None and output.exists() and expected_text in output.read_text(errors="replace"):
                return
            if shell.poll() is not None or time.monotonic() > until:
                raise CommandFailed(
                    self._failure_message(
                        block,
                        step,
                        output,
                        "it did not end" if expected_text is None else f"no '{expected_text}'",
                    )
                )
            time.sleep(POLL_INTERVAL_S)
        if expected_text is not None and shell is not self._main_shell:
            raise CommandFailed(self._failure_message(block, step, output, "it ended"))
        if (exit_code := ended.read_text().strip()) != code:
            raise CommandFailed(
                self._failure_message(block, step, output, f"it ended with {exit_code} instead of {code}")
            )
        if (line := first_missing_line(step.output, output.read_text())) is not None:
            raise CommandFailed(self._failure_message(block, step, output, f"it did not write:\n{line}"))

    def _with_local_paths(self, text: str) -> str:
        return MACHINE_FOLDERS.sub(str(self.folder), text.replace(PORT, str(self._port)))

    def _failure_message(self, block: PageBlock, step: Step, output: Path, why: str) -> str:
        output_text = output.read_text() if output.exists() else ""
        others = "".join(
            f"\n--- {path.name}\n{path.read_text()[-1500:]}"
            for path in sorted(self.folder.glob(".*.output"))[-6:]
            if path != output
        )
        return f"{block.location}: {why}\n$ {step.command}\n{output_text}{others}"

    def _start_shell(self) -> subprocess.Popen[str]:
        shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        self._shells.append(shell)
        return shell

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for shell in reversed(self._shells):
            for sent in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(shell.pid, sent)
                if sent == signal.SIGTERM:
                    _wait_for_group(shell)
            shell.wait()
            if shell.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    shell.stdin.close()


def _wait_for_group(shell: subprocess.Popen[str]) -> None:
    """Until all processes of a group have ended, or ten seconds have passed."""
    until = time.monotonic() + 10
    while time.monotonic() < until:
        shell.poll()
        try:
            os.killpg(shell.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(POLL_INTERVAL_S)

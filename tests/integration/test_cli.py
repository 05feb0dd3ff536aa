"""What operators type, against a real planner: lists, explanations, the live picture, and wrong use."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from planner.service import running
from rfork.cli.app import app
from rfork.control.client import PlannerClient
from rfork.settings import PlannerSettings
from rfork.wire import ForkFinish, ForkProgress
from tests.conftest import StartRfork
from tests.unit.planner.builders import ask, whole

DEADLINE_S = 60.0
DEBUG = {"RFORK_LOG_LEVEL": "debug"}
HALF = ForkProgress(
    verified=((0, 6),), bytes_read=6 << 20, bytes_per_s=1e6, sources={"s": 6 << 20}, transports={"s": "http"},
    phases={"capture": 0.1, "transfer": 5.0}, link_bytes_per_s=2e6,
)  # fmt: skip
DONE = ForkFinish(
    outcome="forked", seconds=12.0, bytes_read=12 << 20, sources={"s": 12 << 20}, transports={"s": "http"},
    phases={"capture": 0.1, "plan": 0.1, "transfer": 11.8}, link_bytes_per_s=2e6,
)  # fmt: skip
LEFT = ForkFinish(
    outcome="fallback", seconds=2.0, bytes_read=0, fallback="loader", reasons=("NoSource: nobody holds it",)
)


@dataclass(frozen=True)
class Ended:
    """A command that has ended: what it wrote, and its exit code."""

    out: str
    err: str
    code: int

    @property
    def json(self) -> dict[str, object]:
        """Its one line on stdout."""
        return cast(dict[str, object], json.loads(self.out))


Rfork = Callable[..., Ended]


@pytest.fixture
def rfork() -> Iterator[Rfork]:
    """Runs `rfork ARGUMENTS` in this process, whose handlers of signals it leaves as they were."""
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments: str, **environment: str) -> Ended:
        done = CliRunner().invoke(app, list(arguments), env=environment)
        assert isinstance(done.exception, SystemExit | None), done.exception
        assert "Traceback" not in done.output
        return Ended(done.stdout, done.stderr, done.exit_code)

    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="module")
def fleet() -> Iterator[str]:
    """The URL of a planner that knows a seed, a fork under way, one that ended and one that fell back."""
    with (
        running(PlannerSettings(port=0, forget_s=3600, lease_ttl_s=3600)) as url,
        PlannerClient(url) as client,
    ):
        client.report(whole("s", readers=("fork-b",), egress_rate=1_000_000, max_readers=9))
        for name in ("a", "b", "c"):
            client.ask(ask(name))
        client.finish("fork-a", DONE)
        client.progress("fork-b", HALF)
        client.finish("fork-c", LEFT)
        yield url


def test_status_as_json(rfork: Rfork, fleet: str) -> None:
    """The rows of the REST interface, all of them or those of one model."""
    seen = rfork("status", "--planner", fleet, "--json").json
    assert (["models", "instances", "forks"], 3) == (list(seen), len(cast(list[object], seen["forks"])))
    none = rfork("status", "--planner", fleet, "--json", "--model", "other").json
    assert {"models": [], "instances": [], "forks": []} == none


def test_status_of_many_says_what_it_leaves_out(rfork: Rfork, fleet: str) -> None:
    """A tree of a large fleet is cut at a limit, which can be raised."""
    told = rfork("status", "--planner", fleet, "--limit", "1").out
    assert ("1 more instance: --limit 4 shows them" in told, told.count(" on host-")) == (True, 3)


def test_forks_newest_first(rfork: Rfork, fleet: str) -> None:
    """The list, its filters and its limit; what is left out is said on stderr."""
    names = [line.split()[0] for line in rfork("forks", "--planner", fleet).out.splitlines()]
    assert ["fork", "fork-c", "fork-b", "fork-a"] == names
    told = rfork("forks", "--planner", fleet, "--state", "finished", "--limit", "1", "--json").json
    forks = cast(list[dict[str, object]], told["forks"])
    assert (["forks", "known"], ["fork-c"], 2) == (
        list(told),
        [fork["fork_id"] for fork in forks],
        told["known"],
    )
    cut = rfork("forks", "--planner", fleet, "--limit", "1")
    assert "2 older ones: --limit 3 lists them too\n" == cut.err


def test_forks_that_are_followed(rfork: Rfork, fleet: str) -> None:
    """As lines, or as JSON lines: what is under way at first, and then each change."""
    line = rfork("forks", "--planner", fleet, "--follow", "--limit", "1").out
    assert "fork-b m on b: transfer 50%, 1.00 MB/s, 6.29 s left, from s (http)" in line
    event = rfork("forks", "--planner", fleet, "-f", "--limit", "1", "--json").json
    assert ({"kind", "fork"}, "progress") == (set(event), event["kind"])


def test_a_fork_is_explained(rfork: Rfork, fleet: str) -> None:
    """By its id, by its instance's, or by the beginning of either: what held it up, and what to do."""
    for name in ("fork-a", "a"):
        told = rfork("explain", "--planner", fleet, name).out
        assert "why   s held all its readers to 1.00 MB/s" in told
        assert "to do Raise RFORK_EGRESS_RATE on s" in told
    fell = rfork("explain", "--planner", fleet, "fork-c").out
    assert "It loaded from loader because of NoSource: nobody holds it." in fell


def test_an_explanation_as_json(rfork: Rfork, fleet: str) -> None:
    """The fork as the planner lists it, its account, what it lost to which cause, and the verdict."""
    told = rfork("explain", "--planner", fleet, "fork-a", "--json").json
    assert ["fork", "account", "losses", "comparison", "verdict"] == list(told)
    assert {
        "seconds", "phases", "link_bytes_per_s", "bound_s", "transfer_s", "sources", "bytes_repeated",
        "replans", "reasons", "median_fork_s", "median_storage_s",
    } == set(cast(dict[str, object], told["account"]))  # fmt: skip
    assert ["cause", "text", "advice"] == list(cast(dict[str, object], told["verdict"]))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nobody", "no fork and no instance begins with 'nobody'"),
        ("fork-", "'fork-' could be any of 3: fork-a, fork-b, fork-c"),
        ("s", "no fork of instance s is known: it loaded by itself, or its fork is forgotten"),
        ("a/b", "'a/b' is no id: those have letters, digits and . _ : - only"),
        ("", "'' is no id: those have letters, digits and . _ : - only"),
    ],
)
def test_ids_that_name_no_fork(rfork: Rfork, fleet: str, name: str, said: str) -> None:
    """Each says why in one line, with what to do next; exit code 2."""
    done = rfork("explain", "--planner", fleet, name)
    assert (f"error: {said}", 2) == (done.err.splitlines()[0], done.code)
    assert done.err.splitlines()[1].startswith("hint: ")


COMMANDS = (
    ("status",),
    ("forks",),
    ("forks", "--follow"),
    ("explain", "x"),
    ("top",),
    ("drain", "x", "--wait", "0"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_planner_that_is_not_there(rfork: Rfork, free_port: int, command: tuple[str, ...]) -> None:
    """One line and a hint, as text and as JSON; exit code 5."""
    url = f"http://127.0.0.1:{free_port}"
    done = rfork(*command, "--planner", url)
    assert (5, True) == (done.code, done.err.startswith(f"error: planner {url} cannot be reached: "))
    told = rfork(*command, "--planner", url, "--json")
    assert (5, "PlannerUnreachable", True) == (told.code, told.json["error"], bool(told.json["hint"]))


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_token_that_is_wrong(rfork: Rfork, command: tuple[str, ...]) -> None:
    """The hint names the variable to set."""
    with running(PlannerSettings(port=0, token=SecretStr("right"))) as url:
        done = rfork(*command, "--planner", url, RFORK_TOKEN="wrong")
    assert (5, True) == (done.code, "set RFORK_TOKEN" in done.err)


@pytest.mark.parametrize(
    ("url", "code"), [("127.0.0.1:8700", 2), ("", 2), ("http://no.such.host.invalid", 5)]
)
def test_a_url_that_is_none(rfork: Rfork, url: str, code: int) -> None:
    """What cannot be a planner's URL is said to be none, with an example."""
    done = rfork("status", "--planner", url)
    assert (code, 2) == (done.code, len(done.err.splitlines()))


def test_top_without_a_terminal_looks_once(rfork: Rfork, fleet: str) -> None:
    """Into a pipe it prints one picture and ends; with --json and --once one line."""
    told = rfork("top", "--planner", fleet).out
    assert ("forks under way (1)" in told, "fallbacks because of" in told, "\x1b" in told) == (
        True,
        True,
        False,
    )
    line = rfork("top", "--planner", fleet, "--json", "--once").json
    assert (4, {"NoSource": 1}) == (line["instances"], line["fallbacks"])


def test_top_on_a_terminal(terminal: Terminal, free_port: int) -> None:
    """It says when the planner is gone, goes on when it is back, and leaves the terminal as it was."""
    with running(PlannerSettings(port=free_port)) as url:
        terminal.start("top", "--planner", url, "--interval", "0.1")
        terminal.wait_for("no instance is registered")
    terminal.wait_for("gone since")
    with running(PlannerSettings(port=free_port)) as url, PlannerClient(url) as client:
        client.report(whole("s"))
        terminal.wait_for("givers (1)")
        terminal.type("q")
        assert 0 == terminal.end()
    assert (terminal.before, True) == (terminal.modes(), terminal.text.rstrip().endswith("\x1b[?1049l"))


def test_top_is_interrupted(terminal: Terminal, fleet: str) -> None:
    """Ctrl-C ends it as q does."""
    terminal.start("top", "--planner", fleet)
    terminal.wait_for("forks under way")
    terminal.type("\x03")
    assert (0, terminal.before) == (terminal.end(), terminal.modes())


def test_top_is_suspended(terminal: Terminal, fleet: str) -> None:
    """Ctrl-Z leaves the alternate screen, and it is back when the command goes on.

    Here it goes on at once: no shell is there that could continue it, so the system does not let it stop.
    """
    terminal.start("top", "--planner", fleet)
    terminal.wait_for("forks under way")
    terminal.type("\x1a")
    terminal.wait_for("\x1b[?1049l")
    terminal.wait_for("forks under way")
    terminal.type("q")
    assert (0, terminal.before, 2) == (terminal.end(), terminal.modes(), terminal.text.count("\x1b[?1049h"))


class Terminal:
    """A pseudo-terminal with one `rfork` in it."""

    def __init__(self, *, rows: int, columns: int) -> None:
        self._ours, self._theirs = pty.openpty()
        termios.tcsetwinsize(self._theirs, (rows, columns))
        self.before = self.modes()
        self.text = ""
        self._process: subprocess.Popen[bytes] | None = None

    def modes(self) -> list[object]:
        """How it is set."""
        return cast(list[object], termios.tcgetattr(self._theirs))

    def start(self, *arguments: str) -> None:
        """Run the command with this as its terminal."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "rfork", *arguments],
            stdin=self._theirs,
            stdout=self._theirs,
            stderr=self._theirs,
            env={**os.environ, "TERM": "xterm-256color"},
            preexec_fn=_own_terminal,
        )

    def wait_for(self, text: str) -> None:
        """Read on until it has been written; fails after `DEADLINE_S`."""
        at, deadline = len(self.text), time.monotonic() + DEADLINE_S
        while text not in self.text[at:]:
            assert time.monotonic() < deadline, self.text[-3000:]
            self._read()

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._ours, text.encode())

    def end(self) -> int:
        """Its exit code, once it has ended."""
        assert self._process is not None
        deadline = time.monotonic() + DEADLINE_S
        while self._process.poll() is None and time.monotonic() < deadline:
            self._read()
        self._process.kill()
        while self._read():
            pass
        return self._process.wait()

    def close(self) -> None:
        """End what still runs, and the terminal."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for descriptor in (self._ours, self._theirs):
            os.close(descriptor)

    def _read(self) -> bool:
        ready, _, _ = select.select([self._ours], [], [], 0.1)
        if ready:
            self.text += os.read(self._ours, 65536).decode(errors="replace")
        return bool(ready)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """A terminal of 20 lines, and of 70 columns: narrow for what is shown."""
    made = Terminal(rows=20, columns=70)
    yield made
    made.close()


def _own_terminal() -> None:
    os.setsid()
    os.close(os.open(os.ttyname(0), os.O_RDWR))


@pytest.mark.parametrize(
    ("shell", "words"),
    [
        ("bash", "complete -o default -F _rfork_completion rfork"),
        ("zsh", "#compdef rfork"),
        ("fish", "--command rfork"),
    ],
)
def test_completion_is_installed(shell: str, words: str, tmp_path: Path) -> None:
    """`rfork --install-completion SHELL` writes the script where the shell looks for it."""
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [_script(), "--install-completion", shell],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert (0, True) == (done.returncode, words in written), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("shell", "variables", "expected"),
    [
        ("bash", {"COMP_WORDS": "rfork explain fork-", "COMP_CWORD": "2"}, {"fork-a", "fork-b", "fork-c"}),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "rfork drain s"}, {'"s":"m on host-s"'}),
        (
            "fish",
            {"_TYPER_COMPLETE_ARGS": "rfork status --model ", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
            {"m\t2 seeds"},
        ),
    ],
)
def test_names_are_completed(shell: str, variables: dict[str, str], expected: set[str], fleet: str) -> None:
    """Each shell is offered what the planner knows."""
    told = completed(shell, variables, fleet)
    assert [] == [word for word in expected if word not in told]


def test_completion_is_silent_without_a_planner() -> None:
    """A planner that says nothing costs little time and no word."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        told = completed("bash", {"COMP_WORDS": "rfork explain x", "COMP_CWORD": "2"}, url)
    assert "" == told.strip()


def completed(shell: str, variables: dict[str, str], planner: str) -> str:
    """What the shell is offered, and anything on stderr."""
    environment = {
        **os.environ,
        **variables,
        "RFORK_PLANNER": planner,
        "_RFORK_COMPLETE": f"complete_{shell}",
    }
    done = subprocess.run([_script()], env=environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def _script() -> str:
    """The `rfork` beside this Python: completion goes by the program's name."""
    return str(Path(sys.executable).parent / "rfork")


@pytest.mark.parametrize("words", [("forks",), ("version",)], ids=" ".join)
def test_nobody_reads_on(fleet: str, words: tuple[str, ...]) -> None:
    """`rfork forks | head -1` ends without a word of broken pipes, and not as a failure."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rfork", *words]
    environment = {**os.environ, "RFORK_PLANNER": fleet}
    done = subprocess.run(
        command, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (0, "") == (done.returncode, done.stderr)


def test_nobody_reads_errors() -> None:
    """Where stderr is closed at the other end, a command ends with its own exit code."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "rfork", "status", "--planner", "none"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writing, check=False)
    os.close(writing)
    assert 2 == done.returncode


def test_an_output_that_knows_no_such_letters(fleet: str) -> None:
    """Where stdout takes ASCII only, bars become question marks, and nothing fails."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "rfork", "top", "--planner", fleet]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (0, "", True) == (done.returncode, done.stderr, "??????" in done.stdout)


def test_a_bug_is_one_line(rfork: Rfork, monkeypatch: pytest.MonkeyPatch, fleet: str) -> None:
    """Even what should not happen is told without a traceback, and says how to see one."""

    def broken(*_: object) -> None:
        raise KeyError("what")

    monkeypatch.setattr(PlannerClient, "models", broken)
    assert "Traceback" in CliRunner().invoke(app, ["status", "--planner", fleet], env=DEBUG).stderr
    done = rfork("status", "--planner", fleet)
    assert (1, "error: rfork failed where it should not: KeyError: 'what'") == (
        done.code,
        done.err.splitlines()[0],
    )


def test_the_version_as_json(rfork: Rfork) -> None:
    """As every command that prints a result."""
    assert ["version"] == list(rfork("version", "--json").json)


def test_following_goes_on_when_the_planner_is_back(rfork_process: StartRfork, free_port: int) -> None:
    """A restart of the planner is told on stderr, and the changes after it are told too."""
    settings = PlannerSettings(port=free_port)
    with running(settings) as url, PlannerClient(url) as client:
        client.report(whole("s"))
        client.ask(ask("a"))
        command = rfork_process(
            "forks", "-f", "--limit", "2", "--planner", url, until="fork-a m on a: planned"
        )
    with running(settings) as url, PlannerClient(url) as client:
        command.wait_for("answers again")
        client.report(whole("s"))
        client.ask(ask("b"))
        assert (0, True) == (command.wait(), "fork-b m on b: planned" in command.stdout)

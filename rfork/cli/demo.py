"""`rfork demo`: fork a real model between real processes on this machine.

Starts a planner, a seed, and three concurrent forks in a chain. Kills a relay with SIGKILL half way and starts a
replacement. Finally compares the tensors of all processes, and their answers to a prompt.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import IO, Annotated, Any, Final

import typer
from pydantic import BaseModel
from rich.live import Live

from rfork.cli import fleet_queries
from rfork.cli.console import Column, FittedTable, err, handle_errors, out, print_renderable, requires_extra
from rfork.cli.demo_model import MODEL, default_cache, prepare
from rfork.cli.formatters import rate
from rfork.cli.top import FleetPoller
from rfork.cli.top_screen import Screen
from rfork.errors import RforkError, StorageError
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkInfo

PROMPT: Final = "What is the capital of France?"
FORKS: Final = 3
START_S: Final = 300.0
FORK_S: Final = 300.0
POLL_INTERVAL_S: Final = 0.1
KILL_FROM, KILL_UNTIL = 0.4, 0.85
"""Verified share of the image at which a relay is killed."""
END_S: Final = 10.0
"""Time between SIGTERM and SIGKILL at the end."""
ERROR_LINES: Final = 5
"""Lines of stderr shown if a process fails."""
WEIGHTS: Final = (".safetensors", ".bin", ".gguf", ".safetensors.index.json")


Event = dict[str, Any]
"""A line of JSON that a process printed."""


def demo(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result to this file.")
    ] = None,
    egress_rate: Annotated[
        int,
        typer.Option(
            help="Maximum bytes per second served by each instance: slow enough to watch and to kill a relay."
        ),
    ] = 30_000_000,
    cache: Annotated[Path | None, typer.Option(help="Folder for the demo's model.")] = None,
) -> None:
    """Fork a real model three times on this machine, kill a relay half way, and verify the result."""
    with handle_errors():
        with requires_extra("`rfork demo`", "demo"):
            import_module("planner.server")  # runs in a process of its own
        folder = prepare(cache or default_cache())
        with tempfile.TemporaryDirectory(prefix="rfork-demo-") as scratch, ExitStack() as children:
            bare = Path(scratch) / folder.name
            _copy_without_weights(folder, bare)
            result = _run(folder, bare, egress_rate, children)
        out.print(f"{result.model}, {result.seed.image_bytes / 1e6:.0f} MB")
        print_renderable(result.table())
        for line in result.lines():
            out.print(line)
        if json_file is not None:
            _write(json_file, result)
        if result.differences():
            raise typer.Exit(1)


def _run(folder: Path, bare: Path, egress_rate: int, children: ExitStack) -> DemoResult:
    """Run all processes to the end and compare their results. `children` ends those that still run, newest first."""

    def start(name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> Child:
        child = Child(name, ["rfork", *arguments, "--json"], environment)
        children.callback(child.end)
        return child

    err.print("starting the planner and a seed")
    planner = start("planner", ["planner", "--port", "0"], {"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "1"})
    url = str(planner.wait_for("url", START_S)["url"])
    environment = {
        "RFORK_PLANNER": url,
        "RFORK_MAX_EGRESS_BYTES_PER_S": str(egress_rate),
        "RFORK_TRANSPORTS": "http",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }

    def pull(model_dir: Path, number: int) -> Child:
        """Start an instance that loads from its folder or forks, answers the prompt, and stays as a seed."""
        arguments = ["pull", str(model_dir), "--name", MODEL, "--generate", PROMPT, "--sha256", "--stay"]
        return start(f"node-{number}", arguments, {**environment, "RFORK_NODE_NAME": f"node-{number}"})

    seed = pull(folder, 0).wait_for("outcome", START_S)
    err.print(
        f"starting {FORKS} forks from a folder without weights, over http; each instance serves at most "
        f"{rate(egress_rate)}, slow enough to watch (--egress-rate)"
    )
    forks = {f"node-{number}": pull(bare, number) for number in range(1, FORKS + 1)}
    killed, killed_at_share = None, 0.0
    deadline = time.monotonic() + FORK_S
    with PlannerClient(url) as client, Live(console=err, auto_refresh=False, transient=True) as live:
        poller = FleetPoller(client)
        while True:
            sample = poller.poll()
            live.update(Screen(sample, url, time.time()), refresh=True)
            others = [each for each in sample.fleet.forks if each.instance_id != seed["instance_id"]]
            if sum(each.state == "finished" for each in others) >= FORKS:
                break
            relay = relay_to_kill(others) if killed is None else None
            host = sample.fleet.hosts.get(relay.instance_id) if relay is not None else None
            if relay is not None and host is not None:
                killed, killed_at_share = host, fleet_queries.verified_share(relay)
                err.print(f"killing {host}, a relay with {killed_at_share:.0%} verified, and starting another fork")
                forks.pop(host).kill()
                forks[f"node-{FORKS + 1}"] = pull(bare, FORKS + 1)
            for child in forks.values():
                child.check()
            if time.monotonic() > deadline:
                raise ChildFailed(f"the forks did not finish within {FORK_S:.0f} s")
            time.sleep(POLL_INTERVAL_S)
    rows = [_row(name, child.wait_for("outcome", FORK_S)) for name, child in sorted(forks.items())]
    return DemoResult(seed=_row("node-0", seed), forks=rows, killed=killed, killed_at_share=killed_at_share)


def relay_to_kill(forks: Sequence[ForkInfo]) -> ForkInfo | None:
    """Return the fork of a half-finished relay with a reader; None if there is none."""
    running = [fork for fork in forks if fork.state == "running"]
    source_ids = {share.source_id for fork in running for share in fork.plan}
    for fork in running:
        if fork.instance_id in source_ids and KILL_FROM <= fleet_queries.verified_share(fork) <= KILL_UNTIL:
            return fork
    return None


def _copy_without_weights(folder: Path, bare: Path) -> None:
    """Copy only the config and tokenizer of the folder, so that a fork cannot load weights from it."""
    bare.mkdir()
    for path in folder.iterdir():
        if not path.name.endswith(WEIGHTS):
            shutil.copy(path, bare)


def _write(path: Path, result: DemoResult) -> None:
    try:
        path.write_text(json.dumps(result.to_dict(), indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from None


# -- its processes --------------------------------------------------------------------------------------------


class ChildFailed(RforkError):
    """A process of the demo exited, or did not respond in time."""


class Child:
    """A ``python -m …`` process that writes JSON lines to stdout."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = name
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed by `end`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**_without_settings(os.environ), **environment},
        )
        self._thread = threading.Thread(
            target=self._read, args=(self._process.stdout,), name=f"{name}-out", daemon=True
        )
        self._thread.start()

    def wait_for(self, key: str, timeout_s: float) -> Event:
        """Return the next event that has this key.

        Raises ChildFailed if the process reports an error or exits, or after the timeout.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise self._failure(f"did not respond within {timeout_s:.0f} s") from None
            if event is None:
                raise self._failure(f"exited with code {self._process.wait()}")
            if "error" in event and "fault" in event:
                raise ChildFailed(str(event["message"]))
            if key in event:
                return event

    def check(self) -> None:
        """Raise ChildFailed if the process has exited."""
        if self._process.poll() is not None:
            raise self._failure(f"exited with code {self._process.wait()}")

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Send SIGTERM, then SIGKILL if the process does not exit; return when it has exited."""
        self._process.terminate()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        self._thread.join()
        self._errors.close()

    def _read(self, stdout: IO[str]) -> None:
        with stdout:
            for line in stdout:
                try:
                    event = json.loads(line)
                except ValueError:
                    continue  # output of a library
                if isinstance(event, dict):
                    self._events.put(event)
        self._events.put(None)

    def _failure(self, problem: str) -> ChildFailed:
        self._errors.seek(0)
        last = self._errors.read().splitlines()[-ERROR_LINES:]
        return ChildFailed("\n  ".join([f"{self._name} {problem}", *last]))


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Remove rfork settings exported by the user's shell, so that the demo always runs the same way."""
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith("RFORK_") or name.startswith("RFORK_TRACING_")
    }


# -- its result -----------------------------------------------------------------------------------------------


class InstanceRow(BaseModel):
    """The seed or a fork, as it reported itself; `sources` count verified bytes by host."""

    host: str
    outcome: str
    image_bytes: int
    seconds: float
    gb_per_s: float
    sources: dict[str, int]
    bytes_repeated: int
    chunks: int
    chunks_verified: int
    replans: int
    weights_id: str
    sha256: str
    generated: str


def _row(host: str, report: Event) -> InstanceRow:
    sources = {share["host"]: share["verified_bytes"] for share in report["sources"]}
    return InstanceRow.model_validate({**report, "host": host, "sources": sources})


class DemoResult(BaseModel):
    """Reports of the seed and the forks, which are compared, and the relay that was killed."""

    model: str = MODEL
    seed: InstanceRow
    forks: list[InstanceRow]
    killed: str | None
    killed_at_share: float

    def differences(self) -> list[str]:
        """Return differences from the expected result, one line each; empty if every fork equals the seed."""
        found = []
        for fork in self.forks:
            if fork.outcome != "forked":
                found.append(f"{fork.host} did not fork: {fork.outcome}")
            if fork.chunks_verified != fork.chunks:
                found.append(f"{fork.host} verified {fork.chunks_verified} of {fork.chunks} chunks")
            if (fork.weights_id, fork.sha256) != (self.seed.weights_id, self.seed.sha256):
                found.append(f"{fork.host} has different bytes than the seed")
            if fork.generated != self.seed.generated or not self.seed.generated:
                found.append(f"{fork.host} answers {fork.generated!r}, the seed {self.seed.generated!r}")
        return found

    def table(self) -> FittedTable:
        """Return a table with one row per fork."""
        columns = (
            Column("fork"),
            Column("seconds", right=True),
            Column("GB/s", right=True),
            Column("sources", min_width=12, priority=1),
            Column("reread", right=True, priority=3),
            Column("verified", right=True),
            Column("replans", right=True, priority=2),
        )
        rows = []
        for fork in self.forks:
            total = sum(fork.sources.values()) or 1
            rows.append(
                (
                    fork.host,
                    f"{fork.seconds:.2f}",
                    f"{fork.gb_per_s:.3f}",
                    ", ".join(f"{host} {nbytes / total:.0%}" for host, nbytes in fork.sources.items()),
                    f"{fork.bytes_repeated / 1e6:.1f} MB",
                    f"{fork.chunks_verified}/{fork.chunks}",
                    str(fork.replans),
                )
            )
        return FittedTable(columns, rows)

    def lines(self) -> Iterator[str]:
        """Yield the lines below the table."""
        if self.killed is None:
            yield "no relay was killed: none was half finished with a reader when checked"
        else:
            yield (
                f"killed with SIGKILL: {self.killed}, a relay with {self.killed_at_share:.0%} verified; "
                f"replaced by {max(fork.host for fork in self.forks)}"
            )
        yield f"answer of the seed: {self.seed.generated}"
        for fork in self.forks:
            yield f"answer of {fork.host}: {fork.generated}"
        differences = self.differences()
        if not differences:
            yield f"equal: all tensors of seed and forks have the SHA-256 {self.seed.sha256[:16]}…"
        for difference in differences:
            yield f"DIFFERENT: {difference}"

    def to_dict(self) -> dict[str, object]:
        """Return the result for JSON."""
        differences = self.differences()
        return {**self.model_dump(), "equal": not differences, "differences": differences}

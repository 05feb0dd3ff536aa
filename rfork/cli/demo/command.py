"""`rfork demo`: fork a real model between real processes on this machine.

Starts a planner, a seed that keeps answering a prompt, and three concurrent forks in a chain. Kills a relay
with SIGKILL half way and starts a replacement. Finally compares the tensors of all processes.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from rfork.cli.console import err, handle_errors, out, requires_extra
from rfork.cli.demo.model import MODEL, default_cache, prepare
from rfork.cli.demo.monitor import DemoMonitor
from rfork.cli.demo.processes import Child, ChildFailed, Children, Event
from rfork.cli.demo.result import DemoResult, compare_results
from rfork.cli.formatters import rate
from rfork.errors import StorageError
from rfork.planner_client.client import PlannerClient

PROMPT = "What is the capital of France?"
FORKS = 3
WARM_GENERATIONS, IDLE_GENERATIONS = 3, 12
START_S = 300.0
FORK_S = 300.0
POLL_INTERVAL_S = 0.1
KILL_FROM, KILL_UNTIL = 0.4, 0.85
"""Verified share of the image at which a relay is killed."""
WEIGHTS = (".safetensors", ".bin", ".gguf", ".safetensors.index.json")


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
        folder = prepare(cache or default_cache(), console=err)
        with tempfile.TemporaryDirectory(prefix="rfork-demo-") as scratch, Children() as children:
            bare = Path(scratch) / folder.name
            _copy_without_weights(folder, bare)
            result = _run(folder, bare, egress_rate, children)
        out.print(result.table())
        for line in result.lines():
            out.print(line)
        if json_file is not None:
            _write(json_file, result)
        if not result.equal:
            raise typer.Exit(1)


def _run(folder: Path, bare: Path, egress_rate: int, children: Children) -> DemoResult:
    """Run all processes to the end and compare their results."""
    err.print("starting the planner and a seed that keeps answering a prompt")
    planner = children.add(
        Child(
            "planner",
            ["rfork", "planner", "--port", "0", "--json"],
            environment={"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "1"},
        )
    )
    url = str(planner.wait_for(_ready, START_S)["url"])
    environment = {
        "RFORK_PLANNER": url,
        "RFORK_MAX_EGRESS_BYTES_PER_S": str(egress_rate),
        "RFORK_TRANSPORTS": "http",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    monitor = DemoMonitor()
    seed = children.add(
        Child(
            "seed",
            ["rfork.cli.demo.seed_process", str(folder), MODEL, PROMPT],
            environment={**environment, "RFORK_NODE_NAME": "node-0"},
            on_event=monitor.on_seed_event,
        )
    )
    monitor.seed_ready = seed.wait_for(_ready, START_S)
    for number in range(WARM_GENERATIONS + IDLE_GENERATIONS):
        if number == WARM_GENERATIONS:
            monitor.seed_warm()
        seed.wait_for(_is_generation, START_S)

    def fork(number: int) -> Child:
        arguments = [
            "rfork",
            "pull",
            str(bare),
            "--name",
            MODEL,
            "--generate",
            PROMPT,
            "--sha256",
            "--stay",
            "--json",
        ]
        host_environment = {"RFORK_NODE_NAME": f"node-{number}"}
        return children.add(Child(f"fork {number}", arguments, environment={**environment, **host_environment}))

    err.print(
        f"starting {FORKS} forks from a folder without weights, over http; each instance serves at most "
        f"{rate(egress_rate)}, slow enough to watch (--egress-rate)"
    )
    forks = {f"node-{number}": fork(number) for number in range(1, FORKS + 1)}
    monitor.forks_started()
    with (
        PlannerClient(url) as client,
        Live(console=err, get_renderable=monitor.render, refresh_per_second=8, transient=False) as live,
    ):
        live.auto_refresh = err.is_terminal
        deadline = time.monotonic() + FORK_S
        while not monitor.done(FORKS):
            monitor.poll(client)
            victim = monitor.relay_to_kill(KILL_FROM, KILL_UNTIL)
            if victim is not None:
                forks[victim].kill()
                monitor.killed(victim)
                forks[victim] = fork(FORKS + 1)
                forks[f"node-{FORKS + 1}"] = forks.pop(victim)
            for child in forks.values():
                if not child.running:
                    child.wait_for(lambda _: False, 1.0)  # raises ChildFailed with the last lines of stderr
            if time.monotonic() > deadline:
                raise ChildFailed(f"the forks did not finish within {FORK_S:.0f} s")
            time.sleep(POLL_INTERVAL_S)
        monitor.forks_ended()
    if not err.is_terminal:
        err.print()  # without a terminal, Live does not print a final newline
    results = {host: child.wait_for(_is_report, FORK_S) for host, child in sorted(forks.items())}
    return compare_results(monitor, results)


def _ready(event: Event) -> bool:
    return event.get("event") == "ready"


def _is_generation(event: Event) -> bool:
    return event.get("event") == "answer"


def _is_report(event: Event) -> bool:
    if "error" in event and "fault" in event:
        raise ChildFailed(str(event["message"]))
    return "outcome" in event


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

"""`rfork demo`: the main job on this machine, with real processes and a real model.

A planner, a seed that keeps answering a prompt, three forks at once in a chain, and a SIGKILL to a
relay half way; a replacement forks in its place. It ends with proof that all hold the same tensors.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from rfork.cli.console import err, handle_errors, out
from rfork.cli.demo.model import MODEL, default_cache, prepare
from rfork.cli.demo.monitor import DemoMonitor
from rfork.cli.demo.processes import Child, ChildFailed, Children, Event
from rfork.cli.demo.result import DemoResult, compare_results
from rfork.cli.format import rate
from rfork.errors import StorageError
from rfork.planner_client.client import PlannerClient

PROMPT = "What is the capital of France?"
FORKS = 3
WARM_GENERATIONS, IDLE_GENERATIONS = 3, 12
START_S = 300.0
FORK_S = 300.0
POLL_INTERVAL_S = 0.1
KILL_FROM, KILL_UNTIL = 0.4, 0.85
"""The share of the image that a relay has verified when it is killed: half way, give or take a look."""
WEIGHTS = (".safetensors", ".bin", ".gguf", ".safetensors.index.json")


def demo(
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result there.")] = None,
    egress_rate: Annotated[
        int,
        typer.Option(help="Bytes a second that each instance gives: slow enough to watch and to kill half way."),
    ] = 30_000_000,
    cache: Annotated[Path | None, typer.Option(help="Where the demo's model is kept.")] = None,
) -> None:
    """Fork a real model three times on this machine, kill a relay half way, and prove the result."""
    with handle_errors():
        folder = prepare(cache or default_cache(), console=err)
        with tempfile.TemporaryDirectory(prefix="rfork-demo-") as scratch, Children() as children:
            bare = Path(scratch) / folder.name
            _copy_without_weights(folder, bare)
            verdict = _play(folder, bare, egress_rate, children)
        out.print(verdict.table())
        for line in verdict.lines():
            out.print(line)
        if json_file is not None:
            _write(json_file, verdict)
        if not verdict.equal:
            raise typer.Exit(1)


def _play(folder: Path, bare: Path, egress_rate: int, children: Children) -> DemoResult:
    """Run all processes to their end; what they said makes the verdict."""
    err.print("starting the planner and a seed that keeps answering")
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
    scene = DemoMonitor()
    seed = children.add(
        Child(
            "seed",
            ["rfork.cli.demo.seed_process", str(folder), MODEL, PROMPT],
            environment={**environment, "RFORK_NODE_NAME": "node-0"},
            on_event=scene.on_seed_event,
        )
    )
    scene.seed_ready = seed.wait_for(_ready, START_S)
    for number in range(WARM_GENERATIONS + IDLE_GENERATIONS):
        if number == WARM_GENERATIONS:
            scene.seed_warm()
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
        f"starting {FORKS} forks at once, from a folder that holds no weights; each instance gives "
        f"{rate(egress_rate)} at most, to be slow enough to watch (--egress-rate), over http"
    )
    forks = {f"node-{number}": fork(number) for number in range(1, FORKS + 1)}
    scene.forks_started()
    with (
        PlannerClient(url) as client,
        Live(console=err, get_renderable=scene.render, refresh_per_second=8, transient=False) as live,
    ):
        live.auto_refresh = err.is_terminal
        deadline = time.monotonic() + FORK_S
        while not scene.done(FORKS):
            scene.poll(client)
            victim = scene.relay_to_kill(KILL_FROM, KILL_UNTIL)
            if victim is not None:
                forks[victim].kill()
                scene.killed(victim)
                forks[victim] = fork(FORKS + 1)
                forks[f"node-{FORKS + 1}"] = forks.pop(victim)
            for child in forks.values():
                if not child.running:
                    child.wait_for(lambda _: False, 1.0)  # raises with the child's last words
            if time.monotonic() > deadline:
                raise ChildFailed(f"the forks did not end within {FORK_S:.0f} s")
            time.sleep(POLL_INTERVAL_S)
        scene.forks_ended()
    if not err.is_terminal:
        err.print()  # Live ends without one there
    results = {host: child.wait_for(_is_report, FORK_S) for host, child in sorted(forks.items())}
    return compare_results(scene, results)


def _ready(event: Event) -> bool:
    return event.get("event") == "ready"


def _is_generation(event: Event) -> bool:
    return event.get("event") == "answer"


def _is_report(event: Event) -> bool:
    if "error" in event and "fault" in event:
        raise ChildFailed(str(event["message"]))
    return "outcome" in event


def _copy_without_weights(folder: Path, bare: Path) -> None:
    """The folder's config and tokenizer only: nothing that a fork could load its weights from."""
    bare.mkdir()
    for path in folder.iterdir():
        if not path.name.endswith(WEIGHTS):
            shutil.copy(path, bare)


def _write(path: Path, verdict: DemoResult) -> None:
    try:
        path.write_text(json.dumps(verdict.to_dict(), indent=2) + "\n")
    except OSError as error:
        raise StorageError(f"{path}: {error.strerror or error}") from None

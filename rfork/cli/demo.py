"""`rfork demo`: fork a real model between real processes on this machine.

Starts a planner, a seed, and three concurrent forks in a chain. Kills a relay with SIGKILL half way and starts a
replacement. Finally compares the tensors of all processes, and their answers to a prompt.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Annotated, Final

import typer
from pydantic import BaseModel
from rich.live import Live
from rich.text import Text
from rich.tree import Tree

from rfork.cli import fleet_queries
from rfork.cli.console import Column, FittedTable, err, handle_errors, out, print_renderable, requires_extra
from rfork.cli.demo_model import MODEL, default_cache, prepare
from rfork.cli.demo_processes import Child, ChildFailed, Event
from rfork.cli.formatters import rate
from rfork.errors import StorageError
from rfork.planner_client.client import PlannerClient
from rfork.schema import ForkInfo

PROMPT: Final = "What is the capital of France?"
FORKS: Final = 3
START_S: Final = 300.0
FORK_S: Final = 300.0
POLL_INTERVAL_S: Final = 0.1
KILL_FROM, KILL_UNTIL = 0.4, 0.85
"""Verified share of the image at which a relay is killed."""
WEIGHTS: Final = (".safetensors", ".bin", ".gguf", ".safetensors.index.json")
BAR: Final = 12


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
    monitor = DemoMonitor(seed_id=str(seed["instance_id"]))
    with (
        PlannerClient(url) as client,
        Live(console=err, get_renderable=monitor.render, refresh_per_second=8, transient=False) as live,
    ):
        live.auto_refresh = err.is_terminal
        deadline = time.monotonic() + FORK_S
        while not monitor.done(FORKS):
            monitor.poll(client)
            victim = monitor.relay_to_kill()
            if victim is not None:
                forks.pop(victim).kill()
                monitor.killed(victim)
                forks[f"node-{FORKS + 1}"] = pull(bare, FORKS + 1)
            for child in forks.values():
                child.check()
            if time.monotonic() > deadline:
                raise ChildFailed(f"the forks did not finish within {FORK_S:.0f} s")
            time.sleep(POLL_INTERVAL_S)
    if not err.is_terminal:
        err.print()  # without a terminal, Live does not print a final newline
    reports = {host: child.wait_for("outcome", FORK_S) for host, child in sorted(forks.items())}
    return DemoResult(
        seed=_row("node-0", seed),
        forks=[_row(host, report) for host, report in reports.items()],
        killed=monitor.victim,
        killed_at_share=monitor.killed_at_share,
    )


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


# -- the running demo -----------------------------------------------------------------------------------------


class DemoMonitor:
    """The planner's view of the forks. `seed_id`: instance of the seed, whose own start is not shown."""

    def __init__(self, seed_id: str = "") -> None:
        self.victim: str | None = None
        self.killed_at_share = 0.0
        self._seed_id = seed_id
        self._hosts: dict[str, str] = {}
        self._forks: list[ForkInfo] = []

    def poll(self, client: PlannerClient) -> None:
        """Fetch the current instances and forks from the planner."""
        for view in client.instances():
            self._hosts[view.report.instance_id] = view.report.placement.host
        forks = [fork for fork in client.forks() if fork.instance_id != self._seed_id]
        self._forks = sorted(forks, key=lambda fork: -fork.age_s)

    def done(self, expected: int) -> bool:
        """Return whether this many forks have finished."""
        return sum(1 for fork in self._forks if fork.state == "finished") >= expected

    def relay_to_kill(self) -> str | None:
        """Return the host of a half-finished relay with a reader, unless a relay was already killed."""
        if self.victim is not None:
            return None
        running = [fork for fork in self._forks if fork.state == "running"]
        source_ids = {share.source_id for fork in running for share in fork.plan}
        for fork in running:
            if fork.instance_id in source_ids and KILL_FROM <= fleet_queries.verified_share(fork) <= KILL_UNTIL:
                return self._hosts[fork.instance_id]
        return None

    def killed(self, host: str) -> None:
        """Note that the relay on `host` was killed."""
        self.victim = host
        self.killed_at_share = max(
            fleet_queries.verified_share(fork) for fork in self._forks if self._host(fork.instance_id) == host
        )

    def render(self) -> Tree:
        """Return the fork tree with a progress bar per fork."""
        tree = Tree(Text("node-0  seed", style="bold green"))
        branches: dict[str, Tree] = {"node-0": tree}
        for fork in self._forks:
            sources = [self._host(share.source_id) for share in fork.plan]
            parent = next((branches[source] for source in sources if source in branches), tree)
            branches[self._host(fork.instance_id)] = parent.add(self._line(fork, sources))
        return tree

    def _line(self, fork: ForkInfo, sources: list[str]) -> Text:
        host, share = self._host(fork.instance_id), fleet_queries.verified_share(fork)
        filled = round(share * BAR)
        mb_per_s = fork.progress.bytes_per_s / 1e6 if fork.progress is not None else 0.0
        # Must fit 80 columns: the bar already shows "running" and "finished".
        word, style = "", "green" if fork.state == "finished" else "cyan"
        if host == self.victim:
            word, style = "killed (SIGKILL), ", "red"
        elif fork.state not in ("running", "finished"):
            word = f"{fork.state}, "
        return Text(
            f"{host}  {'█' * filled}{'·' * (BAR - filled)} {share:4.0%} {mb_per_s:6.1f} MB/s  "
            f"{word}from {', '.join(sources) or '?'}",
            style=style,
            no_wrap=True,
            overflow="ellipsis",
        )

    def _host(self, instance_id: str) -> str:
        """Return the node of an instance, or the first part of its id."""
        return self._hosts.get(instance_id, instance_id[:8])


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

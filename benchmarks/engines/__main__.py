"""Measure the time to weights and to the first token of real engines, for each source of weights.

Stock vLLM and SGLang on the CPU, with a random model of TinyLlama's shapes (2.2 GB in bfloat16), so that its
size dominates. Each run is a separate process, which ends after its first tokens. Contenders of one engine
run interleaved, every second round in reverse order; their tokens must be equal.

"weights s" is the time of the engine's own call that makes the model: built, filled, post-processed (vLLM:
`get_model`; SGLang: its log line). rfork's time includes the planner and the verification of each byte; the
others verify nothing. Run:ai's streamer and tensorizer run if they are installed in vLLM's venv. "first token
s" counts from the start of the process; here it is mostly imports, configuration and the KV cache. "read MB"
is what the process had read from block devices by then. "cold": all files that it reads (checkpoint or
snapshot) were dropped from the page cache just before.

"rfork from a seed, http" is as between two hosts, over loopback; "of this host" leaves the choice to rfork,
which maps the seed's memory. The seed is the same engine, idle, with `--load-format rfork`. SIGTERM ends the
run early and reports the results so far. "remote_instance" is SGLang's own R-Fork over Mooncake's TCP.
Contenders that could not run are listed below the table.

Until an engine begins to load, this process keeps as much memory allocated as two images, and then frees it: a
virtual machine returns free memory to its host within seconds, and gets it back at a tenth of the speed of memory.
No contender should pay for that by chance.

`engine_fork_vs_disk_cold` is the worse engine's time to weights from a seed over http, divided by its default
loader's with a cold cache; `…_same_host` is that of forks that map the seed's memory. "limit" is the time to
send as many bytes over one loopback socket, and the time to write as much new memory, which every loader
does.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from benchmarks import harness
from benchmarks.engines.cases import CASES, EngineCase, EngineName, EngineRun
from benchmarks.engines.limits import memory_seconds, socket_seconds
from benchmarks.engines.model import without_weights, write_model
from benchmarks.engines.processes import EngineFailed, EngineProcesses, python_of
from benchmarks.engines.table import figures, limit_row, row
from rfork.errors import RforkError

Runs = dict[EngineCase, list[EngineRun]]
ROUNDS = 5


def main() -> None:
    """Run the benchmark, print the table and write the requested files."""
    options = harness.options("engines", __doc__, has_only=True)
    harness.exit_on_sigterm()
    runs: Runs = {case: [] for case in harness.selected(CASES, options, lambda case: case.key)}
    failed: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(prefix="rfork-engines-") as name,
        EngineProcesses(Path(name)) as processes,
    ):
        size = write_model(processes.folder / "model", quick=options.quick)
        processes.image_bytes = size
        without_weights(processes.folder / "model", processes.folder / "bare" / "model")
        limits = [(socket_seconds(size), memory_seconds(size)) for _ in range(options.rounds)]
        try:
            for engine in ("vllm", "sglang"):
                if python_of(engine) is None:
                    failed[engine] = "not installed: make test-engines"
                    continue
                if any(case.engine == engine for case in runs):
                    _measure(processes, engine, options.rounds, runs, failed)
        except SystemExit:  # ended early: report the results so far, with their number of runs
            failed["the rest"] = "ended before it finished"
    harness.publish(
        options,
        settings={"image_bytes": size, **{f"not run: {key}": reason for key, reason in failed.items()}},
        rows=[
            limit_row("one loopback socket", [socket_time for socket_time, _ in limits], size),
            limit_row("new memory, all cores", [fresh for _, fresh in limits], size),
            *(row(case, model_files, size) for case, model_files in runs.items() if model_files),
        ],
        figures=figures(runs),
        plot=("contender", "weights s"),
    )
    for key, reason in failed.items():
        print(f"did not run: {key}: {reason}")


def _measure(processes: EngineProcesses, engine: EngineName, rounds: int, runs: Runs, failed: dict[str, str]) -> None:
    """Run all cases of one engine, interleaved."""
    processes.start_planner()
    with contextlib.ExitStack() as seeds:
        seeds.enter_context(processes.seed(engine))
        snapshot = _snapshot(processes, engine)
        # An empty planner, so that its targets read the snapshot.
        variables: dict[str, Mapping[str, str]] = {"seed": {"RFORK_PLANNER": processes.planner}, "disk": {}}
        processes.start_planner()
        variables["snapshot"] = {"RFORK_PLANNER": processes.planner, "RFORK_SNAPSHOT": str(snapshot)}
        if any((case.engine, case.checkpoint) == (engine, "tensorized") for case in runs):
            try:
                processes.tensorize("tensorized")
            except EngineFailed as error:
                failed["vllm: tensorizer, cold cache"] = _last(error)
        cases = [case for case in runs if case.engine == engine and case.key not in failed]
        for number in range(rounds):
            for case in cases if number % 2 == 0 else cases[::-1]:
                if case.key in failed:
                    continue
                print(f"round {number + 1}/{rounds}: {case.key}", file=sys.stderr)
                if case.cold:
                    processes.drop_cache("model", case.checkpoint, snapshot.name)
                try:
                    if case.source == "stock seed":
                        # Only for its own run: an idle stock seed takes a core from all others.
                        with processes.stock_seed() as stock:
                            runs[case].append(processes.run(_with(case, stock), {}))
                    else:
                        runs[case].append(processes.run(case, variables.get(case.source, {})))
                except EngineFailed as error:
                    failed[case.key] = _last(error)
                    runs[case].clear()
    outputs = {run.tokens for case in cases for run in runs[case]}
    if len(outputs) > 1:
        raise RforkError(f"{engine} generates different tokens depending on the source of its weights: {outputs}")


def _with(case: EngineCase, arguments: Mapping[str, object]) -> EngineCase:
    return replace(case, arguments={**case.arguments, **arguments})


def _snapshot(processes: EngineProcesses, engine: EngineName) -> Path:
    """Write the seed's weights as a snapshot with the public command."""
    folder = processes.folder / f"snapshot-{engine}"
    shutil.rmtree(folder, ignore_errors=True)
    options = ["--name", "bench", "--planner", processes.planner]
    command = [sys.executable, "-m", "rfork", "snapshot", "write", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RforkError(f"no snapshot of {engine}: {done.stderr.strip()}")
    return folder


def _last(error: EngineFailed) -> str:
    """Return the last line of an error."""
    return str(error).strip().splitlines()[-1][:200]


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(f"{error}\n{error.hint}".strip()) from None

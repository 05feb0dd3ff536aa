"""The live view of `rfork demo`."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace
from typing import cast

from rich.console import Console

from rfork.cli.demo import DemoMonitor
from rfork.planner_client.client import PlannerClient
from rfork.schema import ChunkAssignment
from tests.unit.cli.fleet_builders import running_fork


def test_a_tree_four_deep_fits_80_columns() -> None:
    """Each fork has one line with all its sources; the killed fork is marked."""
    names = [f"node-{number}" for number in range(5)]
    above = {1: [0], 2: [1], 3: [2], 4: [1, 2, 3]}
    forks = tuple(
        running_fork(
            instance_id=names[number],
            fork_id=f"f{number}",
            plan=tuple(ChunkAssignment(source_id=names[one], chunks=((one, one),)) for one in sources),
            verified=((0, 4),) if number == 4 else ((0, 2),),
            bytes_per_s=92e6,
            age_s=10.0 - number,
        )
        for number, sources in above.items()
    )
    views = [
        SimpleNamespace(report=SimpleNamespace(instance_id=name, placement=SimpleNamespace(host=name)))
        for name in names
    ]
    client = SimpleNamespace(instances=lambda: views, forks=lambda: forks)
    monitor = DemoMonitor()
    monitor.poll(cast(PlannerClient, client))
    monitor.killed("node-3")
    written = StringIO()
    Console(file=written, width=80, color_system=None).print(monitor.render())
    lines = [line.strip("└─├│ ") for line in written.getvalue().splitlines()]
    assert [
        "node-0  seed",
        "node-1  ██████······  50%   92.0 MB/s  from node-0",
        "node-2  ██████······  50%   92.0 MB/s  from node-1",
        "node-3  ██████······  50%   92.0 MB/s  killed (SIGKILL), from node-2",
        "node-4  ████████████ 100%   92.0 MB/s  from node-1, node-2, node-3",
    ] == lines

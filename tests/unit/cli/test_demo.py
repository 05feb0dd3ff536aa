"""`rfork demo`: the relay that it kills, and its comparison of the processes."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from rfork.cli.demo import DemoResult, InstanceRow, relay_to_kill
from rfork.schema import ChunkAssignment, ForkInfo
from tests.unit.cli.fleet_builders import RELAY, SEED, TARGET, finished_fork, running_fork

FROM_RELAY = (ChunkAssignment(source_id=RELAY, chunks=((0, 4),)),)


def row(host: str, **values: object) -> InstanceRow:
    """Return the row of an instance that forked and answered like all others."""
    usual: dict[str, object] = {
        "host": host, "outcome": "forked", "image_bytes": 4_000_000, "seconds": 2.0, "gb_per_s": 0.002,
        "sources": {"node-0": 3_000_000, "node-1": 1_000_000}, "bytes_repeated": 0, "chunks": 4, "chunks_verified": 4,
        "replans": 0, "weights_id": "w", "sha256": "5" * 64, "generated": "Paris",
    }  # fmt: skip
    return InstanceRow.model_validate(usual | values)


def result(*forks: InstanceRow) -> DemoResult:
    """Return the result of a demo with these forks of node-0."""
    return DemoResult(seed=row("node-0"), forks=list(forks), killed="node-1", killed_at_share=0.5)


@pytest.mark.parametrize(
    ("forks", "killed"),
    [
        ([running_fork(instance_id=RELAY), running_fork(instance_id=TARGET, plan=FROM_RELAY)], RELAY),
        ([running_fork(instance_id=RELAY), running_fork(instance_id=TARGET)], None),
        ([running_fork(instance_id=RELAY, verified=((0, 1),)), running_fork(plan=FROM_RELAY)], None),
        ([running_fork(instance_id=RELAY, verified=((0, 4),)), running_fork(plan=FROM_RELAY)], None),
        ([finished_fork(instance_id=SEED), running_fork(instance_id=TARGET)], None),
    ],
    ids=["half finished", "without a reader", "too early", "complete", "a seed"],
)
def test_a_half_finished_relay_with_a_reader_is_killed(forks: list[ForkInfo], killed: str | None) -> None:
    """Killing it shows that the reader keeps its verified chunks and gets the others elsewhere."""
    found = relay_to_kill(forks)
    assert killed == (found.instance_id if found is not None else None)


def test_equal_processes_have_no_differences() -> None:
    """All tensors and answers are those of the seed."""
    done = result(row("node-2"), row("node-4"))
    assert [] == done.differences()
    assert "equal: all tensors of seed and forks have the SHA-256 5555555555555555…" == list(done.lines())[-1]
    assert "killed with SIGKILL: node-1, a relay with 50% verified; replaced by node-4" == next(done.lines())


@pytest.mark.parametrize(
    ("values", "difference"),
    [
        ({"outcome": "fallback"}, "node-2 did not fork: fallback"),
        ({"chunks_verified": 3}, "node-2 verified 3 of 4 chunks"),
        ({"sha256": "6" * 64}, "node-2 has different bytes than the seed"),
        ({"weights_id": "v"}, "node-2 has different bytes than the seed"),
        ({"generated": "Rome"}, "node-2 answers 'Rome', the seed 'Paris'"),
    ],
)
def test_a_difference_is_named(values: dict[str, object], difference: str) -> None:
    """Each difference is one line, and the result is not equal."""
    done = result(row("node-2", **values))
    assert [difference] == done.differences()
    assert f"DIFFERENT: {difference}" in done.lines()
    assert done.to_dict()["equal"] is False


def test_the_result_fits_80_columns() -> None:
    """Each fork is one line with the shares of its sources."""
    written = StringIO()
    Console(file=written, width=80, color_system=None).print(result(row("node-2")).table())
    assert [
        "fork    seconds   GB/s  sources                 reread  verified  replans",
        "node-2     2.00  0.002  node-0 75%, node-1 25%  0.0 MB       4/4        0",
    ] == [line.rstrip() for line in written.getvalue().splitlines()]

"""Rounds of the chaos benchmark: generation, checks and summary. The rounds themselves run in tests/chaos."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chaos import disk
from benchmarks.chaos.__main__ import parse
from benchmarks.chaos.checks import (
    Finding,
    ForkEnding,
    InjectedFault,
    ProcessResources,
    RoundObservation,
    check_round,
    find_leaks,
)
from benchmarks.chaos.messages import COMMAND_ADAPTER, RESPONSE_ADAPTER, ChaosCommand, ChaosResponse, PlannerForkInfo
from benchmarks.chaos.results import ChaosSummary
from benchmarks.chaos.runner import fault_candidates
from benchmarks.chaos.scenarios import (
    FAULT_ROLES,
    SHORT_ROUNDS,
    SIZES_MIB,
    ChaosFault,
    ChaosRound,
    FaultType,
    Role,
    generate_round,
)
from benchmarks.fanout.messages import encode_line
from rfork.storage.local import LocalFile

MIB = 1 << 20
ROUND = ChaosRound(7, "seeds", 1, 3, 32, "memory", False, False, (ChaosFault("kill", "relay", 0, 0.5, 0.1, None),))
RESOURCES = ProcessResources(1, ("MainThread",), {"socket": 1, "/dev/null": 1}, 200 * MIB)
FORKED = ForkEnding("t0", "forked", is_correct=True, repeated_bytes=5 * MIB, chunk_bytes=MIB, seconds=3.0)
OBSERVATION = RoundObservation(
    round=ROUND,
    window=4,
    injected=(InjectedFault("kill", "seed", "seed0"),),
    endings=(FORKED, ForkEnding("t1", "killed"), ForkEnding("t2", "failed", reasons=("NoSource: none",))),
    before={"t0": RESOURCES},
    after={"t0": RESOURCES},
    recovery_s=2.5,
)


def with_ending(**changes: object) -> Callable[[RoundObservation], RoundObservation]:
    """Return a change that replaces the first target's ending."""
    return lambda observation: replace(observation, endings=(replace(FORKED, **changes), *observation.endings[1:]))  # type: ignore[arg-type]


def with_after(**changes: object) -> Callable[[RoundObservation], RoundObservation]:
    """Return a change that replaces the resources of a process after the round."""
    return lambda observation: replace(observation, after={"t0": replace(RESOURCES, **changes)})  # type: ignore[arg-type]


# -- generation ---------------------------------------------------------------------------------------


def test_a_round_depends_only_on_its_number() -> None:
    """The same number generates the same round, so a failed round can be repeated."""
    assert [generate_round(number) for number in range(50)] == [generate_round(number) for number in range(50)]


def test_a_hundred_rounds_cover_every_fault_and_role() -> None:
    """Each fault is applied to each role that it supports."""
    drawn = {(fault.fault_type, fault.role) for number in range(100) for fault in generate_round(number).faults}
    assert set(FAULT_ROLES) == drawn


def test_the_short_form_covers_every_fault_and_role() -> None:
    """It also covers both stores, one and two seeds, and both types of cold start."""
    rounds = [generate_round(number) for number in SHORT_ROUNDS]
    faults = [fault for drawn in rounds for fault in drawn.faults]
    assert {fault_type for fault_type, _ in FAULT_ROLES} == {fault.fault_type for fault in faults}
    assert {role for _, role in FAULT_ROLES} == {fault.role for fault in faults}
    assert {"seeds", "checkpoint", "snapshot"} == {drawn.start for drawn in rounds}
    assert {"memory", "redis"} == {drawn.store for drawn in rounds}
    assert {0, 1, 2} == {drawn.seeds for drawn in rounds}


def test_every_round_is_valid() -> None:
    """Each fault applies to a role that the round has, and each trigger target exists."""
    for drawn in map(generate_round, range(500)):
        roles = {fault.role for fault in drawn.faults}
        faults = {(fault.fault_type, fault.role) for fault in drawn.faults}
        assert "seed" not in roles or drawn.seeds > 0
        assert "redis" not in roles or drawn.store == "redis"
        assert ("full", "target") not in faults or drawn.resumes
        assert ("torn", "target") not in faults or drawn.start != "seeds"
        for fault in drawn.faults:
            assert fault.trigger_target < drawn.targets
            assert 0 <= fault.trigger_fraction < 1
        assert drawn.size_mib in SIZES_MIB
        assert 3 <= drawn.targets <= 5


def test_every_stopped_process_continues() -> None:
    """A process stopped forever would reveal nothing about the others."""
    stopped = [fault for number in range(500) for fault in generate_round(number).faults if fault.fault_type == "stop"]
    assert [] == [fault for fault in stopped if fault.duration_s is None]


GRAPH = (
    PlannerForkInfo("t0", ("seed0",)),
    PlannerForkInfo("t1", ("t0", "t1")),
    PlannerForkInfo("t2", ("t0",)),
)


@pytest.mark.parametrize(
    ("fault_type", "role", "graph", "ended", "hit_hosts", "expected"),
    [
        ("kill", "seed", GRAPH, (), (), ("seed", ["seed0"])),
        ("kill", "seed", GRAPH, (), ("seed0",), ("seed", [])),
        ("stop", "redis", GRAPH, (), (), ("redis", ["planner"])),
        ("kill", "relay", GRAPH, (), (), ("relay", ["t0"])),
        ("kill", "relay", GRAPH, ("t0",), (), ("relay", ["t0"])),
        ("kill", "relay", (), ("t1",), (), ("target", ["t0", "t2"])),
        ("kill", "relay", GRAPH, (), ("t0",), ("target", ["t1", "t2"])),
        ("cut", "target", GRAPH, ("t0",), ("t1",), ("target", ["t2"])),
        ("cut", "target", GRAPH, ("t0", "t1", "t2"), (), ("target", ["t0", "t1", "t2"])),
        ("torn", "target", GRAPH, (), (), ("target", ["t1"])),
        ("torn", "target", (), (), (), ("target", ["t0", "t1", "t2"])),
    ],
)
def test_fault_candidates_have_the_role_now(
    fault_type: FaultType, role: Role, graph: tuple[PlannerForkInfo, ...],
    ended: tuple[str, ...], hit_hosts: tuple[str, ...],
    expected: tuple[str, list[str]],
) -> None:  # fmt: skip
    """The candidates are the hosts that have the role now, and no host twice."""
    fault = ChaosFault(fault_type, role, 0, 0.5, 0.1, None)
    assert expected == fault_candidates(ROUND, fault, graph, ended, hit_hosts)


# -- checks -------------------------------------------------------------------------------------------


def test_a_good_round_has_no_findings() -> None:
    """One target forked, one was killed on purpose, and one reported why it failed."""
    assert () == check_round(OBSERVATION)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (with_ending(is_correct=False), Finding("bytes", "t0 forked, but has other bytes")),
        (with_ending(is_correct=None), Finding("bytes", "t0 forked, but has other bytes")),
        (
            with_ending(ending_type="fallback", is_correct=False),
            Finding("bytes", "t0 fallback, but has other bytes"),
        ),
        (with_ending(ending_type="hung", repeated_bytes=0), Finding("hang", "t0 missed its deadline")),
        (
            with_ending(ending_type="unclean", repeated_bytes=0, reasons=("KeyError: 3",)),
            Finding("error", "t0: KeyError: 3"),
        ),
        (
            with_ending(repeated_bytes=5 * MIB + 1),
            Finding("repeats", f"t0 read {5 * MIB + 1} bytes twice, bound {5 * MIB}"),
        ),
        (
            with_after(threads=2, names=("MainThread", "rfork-source-1")),
            Finding("leak", "t0: threads rfork-source-1"),
        ),
        (with_after(threads=3), Finding("leak", "t0: 3 threads, before 1")),
        (
            with_after(files={"socket": 3, "/dev/null": 1, "/x": 1}),
            Finding("leak", "t0: files /x (1), socket (2)"),
        ),
        (with_after(memory=250 * MIB), Finding("leak", "t0: 250 MiB of memory, before 200")),
        (
            lambda observation: replace(observation, injected=(InjectedFault("full", "seed", "seed0", "written"),)),
            Finding("error", "full seed0: written"),
        ),
        (
            lambda observation: replace(observation, died=("seed0",)),
            Finding("error", "seed0 ended without being killed"),
        ),
        (lambda observation: replace(observation, stuck=("t2",)), Finding("hang", "t2 did not become idle")),
        (lambda observation: replace(observation, tracebacks=("t2: oh",)), Finding("error", "t2: oh")),
        (lambda observation: replace(observation, stale_records=("a fork",)), Finding("stale", "a fork")),
    ],
)
def test_each_violation_is_one_finding(
    change: Callable[[RoundObservation], RoundObservation], expected: Finding
) -> None:
    """Each violated guarantee is found, and nothing else."""
    assert (expected,) == check_round(change(OBSERVATION))


COLD = replace(ROUND, start="snapshot", seeds=0)
FAILED = ForkEnding("t0", "failed")


@pytest.mark.parametrize(
    ("round_", "injected", "expected"),
    [
        pytest.param(replace(ROUND, seeds=2), ("kill", "seed", "seed0"), ["seed1"], id="another seed"),
        pytest.param(ROUND, ("kill", "seed", "seed0"), [], id="no seed"),
        pytest.param(ROUND, ("cut", "target", "t0"), [], id="its own link"),
        pytest.param(ROUND, ("kill", "planner", "planner"), ["source"], id="no planner for a while"),
        pytest.param(replace(ROUND, fallback=True), ("cut", "target", "t0"), ["files"], id="its own files"),
        pytest.param(COLD, ("kill", "planner", "planner"), ["files"], id="cold"),
        pytest.param(COLD, ("torn", "target", "t0"), ["t1"], id="another target reads on"),
    ],
)
def test_a_failure_despite_a_usable_source_is_a_finding(
    round_: ChaosRound, injected: tuple[str, str, str], expected: list[str]
) -> None:
    """The finding names the source that the target could have used."""
    seen = replace(OBSERVATION, round=round_, injected=(InjectedFault(*injected),), endings=(FAILED,))
    found = [finding.text for finding in check_round(seen) if finding.finding_type == "lost"]
    assert [True] * len(expected) == [word in text for word, text in zip(expected, found, strict=True)]


def test_each_fault_allows_a_window_and_a_chunk_to_be_repeated() -> None:
    """Two faults allow twice as much; none allows nothing."""
    repeated = with_ending(repeated_bytes=10 * MIB)(OBSERVATION)
    both = replace(repeated, injected=OBSERVATION.injected * 2)
    none = replace(repeated, injected=(), endings=repeated.endings[:1])
    assert [] == [finding.finding_type for finding in check_round(both)]
    assert ["repeats"] == [finding.finding_type for finding in check_round(none)]


def test_a_pool_may_keep_its_sockets() -> None:
    """Sockets beyond the pool's size are a leak."""
    after = replace(RESOURCES, files={"socket": 4, "/dev/null": 1})
    assert [] == list(find_leaks(RESOURCES, after, pooled=3))
    assert ["files socket (3)"] == list(find_leaks(RESOURCES, after, pooled=2))


def test_open_resources_are_counted(tmp_path: Path) -> None:
    """A file opened between two measurements appears only in the second."""
    gc.collect()  # garbage may close its files at any time
    before = ProcessResources.of(os.getpid())
    with (tmp_path / "file").open("w"):
        after = ProcessResources.of(os.getpid())
    assert {str(tmp_path / "file"): 1} == {
        name: count for name, count in after.files.items() if before.files.get(name) != count
    }


# -- summary ------------------------------------------------------------------------------------------


def test_a_round_counts_once_per_fault() -> None:
    """It counts once in the row "all"."""
    summary = ChaosSummary()
    summary.add(replace(OBSERVATION, injected=(*OBSERVATION.injected, InjectedFault("cut", "relay", "t1"))), ())
    wrong = with_ending(is_correct=False)(OBSERVATION)
    summary.add(replace(wrong, recovery_s=9.0), check_round(wrong))
    columns = ("rounds", "forked", "killed", "wrong bytes")
    rows = {row["fault"]: tuple(row[column] for column in columns) for row in summary.rows}
    assert {"kill seed": (2, 2, 2, 1), "cut relay": (1, 1, 1, 0), "all": (2, 2, 2, 1)} == rows


def test_figures_cover_all_rounds() -> None:
    """Findings after the last round count too."""
    summary = ChaosSummary()
    summary.add(OBSERVATION, ())
    summary.add_findings([Finding("stale", "a fork")])
    assert {
        "chaos_rounds": 1, "chaos_forked_share": 0.5, "chaos_worst_recovery_s": 2.5, "chaos_wrong_bytes": 0,
        "chaos_hangs": 0, "chaos_leaks": 0, "chaos_repeated_over_bound": 0, "chaos_lost": 0,
        "chaos_errors": 0, "chaos_stale_books": 1,
    } == summary.figures  # fmt: skip


# -- helpers ------------------------------------------------------------------------------------------


def test_messages_survive_encoding() -> None:
    """Commands, and responses with the planner's records, decode to the same values."""
    command = ChaosCommand("fork", model="m", size=3, checkpoint="/c", resume="/r")
    response = ChaosResponse(
        "query", forks=(PlannerForkInfo("t0", ("seed0", "t1")),), instances=("t0",), reasons=("a", "b")
    )
    assert command == COMMAND_ADAPTER.validate_json(encode_line(command))
    assert response == RESPONSE_ADAPTER.validate_json(encode_line(response))


def test_a_truncated_file_ends_after_its_first_half(tmp_path: Path) -> None:
    """An open reader reads the first half and nothing after."""
    path = tmp_path / "file"
    path.write_bytes(b"12345678")
    with path.open("rb") as file:
        disk.truncate(path)
        assert b"1234" == file.read()


def test_reads_are_unlimited_after_a_fork(tmp_path: Path) -> None:
    """The rate limit of a process's reads ends with the fork."""
    before = LocalFile.read
    with disk.rate_limited_reads(1 << 30):
        during = LocalFile.read
    assert during is not before
    assert before is LocalFile.read


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], list(range(100))),
        (["--quick"], list(SHORT_ROUNDS[:4])),
        (["--rounds", "7", "--first", "30"], list(range(30, 37))),
        (["--only", "12"], [12]),
    ],
)
def test_the_command_line_selects_the_rounds(arguments: list[str], expected: list[int]) -> None:
    """It selects a number of rounds from the first one, or a single round."""
    assert expected == list(parse(arguments).numbers)

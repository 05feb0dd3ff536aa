"""The rounds of the chaos benchmark as they are drawn and judged; they are run in tests/chaos."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import chaos_disk
from benchmarks.chaos import parse
from benchmarks.chaos_checks import (
    Finding,
    ForkEnding,
    InjectedFault,
    ProcessResources,
    RoundObservation,
    check_round,
    find_leaks,
)
from benchmarks.chaos_injector import fault_candidates
from benchmarks.chaos_messages import (
    COMMAND_ADAPTER,
    RESPONSE_ADAPTER,
    ChaosCommand,
    ChaosResponse,
    PlannerForkInfo,
)
from benchmarks.chaos_scenarios import (
    FAULT_ROLES,
    SHORT_STOP_S,
    SIZES_MIB,
    ChaosFault,
    ChaosRound,
    FaultType,
    Role,
    generate_round,
)
from benchmarks.chaos_summary import ChaosSummary
from benchmarks.fanout_messages import encode_line
from rfork.storage.local.files import LocalFile

MIB = 1 << 20
ROUND = ChaosRound(7, "seeds", 1, 3, 32, "memory", False, False, (ChaosFault("kill", "relay", 0, 0.5, 0.1, None),))
CENSUS = ProcessResources(1, ("MainThread",), {"socket": 1, "/dev/null": 1}, 200 * MIB)
RIGHT = ForkEnding("t0", "forked", is_correct=True, repeated_bytes=5 * MIB, chunk_bytes=MIB, seconds=3.0)
SEEN = RoundObservation(
    round=ROUND,
    window=4,
    injected=(InjectedFault("kill", "seed", "seed0"),),
    endings=(RIGHT, ForkEnding("t1", "killed"), ForkEnding("t2", "failed", reasons=("NoSource: none",))),
    before={"t0": CENSUS},
    after={"t0": CENSUS},
    recovery_s=2.5,
)


def with_ending(**changes: object) -> Callable[[RoundObservation], RoundObservation]:
    """A round whose first target ended otherwise."""
    return lambda seen: replace(seen, endings=(replace(RIGHT, **changes), *seen.endings[1:]))  # type: ignore[arg-type]


def with_after(**changes: object) -> Callable[[RoundObservation], RoundObservation]:
    """A round after which a process has something else open."""
    return lambda seen: replace(seen, after={"t0": replace(CENSUS, **changes)})  # type: ignore[arg-type]


# -- drawing ------------------------------------------------------------------------------------------


def test_a_round_is_drawn_from_its_number_alone() -> None:
    """The same each time, so that one that went wrong can be run again."""
    assert [generate_round(number) for number in range(50)] == [generate_round(number) for number in range(50)]


def test_a_hundred_rounds_do_everything_to_everybody() -> None:
    """Each kind of fault, to each role that it can be done to."""
    drawn = {(fault.fault_type, fault.role) for number in range(100) for fault in generate_round(number).faults}
    assert set(FAULT_ROLES) == drawn


def test_the_short_form_does_each_kind_and_meets_each_role() -> None:
    """As well as both stores, one seed and two, and both kinds of cold start."""
    rounds = [generate_round(number) for number in SHORT_STOP_S]
    faults = [fault for drawn in rounds for fault in drawn.faults]
    assert (
        {fault_type for fault_type, _ in FAULT_ROLES},
        {role for _, role in FAULT_ROLES},
        {"seeds", "checkpoint", "snapshot"},
        {"memory", "redis"},
        {0, 1, 2},
    ) == (
        {fault.fault_type for fault in faults},
        {fault.role for fault in faults},
        {drawn.start for drawn in rounds},
        {drawn.store for drawn in rounds},
        {drawn.seeds for drawn in rounds},
    )


def test_every_round_can_be_run() -> None:
    """Nothing is done to whom the round does not have, and every watched target is there."""
    for drawn in map(generate_round, range(500)):
        roles = {fault.role for fault in drawn.faults}
        strikes = {(fault.fault_type, fault.role) for fault in drawn.faults}
        assert (True, True, True, True, True, True) == (
            "seed" not in roles or drawn.seeds > 0,
            "redis" not in roles or drawn.store == "redis",
            ("full", "target") not in strikes or drawn.resumes,
            ("torn", "target") not in strikes or drawn.start != "seeds",
            all(fault.trigger_target < drawn.targets and 0 <= fault.trigger_fraction < 1 for fault in drawn.faults),
            drawn.size_mib in SIZES_MIB and 3 <= drawn.targets <= 5,
        )


def test_whoever_is_stopped_goes_on() -> None:
    """A process that is stopped for ever would say nothing of the others."""
    stopped = [fault for number in range(500) for fault in generate_round(number).faults if fault.fault_type == "stop"]
    assert [] == [fault for fault in stopped if fault.duration_s is None]


GRAPH = (
    PlannerForkInfo("t0", ("seed0",)),
    PlannerForkInfo("t1", ("t0", "t1")),
    PlannerForkInfo("t2", ("t0",)),
)


@pytest.mark.parametrize(
    ("fault_type", "role", "graph", "ended", "touched", "expected"),
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
def test_who_is_struck(
    fault_type: FaultType, role: Role, graph: tuple[PlannerForkInfo, ...], ended: tuple[str, ...], touched: tuple[str, ...],
    expected: tuple[str, list[str]],
) -> None:  # fmt: skip
    """Those that have the role now, and nobody twice."""
    fault = ChaosFault(fault_type, role, 0, 0.5, 0.1, None)
    assert expected == fault_candidates(ROUND, fault, graph, ended, touched)


# -- judging ------------------------------------------------------------------------------------------


def test_a_good_round_has_no_findings() -> None:
    """One forked, one was killed on purpose, and one said why it could not."""
    assert () == check_round(SEEN)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (with_ending(right=False), Finding("bytes", "t0 forked, and holds other bytes")),
        (with_ending(right=None), Finding("bytes", "t0 forked, and holds other bytes")),
        (
            with_ending(ended="fallback", right=False),
            Finding("bytes", "t0 fallback, and holds other bytes"),
        ),
        (with_ending(ended="hung", repeated=0), Finding("hang", "t0 was not done past its deadline")),
        (
            with_ending(ended="unclean", repeated=0, reasons=("KeyError: 3",)),
            Finding("error", "t0: KeyError: 3"),
        ),
        (
            with_ending(repeated=5 * MIB + 1),
            Finding("repeats", f"t0 read {5 * MIB + 1} bytes again, bound {5 * MIB}"),
        ),
        (
            with_after(threads=2, names=("MainThread", "rfork-feed-1")),
            Finding("leak", "t0: threads rfork-feed-1"),
        ),
        (with_after(threads=3), Finding("leak", "t0: 3 threads, before 1")),
        (
            with_after(files={"socket": 3, "/dev/null": 1, "/x": 1}),
            Finding("leak", "t0: files /x (1), socket (2)"),
        ),
        (with_after(memory=250 * MIB), Finding("leak", "t0: 250 MiB in memory, before 200")),
        (
            lambda seen: replace(seen, struck=(InjectedFault("full", "seed", "seed0", "written"),)),
            Finding("error", "full seed0: written"),
        ),
        (lambda seen: replace(seen, died=("seed0",)), Finding("error", "seed0 ended, and nobody killed it")),
        (lambda seen: replace(seen, stuck=("t2",)), Finding("hang", "t2 did not come to rest")),
        (lambda seen: replace(seen, traces=("t2: oh",)), Finding("error", "t2: oh")),
        (lambda seen: replace(seen, held=("a fork",)), Finding("books", "a fork")),
    ],
)
def test_each_wrong_is_found(change: Callable[[RoundObservation], RoundObservation], expected: Finding) -> None:
    """And nothing else is."""
    assert (expected,) == check_round(change(SEEN))


COLD = replace(ROUND, start="snapshot", seeds=0)
FAILED = ForkEnding("t0", "failed")


@pytest.mark.parametrize(
    ("round_", "struck", "expected"),
    [
        pytest.param(replace(ROUND, seeds=2), ("kill", "seed", "seed0"), ["seed1"], id="another seed"),
        pytest.param(ROUND, ("kill", "seed", "seed0"), [], id="no seed"),
        pytest.param(ROUND, ("cut", "target", "t0"), [], id="its own link"),
        pytest.param(ROUND, ("kill", "planner", "planner"), ["nobody"], id="no planner for a while"),
        pytest.param(replace(ROUND, fallback=True), ("cut", "target", "t0"), ["files"], id="its own files"),
        pytest.param(COLD, ("kill", "planner", "planner"), ["files"], id="cold"),
        pytest.param(COLD, ("torn", "target", "t0"), ["t1"], id="others read on"),
    ],
)
def test_who_could_be_read_from_must_not_be_missed(
    round_: ChaosRound, struck: tuple[str, str, str], expected: list[str]
) -> None:
    """A target that fails without need is a finding, which says what was left to it."""
    seen = replace(SEEN, round=round_, injected=(InjectedFault(*struck),), endings=(FAILED,))
    found = [finding.text for finding in check_round(seen) if finding.finding_type == "lost"]
    assert [True] * len(expected) == [word in text for word, text in zip(expected, found, strict=True)]


def test_each_fault_allows_for_a_window_and_a_chunk() -> None:
    """Two faults, twice as much; none, nothing."""
    repeated = with_ending(repeated=10 * MIB)(SEEN)
    both = replace(repeated, injected=SEEN.injected * 2)
    none = replace(repeated, injected=(), endings=repeated.endings[:1])
    assert ([], ["repeats"]) == (
        [finding.finding_type for finding in check_round(both)],
        [finding.finding_type for finding in check_round(none)],
    )


def test_a_pool_may_keep_some_sockets() -> None:
    """As many as it is told, and nothing else."""
    after = replace(CENSUS, files={"socket": 4, "/dev/null": 1})
    assert ([], ["files socket (3)"]) == (
        list(find_leaks(CENSUS, after, pooled=3)),
        list(find_leaks(CENSUS, after, pooled=2)),
    )


def test_a_census_sees_what_is_open(tmp_path: Path) -> None:
    """A file that was opened since is in the next census, and only that."""
    gc.collect()  # what is garbage may close its files at any time
    before = ProcessResources.of(os.getpid())
    with (tmp_path / "file").open("w"):
        after = ProcessResources.of(os.getpid())
    assert {str(tmp_path / "file"): 1} == {
        name: count for name, count in after.files.items() if before.files.get(name) != count
    }


# -- the tally ----------------------------------------------------------------------------------------


def test_the_tally_counts_a_round_in_each_of_its_faults() -> None:
    """And once in all."""
    tally = ChaosSummary()
    tally.add(replace(SEEN, injected=(*SEEN.injected, InjectedFault("cut", "relay", "t1"))), ())
    wrong = with_ending(right=False)(SEEN)
    tally.add(replace(wrong, recovery_s=9.0), check_round(wrong))
    columns = ("rounds", "forked", "killed", "wrong bytes")
    rows = {row["fault"]: tuple(row[column] for column in columns) for row in tally.rows}
    assert {"kill seed": (2, 2, 2, 1), "cut relay": (1, 1, 1, 0), "all": (2, 2, 2, 1)} == rows


def test_the_figures_are_those_of_all_rounds() -> None:
    """What was found after the last round counts too."""
    tally = ChaosSummary()
    tally.add(SEEN, ())
    tally.add_findings([Finding("books", "a fork")])
    assert {
        "chaos_rounds": 1, "chaos_forked_share": 0.5, "chaos_worst_recovery_s": 2.5, "chaos_wrong_bytes": 0,
        "chaos_hangs": 0, "chaos_leaks": 0, "chaos_repeated_over_bound": 0, "chaos_lost": 0,
        "chaos_errors": 0, "chaos_stale_books": 1,
    } == tally.figures  # fmt: skip


# -- the rest -----------------------------------------------------------------------------------------


def test_messages_arrive_as_they_were_sent() -> None:
    """Commands, and answers with what the planner knows."""
    command = ChaosCommand("fork", model="m", size=3, checkpoint="/c", resume="/r")
    response = ChaosResponse(
        "look", forks=(PlannerForkInfo("t0", ("seed0", "t1")),), instances=("t0",), reasons=("a", "b")
    )
    assert (command, response) == (
        COMMAND_ADAPTER.validate_json(encode_line(command)),
        RESPONSE_ADAPTER.validate_json(encode_line(response)),
    )


def test_a_torn_file_ends_where_it_was_whole(tmp_path: Path) -> None:
    """Whoever has it open reads its first half, and nothing after."""
    path = tmp_path / "file"
    path.write_bytes(b"12345678")
    with path.open("rb") as file:
        chaos_disk.truncate(path)
        assert b"1234" == file.read()


def test_a_disk_is_as_fast_again_after_a_fork(tmp_path: Path) -> None:
    """What slows the reads of a process down goes away with the fork."""
    before = LocalFile.read
    with chaos_disk.rate_limited_reads(1 << 30):
        during = LocalFile.read
    assert (True, before) == (during is not before, LocalFile.read)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], list(range(100))),
        (["--quick"], list(SHORT_STOP_S[:4])),
        (["--rounds", "7", "--first", "30"], list(range(30, 37))),
        (["--only", "12"], [12]),
    ],
)
def test_the_command_line_names_the_rounds(arguments: list[str], expected: list[int]) -> None:
    """A number of rounds from the first on, or one alone."""
    assert expected == list(parse(arguments).numbers)

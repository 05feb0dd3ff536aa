"""Cases of the cold group benchmark, and rows, figures and warnings of their outcomes."""

from __future__ import annotations

from benchmarks.cold_group.__main__ import LIMIT, parse
from benchmarks.cold_group.cases import STORE, ColdGroupCase, ColdGroupOutcome
from benchmarks.cold_group.results import figures, row_of, warnings
from benchmarks.fanout.messages import FanoutResponse
from benchmarks.netlab import Traffic

SIZE = 100


def outcome(seconds: float, *reads: int, sent: int = 0, busy: float = 0.5) -> ColdGroupOutcome:
    """Return a run in which each host read `sent` bytes from the store, and ended a second after the previous
    one.
    """
    hosts = [f"h{number + 1}" for number in range(len(reads))]
    responses = {
        host: FanoutResponse(ended=10.0 + seconds - (len(reads) - 1 - position), storage_bytes=read)
        for position, (host, read) in enumerate(zip(hosts, reads, strict=True))
    }
    traffic = {STORE: Traffic(sent or sum(reads), 0), **dict.fromkeys(hosts, Traffic(SIZE // 2, SIZE))}
    return ColdGroupOutcome(10.0, responses, traffic, busy)


def test_the_command_line_selects_cases() -> None:
    """One process, a group, that group with a killed member, and as many independent ones; patterns select
    among them.
    """
    _, size, rate, cases = parse(["--quick", "--count", "3"])
    assert 24 << 20 == size
    assert 200e6 == rate
    assert ["one, snapshot", "3 alone, snapshot", "group of 3, snapshot"] == [case.name for case in cases[:3]]
    assert ["group of 3, snapshot, one killed", "group of 3, checkpoint"] == [case.name for case in cases[3:]]
    assert ["4 alone, snapshot"] == [case.name for case in parse(["--only", "alone"])[3]]


def test_the_stores_link_sets_the_minimum_time() -> None:
    """The store's link sends each byte once to a group, and once to each independent process."""
    assert 1.0 == ColdGroupCase(1).min_time
    assert 1.0 == ColdGroupCase(4).min_time
    assert 4.0 == ColdGroupCase(4, independent=True).min_time
    assert ColdGroupCase(4).killed_host is None
    assert "h4" == ColdGroupCase(4, kills_member=True).killed_host


def test_figures_are_medians_relative_to_independent_loads() -> None:
    """The bytes come from the counter of the store's interface and from the forks' reports."""
    runs = {
        LIMIT: [outcome(2.0, 0)],
        ColdGroupCase(4, independent=True): [outcome(8.0, 100, 100, 100, 100)],
        ColdGroupCase(4): [outcome(seconds, 25, 25, 25, 25, sent=104) for seconds in (2.0, 3.0, 7.0)],
        ColdGroupCase(4, kills_member=True): [outcome(5.0, 30, 40, 40, sent=120)],
    }
    assert {
        "cold_group_egress": 1.04,
        "cold_group_reported": 1.0,
        "cold_group_time": 0.375,
        "cold_group_vs_bound": 1.5,
        "cold_group_killed_egress": 1.2,
        "cold_group_killed_time": 2.5,
    } == figures(runs, SIZE, 2.0)


def test_rows_are_in_units_of_one_transfer() -> None:
    """Times are in S/B, bytes in S; the limit has no fork reports."""
    row = row_of(ColdGroupCase(2), [outcome(3.0, 50, 50, sent=110)], SIZE, 2.0)
    assert "group of 2, snapshot" == row["case"]
    assert 3.0 == row["seconds"]
    assert 1.5 == row["T in S/B"]
    assert 1.1 == row["store sent"]
    assert 1.0 == row["reported"]
    assert 0.5 == row["host sent"]
    assert row_of(LIMIT, [outcome(2.0, 0)], SIZE, 2.0)["reported"] is None


def test_busy_cpus_are_a_warning() -> None:
    """If the CPUs are the bottleneck, the figures mean little about links."""
    runs = {
        ColdGroupCase(1): [outcome(2.0, 100, busy=0.95)],
        ColdGroupCase(4): [outcome(2.0, 25, 25, 25, 25)],
    }
    assert [
        "one, snapshot: the CPUs were 95% busy and limit the case as much as the links do: lower --rate"
    ] == warnings(runs)

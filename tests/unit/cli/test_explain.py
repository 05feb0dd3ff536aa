"""`rfork explain`: what it says of a fork, as a table of forks and verdicts."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rfork import errors
from rfork.cli.explain.advice import ADVICE, advice_on
from rfork.cli.explain.diagnosis import NEW_VERSION, STATE_ONE, comparison, diagnose
from rfork.cli.explain.fork_stats import ForkStats, row_of, stats_with_upstream
from rfork.cli.explain.render import render_fork
from rfork.cli.explain.time_breakdown import time_losses
from rfork.cli.explain.version import version_summary
from rfork.schema import ForkInfo
from tests.unit.cli.fleet_builders import (
    GB,
    RELAY,
    SEED,
    SNAPSHOT,
    TARGET,
    finished_fork,
    model,
    running_fork,
)

UNAVAILABLE, TIMED_OUT = "SourceUnavailable: it closed the connection", "SourceTimeout: nothing for 10 s"
NO_SOURCE = "NoSource: nobody holds llama"
RAISE_LIMIT = (
    "Raise RFORK_MAX_EGRESS_BYTES_PER_S on aaaaaaaa, or start another seed. Where it has no such setting, its own work "
    "was slow (RFORK_MAX_LATENCY_RATIO)."
)

NEW, OLD = f"files:3fa2c1d0{'0' * 24}", f"files:91bc01f2{'0' * 24}"
FIRST = "first of version files:3fa2c1d0 of model llama; 4 instances serve files:91bc01f2"
SEVERAL = (
    "2 versions of llama are served (a, b) and this target states none: set RFORK_VERSION; no version of "
    "model llama can be taken over; 2 instances serve a, 1 instance serves b"
)

CASES: dict[str, tuple[ForkInfo, str, str, str]] = {
    "as fast as its link": (
        finished_fork(),
        "link",
        "Nothing held it up: it ran at 1.00 GB/s, the speed that its link showed.",
        "Only a faster way than http makes it faster: `rfork doctor` on both hosts lists them.",
    ),
    "too short to measure": (
        finished_fork(seconds=0.5, link=None),
        "link",
        "Nothing held it up; its transfer of 0.30 s was too short to measure a link.",
        "",
    ),
    "a governed seed": (
        finished_fork(seconds=10.0, link=5e8, source_rate_limits={SEED: 400_000_000}),
        "governor",
        "aaaaaaaa held all its readers to 400.0 MB/s: the 4.00 GB that it gave took 9.80 s of 10.0 s.",
        RAISE_LIMIT,
    ),
    "a governed seed that gave little": (
        finished_fork(sources={SEED: GB // 10, RELAY: 39 * GB // 10}, source_rate_limits={SEED: 400_000_000}),
        "link",
        "Nothing held it up: it ran at 1.00 GB/s, the speed that its link showed.",
        "Only a faster way than http makes it faster: `rfork doctor` on both hosts lists them.",
    ),
    "its sources failed": (
        finished_fork(seconds=20.0, replans=2, reasons=(TIMED_OUT, UNAVAILABLE, UNAVAILABLE)),
        "sources",
        "Its sources failed or fell behind (2 times SourceUnavailable, SourceTimeout; planned again 2 times): "
        "about 15.8 s of 20.0 s.",
        ADVICE["SourceUnavailable"],
    ),
    "its sources failed, and it was not planned again": (
        finished_fork(seconds=20.0, reasons=(UNAVAILABLE,)),
        "sources",
        "Its sources failed or fell behind (SourceUnavailable): about 15.8 s of 20.0 s.",
        ADVICE["SourceUnavailable"],
    ),
    "read again": (
        finished_fork(seconds=10.0, repeated=8 * GB, reasons=("SourceCorrupt: chunk 3",)),
        "repeated",
        "8.00 GB had to be read again, which took about 5.80 s of 10.0 s.",
        ADVICE["SourceCorrupt"],
    ),
    "an unsteady link": (
        finished_fork(seconds=10.0),
        "unsteady",
        "Its link did 1.00 GB/s in its best second, but not throughout: that cost about 5.80 s of 10.0 s.",
        "Its link, its CPU or its sources had other work then: look at their load. Fewer readers a source "
        "(RFORK_MAX_READERS) or more seeds help.",
    ),
    "a slow planner": (
        finished_fork(seconds=9.0, phases={"plan": 4.0, "offer": 0.5, "transfer": 4.2}),
        "planning",
        "It waited for the planner's answer: 4.00 s of 9.00 s.",
        "Look at the planner's load (/metrics); where a scale-up was announced, at RFORK_PLANNER_SCALEUP_WAIT_S.",
    ),
    "slow to open its own storage": (
        finished_fork(seconds=9.0, phases={"plan": 0.1, "offer": 6.1, "transfer": 2.6}),
        "opening",
        "It opened its own snapshot or checkpoint, since nobody held the weights: 6.10 s of 9.00 s.",
        "Keep a seed running, or look at the disk or the object store that it opened.",
    ),
    "a slow target": (
        finished_fork(seconds=9.0, phases={"capture": 3.0, "plan": 0.1, "transfer": 4.0, "digest": 1.5}),
        "target",
        "The target's own work took most (capture 3.00 s, digest 1.50 s): 4.50 s of 9.00 s.",
        "Its CPU or GPU is busy or slow: `rfork doctor` there says what digests its memory.",
    ),
    "elected to read storage": (
        finished_fork(seconds=9.0, sources={SNAPSHOT: 4 * GB}, transports={}),
        "storage",
        "It read 100% from storage, since nobody held the weights: 8.80 s of 9.00 s.",
        "Keep a seed running, or put the snapshot on faster storage.",
    ),
    "time that no phase has": (
        finished_fork(seconds=20.0, phases={"capture": 0.1, "transfer": 4.0}),
        "unknown",
        "15.9 s of 20.0 s are in no phase that it told of.",
        "See the target's own log around that time.",
    ),
    "an old client": (
        finished_fork(phases={}, link=None, transports={}),
        "unknown",
        "It took 4.00 s, and its rfork is too old to tell in which phase.",
        "Update rfork on the target to learn more.",
    ),
    "elected to read storage in a rollout": (
        finished_fork(seconds=9.0, sources={SNAPSHOT: 4 * GB}, transports={}, version=NEW),
        "storage",
        "It read 100% from storage, since no instance served version files:3fa2c1d0: 8.80 s of 9.00 s.",
        "Keep a seed running, or put the snapshot on faster storage.",
    ),
    "first of its version, under way": (
        running_fork(plan=(), version=NEW, reason=FIRST),
        "first_of_version",
        f"It has no source and loads by itself: {FIRST}.",
        NEW_VERSION,
    ),
    "first of its version": (
        finished_fork(outcome="fallback", fallback="loader", reasons=(f"NoSource: {FIRST}",), sources={}, version=NEW),
        "first_of_version",
        f"It loaded from loader: {FIRST}.",
        NEW_VERSION,
    ),
    "first of its version, and nothing to load": (
        finished_fork(outcome="failed", reasons=(f"NoSource: {FIRST}",), sources={}, version=NEW),
        "first_of_version",
        f"It failed to load by itself: {FIRST}.",
        NEW_VERSION,
    ),
    "several versions are served": (
        running_fork(plan=(), version="unnamed:r", reason=SEVERAL),
        "several_versions",
        f"It got no source: {SEVERAL}.",
        STATE_ONE,
    ),
    "several versions were served": (
        finished_fork(outcome="failed", reasons=(f"NoSource: {SEVERAL}",), sources={}, version="unnamed:r"),
        "several_versions",
        f"It got no source: {SEVERAL}.",
        STATE_ONE,
    ),
    "fell back": (
        finished_fork(outcome="fallback", fallback="checkpoint /models/llama", reasons=(UNAVAILABLE, NO_SOURCE)),
        "fell_back",
        "It loaded from checkpoint /models/llama because of NoSource: nobody holds llama. Before that: SourceUnavailable.",
        ADVICE["SourceUnavailable"],
    ),
    "fell back at once": (
        finished_fork(outcome="fallback", fallback="loader", reasons=(NO_SOURCE,), sources={}),
        "fell_back",
        "It loaded from loader because of NoSource: nobody holds llama.",
        ADVICE["NoSource"],
    ),
    "fell back, and told nothing": (
        finished_fork(outcome="fallback"),
        "fell_back",
        "It loaded from its own loader, and told no reason.",
        "See the target's own log around that time.",
    ),
    "failed": (
        finished_fork(outcome="failed", reasons=("LayoutMismatch: a.weight is float16 there",)),
        "failed",
        "It failed after 4.00 s: LayoutMismatch: a.weight is float16 there.",
        ADVICE["LayoutMismatch"],
    ),
    "too late for a governed seed": (
        finished_fork(
            outcome="failed", reasons=("DeadlineExceeded: 2 of 4 chunks",), source_rate_limits={SEED: 8_000_000}
        ),
        "failed",
        "It failed after 4.00 s: DeadlineExceeded: 2 of 4 chunks. aaaaaaaa held all its readers to 8.00 MB/s.",
        RAISE_LIMIT,
    ),
    "given up by the planner": (
        finished_fork(outcome="failed", reasons=("nothing was heard of it",)),
        "failed",
        "It failed after 4.00 s: nothing was heard of it.",
        "See the target's own log around that time.",
    ),
    "interrupted": (
        finished_fork(outcome="interrupted"),
        "interrupted",
        "It was stopped after 4.00 s, and told no reason.",
        "",
    ),
    "under way": (
        running_fork(),
        "under_way",
        "It is under way: 50% verified, 1.00 GB/s, about 2.00 s to go.",
        "",
    ),
    "under way from a governed seed": (
        running_fork(source_rate_limits={SEED: 1_100_000_000}),
        "under_way",
        "It is under way: 50% verified, 1.00 GB/s, about 2.00 s to go. aaaaaaaa held all its readers to 1.10 GB/s.",
        RAISE_LIMIT,
    ),
    "nothing moves": (
        running_fork(bytes_per_s=0.0),
        "under_way",
        "It reads nothing at the moment: 50% verified after 2.00 s.",
        "If its source has stalled, it asks for another by itself.",
    ),
    "waits for a source": (
        running_fork(plan=(), reason="all sources are busy"),
        "under_way",
        "It waits for a source: all sources are busy.",
        "If nothing comes it falls back by itself (RFORK_NO_SOURCE_TIMEOUT_S, then RFORK_DEADLINE_S).",
    ),
}


@pytest.mark.parametrize(("fork", "cause", "text", "advice"), CASES.values(), ids=CASES)
def test_verdicts(fork: ForkInfo, cause: str, text: str, advice: str) -> None:
    """Each kind of fork has its largest cause named, and what to do about it."""
    diagnosis = diagnose(ForkStats.of(fork))
    assert (cause, text, advice) == (diagnosis.cause, diagnosis.text, diagnosis.advice)


@pytest.mark.parametrize(
    ("fork", "origin", "words"),
    [
        (
            finished_fork(version=NEW, reason="from seed s (0 other readers)"),
            "own",
            "files:3fa2c1d0, the fingerprint of its files; now served besides: 4 instances of files:91bc01f2",
        ),
        (
            finished_fork(version=OLD, reason="takes over version files:91bc01f2; from seed s (0 other readers)"),
            "served",
            "files:91bc01f2, taken over: the target has none of its own, and this one was served",
        ),
        (
            finished_fork(outcome="fallback", reasons=(f"NoSource: {FIRST}",), version=NEW),
            "own",
            "files:3fa2c1d0, the fingerprint of its files; the first instance of it; "
            "now served besides: 4 instances of files:91bc01f2",
        ),
        (
            running_fork(plan=(), version="unnamed:r", reason=SEVERAL),
            "none",
            "unnamed:r, a name for weights of which nothing else is known; "
            "now served besides: 4 instances of files:91bc01f2",
        ),
        (
            finished_fork(version="2026-11-23"),
            "own",
            "2026-11-23, as stated (RFORK_VERSION), or as its snapshot records; "
            "now served besides: 4 instances of files:91bc01f2",
        ),
        (finished_fork(), "own", ""),
    ],
    ids=["own", "served", "first", "several", "stated", "none"],
)
def test_the_version_of_a_fork_and_where_it_is_from(fork: ForkInfo, origin: str, words: str) -> None:
    """Its own, taken over, or the first; with the other versions that are served by now."""
    rows = [model(version=OLD, seeds=4), model(version=NEW, seeds=0), model("other", version="x")]
    account = version_summary(fork, rows)
    assert origin == account.origin
    assert words == account.words()


def test_medians_are_those_of_the_forks_version() -> None:
    """Another version of the model may have other forks."""
    rows = [model(version=OLD, fork_s=9.0), model(version=NEW, fork_s=2.0)]
    row = row_of(finished_fork(version=NEW), rows)
    assert row is not None
    assert 2.0 == row.fork_s


def test_a_relay_is_blamed_on_what_it_read_itself() -> None:
    """A fork behind a relay went no faster than that, and the one at the head of the chain says why."""
    upstream_fork = finished_fork(
        seconds=10.0,
        link=5e8,
        source_rate_limits={SEED: 400_000_000},
        fork_id="f0",
        instance_id=RELAY,
        age_s=20,
    )
    downstream_fork = finished_fork(
        seconds=10.0, link=5e8, sources={RELAY: 4 * GB}, transports={RELAY: "http"}, age_s=19
    )
    diagnosis = diagnose(stats_with_upstream(downstream_fork, [downstream_fork, upstream_fork], None))
    assert (
        "relay",
        "It read from bbbbbbbb, which was itself still receiving, at 400.0 MB/s. At the head of that chain, "
        "bbbbbbbb: aaaaaaaa held all its readers to 400.0 MB/s: "
        "the 4.00 GB that it gave took 9.80 s of 10.0 s.",
        RAISE_LIMIT,
    ) == (diagnosis.cause, diagnosis.text, diagnosis.advice)


def test_a_relay_that_was_done_is_a_seed() -> None:
    """What had ended when the fork began did not hold it up."""
    upstream_fork = finished_fork(fork_id="f0", instance_id=RELAY, age_s=100.0)
    downstream_fork = finished_fork(sources={RELAY: 4 * GB}, transports={RELAY: "http"}, age_s=19.0)
    assert "link" == diagnose(stats_with_upstream(downstream_fork, [downstream_fork, upstream_fork], None)).cause


def test_forks_that_read_from_one_another_end_the_chain() -> None:
    """Two that gave to one another are no endless chain."""
    one = finished_fork(sources={RELAY: 4 * GB}, age_s=19.0)
    other = finished_fork(sources={TARGET: 4 * GB}, fork_id="f0", instance_id=RELAY, age_s=19.0)
    account = stats_with_upstream(one, [one, other], None)
    assert (RELAY, None) == (
        account.upstream.fork.instance_id if account.upstream else None,
        account.upstream.upstream if account.upstream else account,
    )


@pytest.mark.parametrize(
    ("fork", "heading", "rates"),
    [
        (finished_fork(sources={SEED: GB, RELAY: GB}, rates={SEED: 8e8}), "at best", [8e8, None]),
        (running_fork(sources={SEED: GB}, rates={SEED: 5e8}), "now", [5e8]),
    ],
    ids=["ended", "under way"],
)
def test_the_rate_of_each_source_is_as_told(fork: ForkInfo, heading: str, rates: list[float | None]) -> None:
    """Now, or in its fastest second once the fork has ended; a source of which none is told has none."""
    account = ForkStats.of(fork)
    console = Console(file=io.StringIO(), width=120)
    console.print(render_fork(account, diagnose(account), {}))
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    assert (rates, True) == (
        [each.rate for each in account.sources],
        all(word in output for word in (heading, f"{rates[0]:.0f}"[:1] + "00.0 MB/s")),
    )


def test_losses_are_seconds_beyond_the_bound() -> None:
    """What the bytes need at the link's speed is no loss; each cause has its own seconds."""
    fork = finished_fork(seconds=20.0, phases={"capture": 1.0, "plan": 2.0, "transfer": 12.0, "digest": 0.5}, replans=1)
    assert [("sources", 8.0), ("unknown", 4.5), ("planning", 2.0), ("target", 1.5)] == [
        (loss.cause, round(loss.seconds, 6)) for loss in time_losses(ForkStats.of(fork))
    ]


def test_what_a_dead_process_had_left_did_not_come_over_the_link() -> None:
    """The bound of a fork that was resumed counts what it fetched."""
    phases = {"resume": 0.2, "plan": 0.1, "transfer": 1.0}
    account = ForkStats.of(finished_fork(seconds=1.2, phases=phases, sources={SEED: GB}))
    assert 1.0 == account.min_transfer_s


@pytest.mark.parametrize(
    ("fork_s", "storage_s", "expected"),
    [
        (None, None, ""),
        (2.0, None, "2.0 times the median fork (2.00 s)"),
        (2.0, 40.0, "2.0 times the median fork (2.00 s), 0.1 times a load from storage (40.0 s)"),
    ],
)
def test_comparison(fork_s: float | None, storage_s: float | None, expected: str) -> None:
    """It is set beside its model's other forks, as far as those are known."""
    assert expected == comparison(ForkStats.of(finished_fork(), model(fork_s=fork_s, storage_s=storage_s)))


def test_each_advice_is_on_an_error_that_there_is() -> None:
    """The table of advice names classes of the error tree."""
    assert [] == [name for name in ADVICE if not hasattr(errors, name)]


def test_there_is_advice_on_each_error() -> None:
    """Whatever a fork can end with: each error of the tree that has no kinds of its own, and ForkFailed."""
    assert {"ForkFailed"} | _leaf_names(errors.RforkError) <= set(ADVICE)


def _leaf_names(error_type: type[Exception]) -> set[str]:
    subclasses = [each for each in error_type.__subclasses__() if each.__module__ == errors.__name__]
    return set().union(*map(_leaf_names, subclasses)) if subclasses else {error_type.__name__}


def test_no_advice_repeats_itself() -> None:
    """No sentence stands twice in what is said on one error."""
    sentences = {name: text.rstrip(".").split(". ") for name, text in ADVICE.items()}
    assert [] == [name for name, parts in sentences.items() if len(set(parts)) != len(parts)]


def test_advice_is_on_the_root_of_it() -> None:
    """That nobody is left follows from what happened to those that were."""
    assert ADVICE["SourceTimeout"] == advice_on(["SourceTimeout", "NoSource"])

"""`rfork explain`: a table of forks and their diagnoses."""

from __future__ import annotations

import io

import pytest
from pydantic import ValidationError
from rich.console import Console

from rfork import errors, weights_version
from rfork.cli.diagnosis import (
    ADVICE,
    DEFAULT_ADVICE,
    NEW_VERSION_ADVICE,
    UNSTATED_VERSION_ADVICE,
    ForkStats,
    advice_on,
    comparison,
    diagnose,
    row_of,
    stats_with_upstream,
    time_losses,
)
from rfork.cli.explain import render_fork, version_summary
from rfork.schema import MAX_LAYOUT_PARTS, CrossLayoutResult, ForkInfo, LayoutPart
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
SLOW = "SlowSources: own storage is read too: the sources need 40.0 s"
NO_SOURCE = "NoSource: no instance has llama"
RAISE_LIMIT = (
    "Raise RFORK_MAX_EGRESS_BYTES_PER_S on aaaaaaaa, or start another seed. If that is not set there, reads were "
    "throttled because its own requests were slow (RFORK_MAX_LATENCY_RATIO)."
)

NEW, OLD = f"files:3fa2c1d0{'0' * 24}", f"files:91bc01f2{'0' * 24}"
FIRST = f"{weights_version.FIRST} files:3fa2c1d0 of model llama; 4 instances serve files:91bc01f2"
SEVERAL = (
    f"2 versions of llama are served (a, b) and {weights_version.UNSTATED}; 2 instances serve a, 1 instance serves b"
)

CASES: dict[str, tuple[ForkInfo, str, str, str]] = {
    "as fast as its link": (
        finished_fork(),
        "link",
        "No delay found: it ran at 1.00 GB/s, the measured speed of its link.",
        "Only a faster transport than http would help: `rfork doctor` on both hosts lists the transports.",
    ),
    "too short to measure": (
        finished_fork(seconds=0.5, link=None),
        "link",
        "No delay found; the transfer of 0.30 s was too short to measure the link.",
        "",
    ),
    "a seed with a rate limit": (
        finished_fork(seconds=10.0, link=5e8, source_rate_limits={SEED: 400_000_000}),
        "rate_limit",
        "aaaaaaaa limited its readers to 400.0 MB/s: sending 4.00 GB took 9.80 s of 10.0 s.",
        RAISE_LIMIT,
    ),
    "a seed with a rate limit that sent little": (
        finished_fork(sources={SEED: GB // 10, RELAY: 39 * GB // 10}, source_rate_limits={SEED: 400_000_000}),
        "link",
        "No delay found: it ran at 1.00 GB/s, the measured speed of its link.",
        "Only a faster transport than http would help: `rfork doctor` on both hosts lists the transports.",
    ),
    "its sources failed": (
        finished_fork(seconds=20.0, replans=2, reasons=(TIMED_OUT, UNAVAILABLE, UNAVAILABLE)),
        "sources",
        "Its sources failed or were too slow (2x SourceUnavailable, SourceTimeout; 2 replans): "
        "about 15.8 s of 20.0 s lost.",
        ADVICE["SourceUnavailable"],
    ),
    "its sources failed, without a replan": (
        finished_fork(seconds=20.0, reasons=(UNAVAILABLE,)),
        "sources",
        "Its sources failed or were too slow (SourceUnavailable): about 15.8 s of 20.0 s lost.",
        ADVICE["SourceUnavailable"],
    ),
    "read again": (
        finished_fork(seconds=10.0, repeated=8 * GB, reasons=("SourceCorrupt: chunk 3",)),
        "repeated",
        "8.00 GB had to be read again: about 5.80 s of 10.0 s lost.",
        ADVICE["SourceCorrupt"],
    ),
    "an unsteady link": (
        finished_fork(seconds=10.0),
        "unsteady",
        "Its link peaked at 1.00 GB/s but did not sustain it: about 5.80 s of 10.0 s lost.",
        "The link, the CPU or the sources were busy; check their load. Fewer readers per source "
        "(RFORK_MAX_READERS) or more seeds help.",
    ),
    "a slow planner": (
        finished_fork(seconds=9.0, phases={"plan": 4.0, "offer": 0.5, "transfer": 4.2}),
        "planning",
        "It waited for a plan: 4.00 s of 9.00 s.",
        "Check the planner's load (/metrics) and, if a scale-up was announced, RFORK_PLANNER_SCALEUP_WAIT_S.",
    ),
    "slow to open its own storage": (
        finished_fork(seconds=9.0, phases={"plan": 0.1, "offer": 6.1, "transfer": 2.6}),
        "opening",
        "It opened its own snapshot or checkpoint, because no instance had the weights: 6.10 s of 9.00 s.",
        "Keep a seed running, or check the disk or object store that it opened.",
    ),
    "a slow target": (
        finished_fork(seconds=9.0, phases={"capture": 3.0, "plan": 0.1, "transfer": 4.0, "digest": 1.5}),
        "target",
        "Local work on the target took most of the time (capture 3.00 s, digest 1.50 s): 4.50 s of 9.00 s.",
        "Its CPU or GPU is busy or slow: `rfork doctor` on the target shows what computes its digests.",
    ),
    "elected to read storage": (
        finished_fork(seconds=9.0, sources={SNAPSHOT: 4 * GB}, transports={}),
        "storage",
        "It read 100% from storage, because no instance had the weights: 8.80 s of 9.00 s.",
        "Keep a seed running, or move the snapshot to faster storage.",
    ),
    "slower peers than its own storage": (
        finished_fork(sources={SEED: GB, SNAPSHOT: 3 * GB}, reasons=(SLOW,)),
        "sources",
        "It read 1.00 GB from peers and 3.00 GB from its own storage: the sources need 40.0 s.",
        ADVICE["SlowSources"],
    ),
    "a rate limit below the rate of its own storage": (
        finished_fork(sources={SEED: GB, SNAPSHOT: 3 * GB}, reasons=(SLOW,), source_rate_limits={SEED: 100_000_000}),
        "sources",
        "It read 1.00 GB from peers and 3.00 GB from its own storage: the sources need 40.0 s. "
        "aaaaaaaa limited its readers to 100.0 MB/s.",
        RAISE_LIMIT,
    ),
    "abandoned for its own load": (
        finished_fork(
            outcome="fallback", fallback="the engine's loader", reasons=("SlowSources: the fork was abandoned",)
        ),
        "fallback",
        "The target loaded from the engine's loader because of SlowSources: the fork was abandoned.",
        ADVICE["SlowSources"],
    ),
    "abandoned because of a rate limit": (
        finished_fork(
            outcome="fallback",
            fallback="the engine's loader",
            reasons=("SlowSources: the fork was abandoned",),
            source_rate_limits={SEED: 8_000_000},
        ),
        "fallback",
        "The target loaded from the engine's loader because of SlowSources: the fork was abandoned. "
        "aaaaaaaa limited its readers to 8.00 MB/s.",
        RAISE_LIMIT,
    ),
    "time that no phase covers": (
        finished_fork(seconds=20.0, phases={"capture": 0.1, "transfer": 4.0}),
        "unknown",
        "15.9 s of 20.0 s are in no reported phase.",
        DEFAULT_ADVICE,
    ),
    "an old client": (
        finished_fork(phases={}, link=None, transports={}),
        "unknown",
        "It took 4.00 s; its rfork version is too old to report phases.",
        "Upgrade rfork on the target.",
    ),
    "elected to read storage in a rollout": (
        finished_fork(seconds=9.0, sources={SNAPSHOT: 4 * GB}, transports={}, version=NEW),
        "storage",
        "It read 100% from storage, because no instance served version files:3fa2c1d0: 8.80 s of 9.00 s.",
        "Keep a seed running, or move the snapshot to faster storage.",
    ),
    "first of its version, running": (
        running_fork(plan=(), version=NEW, reason=FIRST),
        "first_of_version",
        f"No source, so the target loads without peers: {FIRST}.",
        NEW_VERSION_ADVICE,
    ),
    "first of its version": (
        finished_fork(outcome="fallback", fallback="loader", reasons=(f"NoSource: {FIRST}",), sources={}, version=NEW),
        "first_of_version",
        f"The target loaded from loader: {FIRST}.",
        NEW_VERSION_ADVICE,
    ),
    "first of its version, and nothing to load": (
        finished_fork(outcome="failed", reasons=(f"NoSource: {FIRST}",), sources={}, version=NEW),
        "first_of_version",
        f"Loading without peers failed: {FIRST}.",
        NEW_VERSION_ADVICE,
    ),
    "several versions are served": (
        running_fork(plan=(), version="unnamed:r", reason=SEVERAL),
        "several_versions",
        f"No source: {SEVERAL}.",
        UNSTATED_VERSION_ADVICE,
    ),
    "several versions were served": (
        finished_fork(outcome="failed", reasons=(f"NoSource: {SEVERAL}",), sources={}, version="unnamed:r"),
        "several_versions",
        f"No source: {SEVERAL}.",
        UNSTATED_VERSION_ADVICE,
    ),
    "fell back": (
        finished_fork(outcome="fallback", fallback="checkpoint /models/llama", reasons=(UNAVAILABLE, NO_SOURCE)),
        "fallback",
        "The target loaded from checkpoint /models/llama because of NoSource: no instance has llama. "
        "Earlier errors: SourceUnavailable.",
        ADVICE["SourceUnavailable"],
    ),
    "fell back immediately": (
        finished_fork(outcome="fallback", fallback="loader", reasons=(NO_SOURCE,), sources={}),
        "fallback",
        "The target loaded from loader because of NoSource: no instance has llama.",
        ADVICE["NoSource"],
    ),
    "fell back without a reported reason": (
        finished_fork(outcome="fallback"),
        "fallback",
        "The target loaded from the engine's loader without reporting a reason.",
        DEFAULT_ADVICE,
    ),
    "failed": (
        finished_fork(outcome="failed", reasons=("LayoutMismatch: a.weight is float16 there",)),
        "failed",
        "The fork failed after 4.00 s: LayoutMismatch: a.weight is float16 there.",
        ADVICE["LayoutMismatch"],
    ),
    "deadline exceeded because of a rate limit": (
        finished_fork(
            outcome="failed", reasons=("DeadlineExceeded: 2 of 4 chunks",), source_rate_limits={SEED: 8_000_000}
        ),
        "failed",
        "The fork failed after 4.00 s: DeadlineExceeded: 2 of 4 chunks. aaaaaaaa limited its readers to 8.00 MB/s.",
        RAISE_LIMIT,
    ),
    "expired at the planner": (
        finished_fork(outcome="failed", reasons=("no report within 60 s",)),
        "failed",
        "The fork failed after 4.00 s: no report within 60 s.",
        DEFAULT_ADVICE,
    ),
    "interrupted": (
        finished_fork(outcome="interrupted"),
        "interrupted",
        "The fork was stopped after 4.00 s, without a reported reason.",
        "",
    ),
    "running": (
        running_fork(),
        "running",
        "Running: 50% verified, 1.00 GB/s, about 2.00 s left.",
        "",
    ),
    "running, from a seed with a rate limit": (
        running_fork(source_rate_limits={SEED: 1_100_000_000}),
        "running",
        "Running: 50% verified, 1.00 GB/s, about 2.00 s left. aaaaaaaa limited its readers to 1.10 GB/s.",
        RAISE_LIMIT,
    ),
    "no data arrives": (
        running_fork(bytes_per_s=0.0),
        "running",
        "No data is arriving: 50% verified after 2.00 s.",
        "If the source has stalled, the target requests another one automatically.",
    ),
    "waits for a source": (
        running_fork(plan=(), reason="all sources are busy"),
        "running",
        "Waiting for a source: all sources are busy.",
        "If no source appears within RFORK_NO_SOURCE_TIMEOUT_S, or RFORK_DEADLINE_S passes, the target falls back "
        "automatically.",
    ),
}


@pytest.mark.parametrize(("fork", "cause", "text", "advice"), CASES.values(), ids=CASES)
def test_a_diagnosis_names_the_largest_cause_and_its_remedy(fork: ForkInfo, cause: str, text: str, advice: str) -> None:
    """Each fork has its largest cause and matching advice."""
    diagnosis = diagnose(ForkStats(fork))
    assert cause == diagnosis.cause
    assert text == diagnosis.text
    assert advice == diagnosis.advice


@pytest.mark.parametrize(
    ("fork", "origin", "text"),
    [
        (
            finished_fork(version=NEW, reason="from seed s"),
            "own",
            "files:3fa2c1d0, fingerprint of its files; also served: 4 instances of files:91bc01f2",
        ),
        (
            finished_fork(version=OLD, reason=f"{weights_version.ADOPTS_VERSION} files:91bc01f2; from seed s"),
            "served",
            "files:91bc01f2, adopted from the fleet, because the target states no version",
        ),
        (
            finished_fork(outcome="fallback", reasons=(f"NoSource: {FIRST}",), version=NEW),
            "own",
            "files:3fa2c1d0, fingerprint of its files; first instance of this version; "
            "also served: 4 instances of files:91bc01f2",
        ),
        (
            running_fork(plan=(), version="unnamed:r", reason=SEVERAL),
            "none",
            "unnamed:r, placeholder for weights of unknown version; also served: 4 instances of files:91bc01f2",
        ),
        (
            finished_fork(version="2026-11-23"),
            "own",
            "2026-11-23, stated (RFORK_VERSION) or recorded in its snapshot; "
            "also served: 4 instances of files:91bc01f2",
        ),
        (finished_fork(), "own", ""),
    ],
    ids=["own", "served", "first", "several", "stated", "none"],
)
def test_version_summary_shows_the_origin(fork: ForkInfo, origin: str, text: str) -> None:
    """The version is shown with its origin and the other versions that are served."""
    rows = [model(version=OLD, seeds=4), model(version=NEW, seeds=0), model("other", version="x")]
    summary = version_summary(fork, rows)
    assert origin == summary.origin
    assert text == summary.text()


def test_medians_belong_to_the_version_of_the_fork() -> None:
    """Forks of another version of the model do not count."""
    rows = [model(version=OLD, fork_s=9.0), model(version=NEW, fork_s=2.0)]
    row = row_of(finished_fork(version=NEW), rows)
    assert row is not None
    assert 2.0 == row.fork_s


def test_a_slow_relay_is_traced_to_the_first_relay() -> None:
    """A fork downstream of a relay is as slow as that; the first relay of the chain explains why."""
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
    assert "relay" == diagnosis.cause
    assert (
        "It read from bbbbbbbb, which was still receiving, at 400.0 MB/s. First relay in the chain (bbbbbbbb): "
        "aaaaaaaa limited its readers to 400.0 MB/s: sending 4.00 GB took 9.80 s of 10.0 s."
    ) == diagnosis.text
    assert RAISE_LIMIT == diagnosis.advice


def test_a_relay_that_finished_earlier_counts_as_a_seed() -> None:
    """A relay that finished before the fork began did not slow it down."""
    upstream_fork = finished_fork(fork_id="f0", instance_id=RELAY, age_s=100.0)
    downstream_fork = finished_fork(sources={RELAY: 4 * GB}, transports={RELAY: "http"}, age_s=19.0)
    assert "link" == diagnose(stats_with_upstream(downstream_fork, [downstream_fork, upstream_fork], None)).cause


def test_forks_that_read_from_each_other_end_the_chain() -> None:
    """Two forks that were sources of each other do not form an endless chain."""
    one = finished_fork(sources={RELAY: 4 * GB}, age_s=19.0)
    other = finished_fork(sources={TARGET: 4 * GB}, fork_id="f0", instance_id=RELAY, age_s=19.0)
    stats = stats_with_upstream(one, [one, other], None)
    assert stats.upstream is not None
    assert RELAY == stats.upstream.fork.instance_id
    assert stats.upstream.upstream is None


@pytest.mark.parametrize(
    ("fork", "heading", "rates"),
    [
        (finished_fork(sources={SEED: GB, RELAY: GB}, rates={SEED: 8e8}), "peak rate", [8e8, None]),
        (running_fork(sources={SEED: GB}, rates={SEED: 5e8}), "rate", [5e8]),
    ],
    ids=["finished", "running"],
)
def test_the_reported_rate_of_each_source_is_shown(fork: ForkInfo, heading: str, rates: list[float | None]) -> None:
    """The current rate, or the peak rate of a finished fork; a source without a reported rate has none."""
    stats = ForkStats(fork)
    console = Console(file=io.StringIO(), width=120)
    console.print(render_fork(stats, diagnose(stats), {}))
    assert isinstance(console.file, io.StringIO)
    output = console.file.getvalue()
    assert rates == [each.rate for each in stats.sources]
    assert heading in output
    assert f"{rates[0]:.0f}"[:1] + "00.0 MB/s" in output


def test_losses_are_seconds_beyond_the_minimum_transfer_time() -> None:
    """The minimum transfer time is not a loss; each cause has its own seconds."""
    fork = finished_fork(seconds=20.0, phases={"capture": 1.0, "plan": 2.0, "transfer": 12.0, "digest": 0.5}, replans=1)
    assert [("sources", 8.0), ("unknown", 4.5), ("planning", 2.0), ("target", 1.5)] == [
        (loss.cause, round(loss.seconds, 6)) for loss in time_losses(ForkStats(fork))
    ]


def test_resumed_chunks_do_not_count_as_transferred() -> None:
    """The minimum transfer time of a resumed fork counts only fetched bytes."""
    phases = {"resume": 0.2, "plan": 0.1, "transfer": 1.0}
    stats = ForkStats(finished_fork(seconds=1.2, phases=phases, sources={SEED: GB}))
    assert 1.0 == stats.min_transfer_s


@pytest.mark.parametrize(
    ("fork_s", "storage_s", "expected"),
    [
        (None, None, ""),
        (2.0, None, "2.0x the median fork (2.00 s)"),
        (2.0, 40.0, "2.0x the median fork (2.00 s), 0.1x the median load from storage (40.0 s)"),
    ],
)
def test_a_fork_is_compared_with_the_known_medians(
    fork_s: float | None, storage_s: float | None, expected: str
) -> None:
    """The duration is compared with the medians of the model that are known."""
    assert expected == comparison(ForkStats(finished_fork(), model(fork_s=fork_s, storage_s=storage_s)))


def test_advice_names_existing_errors() -> None:
    """Every key of the advice table is a class of the error tree."""
    assert [] == [name for name in ADVICE if not hasattr(errors, name)]


def test_every_error_has_advice() -> None:
    """Every leaf of the error tree, and ForkFailed, has advice."""
    assert {"ForkFailed"} | _leaf_names(errors.RforkError) <= set(ADVICE)


def _leaf_names(error_type: type[Exception]) -> set[str]:
    subclasses = [each for each in error_type.__subclasses__() if each.__module__ == errors.__name__]
    return set().union(*map(_leaf_names, subclasses)) if subclasses else {error_type.__name__}


def test_advice_has_no_repeated_sentence() -> None:
    """No sentence occurs twice in the advice for one error."""
    sentences = {name: text.rstrip(".").split(". ") for name, text in ADVICE.items()}
    assert [] == [name for name, parts in sentences.items() if len(set(parts)) != len(parts)]


def test_advice_is_for_the_root_cause() -> None:
    """NoSource is a consequence of the failures of the sources."""
    assert ADVICE["SourceTimeout"] == advice_on(["SourceTimeout", "NoSource"])


def layout_part(rank: int) -> LayoutPart:
    """Return half of the boxes, from one rank of two."""
    return LayoutPart(
        rank_key=f"main-tp{rank}of2-pp0of1-ep0of1", layout_id=f"{rank}" * 32, host=f"node-{rank}",
        instance_id=SEED, boxes=290, bytes_read=2 * GB, seconds=1.5,
    )  # fmt: skip


def cross_layout_result(*parts: LayoutPart) -> CrossLayoutResult:
    """Return the result of a fork across layouts."""
    return CrossLayoutResult(
        needed_bytes=4 * GB, parts=parts, failures=("tp0of4: killed",), record_s=0.5, transfer_s=2.25, load_s=0.75
    )


def test_a_fork_across_layouts_shows_its_parts_and_times() -> None:
    """Each part has its rank, layout, boxes, size, duration and host."""
    result = cross_layout_result(layout_part(0), layout_part(1))
    fork = finished_fork(outcome="fallback", fallback="instances with other layouts", cross_layout=result)
    console = Console(file=io.StringIO(), width=160)
    stats = ForkStats(fork)
    console.print(render_fork(stats, diagnose(stats), {}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    row = next(line for line in text.splitlines() if "11111111 tp 1/2" in line)
    for expected in ("290", "2.00 GB", "1.50 s", "node-1"):
        assert expected in row
    assert "other layouts: 4.00 GB of 4.00 GB needed; " in text
    assert "placement map recorded in 0.50 s, boxes fetched in 2.25 s, loaded in 0.75 s" in text
    assert "other layout failed: tp0of4: killed" in text


def test_a_planner_stores_a_limited_number_of_parts() -> None:
    """More parts are rejected; a target reports the largest."""
    with pytest.raises(ValidationError, match="at most 64"):
        cross_layout_result(*[layout_part(0)] * (MAX_LAYOUT_PARTS + 1))

"""`rfork explain`: what it says of a fork, as a table of forks and verdicts."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rfork import errors
from rfork.cli.explain.account import Account, row_of, with_upstream
from rfork.cli.explain.advice import ADVICE, advice_on
from rfork.cli.explain.causes import losses
from rfork.cli.explain.picture import picture
from rfork.cli.explain.verdict import NEW_VERSION, STATE_ONE, comparison, verdict
from rfork.cli.explain.version import version_account
from rfork.wire import ForkView
from tests.unit.cli.fleets import GB, RELAY, SEED, SNAPSHOT, TARGET, forked, going, model

GONE, STALLED = "SourceGone: it closed the connection", "SourceStalled: nothing for 10 s"
NO_SOURCE = "NoSource: nobody holds llama"
UNHOLD = (
    "Raise RFORK_EGRESS_RATE on aaaaaaaa, or start another seed. Where it has no such setting, its own work "
    "was slow (RFORK_LATENCY_SETPOINT)."
)

NEW, OLD = f"files:3fa2c1d0{'0' * 24}", f"files:91bc01f2{'0' * 24}"
FIRST = "first of version files:3fa2c1d0 of model llama; 4 instances serve files:91bc01f2"
SEVERAL = (
    "2 versions of llama are served (a, b) and this target states none: set RFORK_VERSION; no version of "
    "model llama can be taken over; 2 instances serve a, 1 instance serves b"
)

CASES: dict[str, tuple[ForkView, str, str, str]] = {
    "as fast as its link": (
        forked(),
        "link",
        "Nothing held it up: it ran at 1.00 GB/s, the speed that its link showed.",
        "Only a faster way than http makes it faster: `rfork doctor` on both hosts lists them.",
    ),
    "too short to measure": (
        forked(seconds=0.5, link=None),
        "link",
        "Nothing held it up; its transfer of 0.30 s was too short to measure a link.",
        "",
    ),
    "a governed seed": (
        forked(seconds=10.0, link=5e8, held={SEED: 400_000_000}),
        "governor",
        "aaaaaaaa held all its readers to 400.0 MB/s: the 4.00 GB that it gave took 9.80 s of 10.0 s.",
        UNHOLD,
    ),
    "a governed seed that gave little": (
        forked(sources={SEED: GB // 10, RELAY: 39 * GB // 10}, held={SEED: 400_000_000}),
        "link",
        "Nothing held it up: it ran at 1.00 GB/s, the speed that its link showed.",
        "Only a faster way than http makes it faster: `rfork doctor` on both hosts lists them.",
    ),
    "its sources failed": (
        forked(seconds=20.0, replans=2, reasons=(STALLED, GONE, GONE)),
        "sources",
        "Its sources failed or fell behind (2 times SourceGone, SourceStalled; planned again 2 times): "
        "about 15.8 s of 20.0 s.",
        ADVICE["SourceGone"],
    ),
    "its sources failed, and it was not planned again": (
        forked(seconds=20.0, reasons=(GONE,)),
        "sources",
        "Its sources failed or fell behind (SourceGone): about 15.8 s of 20.0 s.",
        ADVICE["SourceGone"],
    ),
    "read again": (
        forked(seconds=10.0, repeated=8 * GB, reasons=("SourceCorrupt: chunk 3",)),
        "repeated",
        "8.00 GB had to be read again, which took about 5.80 s of 10.0 s.",
        ADVICE["SourceCorrupt"],
    ),
    "an unsteady link": (
        forked(seconds=10.0),
        "unsteady",
        "Its link did 1.00 GB/s in its best second, but not throughout: that cost about 5.80 s of 10.0 s.",
        "Its link, its CPU or its sources had other work then: look at their load. Fewer readers a source "
        "(RFORK_MAX_READERS) or more seeds help.",
    ),
    "a slow planner": (
        forked(seconds=9.0, phases={"plan": 4.0, "offer": 0.5, "transfer": 4.2}),
        "planning",
        "It waited for the planner's answer: 4.00 s of 9.00 s.",
        "Look at the planner's load (/metrics); where a scale-up was announced, at RFORK_PLANNER_GATHER_S.",
    ),
    "slow to open its own storage": (
        forked(seconds=9.0, phases={"plan": 0.1, "offer": 6.1, "transfer": 2.6}),
        "opening",
        "It opened its own snapshot or checkpoint, since nobody held the weights: 6.10 s of 9.00 s.",
        "Keep a seed running, or look at the disk or the object store that it opened.",
    ),
    "a slow target": (
        forked(seconds=9.0, phases={"capture": 3.0, "plan": 0.1, "transfer": 4.0, "digest": 1.5}),
        "target",
        "The target's own work took most (capture 3.00 s, digest 1.50 s): 4.50 s of 9.00 s.",
        "Its CPU or GPU is busy or slow: `rfork doctor` there says what digests its memory.",
    ),
    "elected to read storage": (
        forked(seconds=9.0, sources={SNAPSHOT: 4 * GB}, transports={}),
        "storage",
        "It read 100% from storage, since nobody held the weights: 8.80 s of 9.00 s.",
        "Keep a seed running, or put the snapshot on faster storage.",
    ),
    "time that no phase has": (
        forked(seconds=20.0, phases={"capture": 0.1, "transfer": 4.0}),
        "unknown",
        "15.9 s of 20.0 s are in no phase that it told of.",
        "See the target's own log around that time.",
    ),
    "an old client": (
        forked(phases={}, link=None, transports={}),
        "unknown",
        "It took 4.00 s, and its rfork is too old to tell in which phase.",
        "Update rfork on the target to learn more.",
    ),
    "elected to read storage in a rollout": (
        forked(seconds=9.0, sources={SNAPSHOT: 4 * GB}, transports={}, version=NEW),
        "storage",
        "It read 100% from storage, since no instance served version files:3fa2c1d0: 8.80 s of 9.00 s.",
        "Keep a seed running, or put the snapshot on faster storage.",
    ),
    "first of its version, under way": (
        going(plan=(), version=NEW, reason=FIRST),
        "first_of_version",
        f"It has no source and loads by itself: {FIRST}.",
        NEW_VERSION,
    ),
    "first of its version": (
        forked(
            outcome="fallback", fallback="loader", reasons=(f"NoSource: {FIRST}",), sources={}, version=NEW
        ),
        "first_of_version",
        f"It loaded from loader: {FIRST}.",
        NEW_VERSION,
    ),
    "first of its version, and nothing to load": (
        forked(outcome="failed", reasons=(f"NoSource: {FIRST}",), sources={}, version=NEW),
        "first_of_version",
        f"It failed to load by itself: {FIRST}.",
        NEW_VERSION,
    ),
    "several versions are served": (
        going(plan=(), version="unnamed:r", reason=SEVERAL),
        "several_versions",
        f"It got no source: {SEVERAL}.",
        STATE_ONE,
    ),
    "several versions were served": (
        forked(outcome="failed", reasons=(f"NoSource: {SEVERAL}",), sources={}, version="unnamed:r"),
        "several_versions",
        f"It got no source: {SEVERAL}.",
        STATE_ONE,
    ),
    "fell back": (
        forked(outcome="fallback", fallback="checkpoint /models/llama", reasons=(GONE, NO_SOURCE)),
        "fell_back",
        "It loaded from checkpoint /models/llama because of NoSource: nobody holds llama. Before that: "
        "SourceGone.",
        ADVICE["SourceGone"],
    ),
    "fell back at once": (
        forked(outcome="fallback", fallback="loader", reasons=(NO_SOURCE,), sources={}),
        "fell_back",
        "It loaded from loader because of NoSource: nobody holds llama.",
        ADVICE["NoSource"],
    ),
    "fell back, and told nothing": (
        forked(outcome="fallback"),
        "fell_back",
        "It loaded from its own loader, and told no reason.",
        "See the target's own log around that time.",
    ),
    "failed": (
        forked(outcome="failed", reasons=("LayoutMismatch: a.weight is float16 there",)),
        "failed",
        "It failed after 4.00 s: LayoutMismatch: a.weight is float16 there.",
        ADVICE["LayoutMismatch"],
    ),
    "too late for a governed seed": (
        forked(outcome="failed", reasons=("DeadlinePassed: 2 of 4 chunks",), held={SEED: 8_000_000}),
        "failed",
        "It failed after 4.00 s: DeadlinePassed: 2 of 4 chunks. aaaaaaaa held all its readers to 8.00 MB/s.",
        UNHOLD,
    ),
    "given up by the planner": (
        forked(outcome="failed", reasons=("nothing was heard of it",)),
        "failed",
        "It failed after 4.00 s: nothing was heard of it.",
        "See the target's own log around that time.",
    ),
    "interrupted": (
        forked(outcome="interrupted"),
        "interrupted",
        "It was stopped after 4.00 s, and told no reason.",
        "",
    ),
    "under way": (
        going(),
        "under_way",
        "It is under way: 50% verified, 1.00 GB/s, about 2.00 s to go.",
        "",
    ),
    "under way from a governed seed": (
        going(held={SEED: 1_100_000_000}),
        "under_way",
        "It is under way: 50% verified, 1.00 GB/s, about 2.00 s to go. aaaaaaaa held all its readers to "
        "1.10 GB/s.",
        UNHOLD,
    ),
    "nothing moves": (
        going(bytes_per_s=0.0),
        "under_way",
        "It reads nothing at the moment: 50% verified after 2.00 s.",
        "If its source has stalled, it asks for another by itself.",
    ),
    "waits for a source": (
        going(plan=(), reason="all sources are busy"),
        "under_way",
        "It waits for a source: all sources are busy.",
        "If nothing comes it falls back by itself (RFORK_PATIENCE_S, then RFORK_DEADLINE_S).",
    ),
}


@pytest.mark.parametrize(("fork", "cause", "text", "advice"), CASES.values(), ids=CASES)
def test_verdicts(fork: ForkView, cause: str, text: str, advice: str) -> None:
    """Each kind of fork has its largest cause named, and what to do about it."""
    told = verdict(Account.of(fork))
    assert (cause, text, advice) == (told.cause, told.text, told.advice)


@pytest.mark.parametrize(
    ("fork", "origin", "words"),
    [
        (
            forked(version=NEW, reason="from seed s (0 other readers)"),
            "own",
            "files:3fa2c1d0, the fingerprint of its files; now served besides: 4 instances of files:91bc01f2",
        ),
        (
            forked(version=OLD, reason="takes over version files:91bc01f2; from seed s (0 other readers)"),
            "served",
            "files:91bc01f2, taken over: the target has none of its own, and this one was served",
        ),
        (
            forked(outcome="fallback", reasons=(f"NoSource: {FIRST}",), version=NEW),
            "own",
            "files:3fa2c1d0, the fingerprint of its files; the first instance of it; "
            "now served besides: 4 instances of files:91bc01f2",
        ),
        (
            going(plan=(), version="unnamed:r", reason=SEVERAL),
            "none",
            "unnamed:r, a name for weights of which nothing else is known; "
            "now served besides: 4 instances of files:91bc01f2",
        ),
        (
            forked(version="2026-11-23"),
            "own",
            "2026-11-23, as stated (RFORK_VERSION), or as its snapshot records; "
            "now served besides: 4 instances of files:91bc01f2",
        ),
        (forked(), "own", ""),
    ],
    ids=["own", "served", "first", "several", "stated", "none"],
)
def test_the_version_of_a_fork_and_where_it_is_from(fork: ForkView, origin: str, words: str) -> None:
    """Its own, taken over, or the first; with the other versions that are served by now."""
    rows = [model(version=OLD, seeds=4), model(version=NEW, seeds=0), model("other", version="x")]
    account = version_account(fork, rows)
    assert origin == account.origin
    assert words == account.words()


def test_medians_are_those_of_the_forks_version() -> None:
    """Another version of the model may have other forks."""
    rows = [model(version=OLD, fork_s=9.0), model(version=NEW, fork_s=2.0)]
    row = row_of(forked(version=NEW), rows)
    assert row is not None
    assert 2.0 == row.fork_s


def test_a_relay_is_blamed_on_what_it_read_itself() -> None:
    """A fork behind a relay went no faster than that, and the one at the head of the chain says why."""
    head = forked(seconds=10.0, link=5e8, held={SEED: 400_000_000}, fork_id="f0", instance_id=RELAY, age_s=20)
    behind = forked(seconds=10.0, link=5e8, sources={RELAY: 4 * GB}, transports={RELAY: "http"}, age_s=19)
    told = verdict(with_upstream(behind, [behind, head], None))
    assert (
        "relay",
        "It read from bbbbbbbb, which was itself still receiving, at 400.0 MB/s. At the head of that chain, "
        "bbbbbbbb: aaaaaaaa held all its readers to 400.0 MB/s: "
        "the 4.00 GB that it gave took 9.80 s of 10.0 s.",
        UNHOLD,
    ) == (told.cause, told.text, told.advice)


def test_a_relay_that_was_done_is_a_seed() -> None:
    """What had ended when the fork began did not hold it up."""
    head = forked(fork_id="f0", instance_id=RELAY, age_s=100.0)
    behind = forked(sources={RELAY: 4 * GB}, transports={RELAY: "http"}, age_s=19.0)
    assert "link" == verdict(with_upstream(behind, [behind, head], None)).cause


def test_forks_that_read_from_one_another_end_the_chain() -> None:
    """Two that gave to one another are no endless chain."""
    one = forked(sources={RELAY: 4 * GB}, age_s=19.0)
    other = forked(sources={TARGET: 4 * GB}, fork_id="f0", instance_id=RELAY, age_s=19.0)
    account = with_upstream(one, [one, other], None)
    assert (RELAY, None) == (
        account.upstream.fork.instance_id if account.upstream else None,
        account.upstream.upstream if account.upstream else account,
    )


@pytest.mark.parametrize(
    ("fork", "heading", "rates"),
    [
        (forked(sources={SEED: GB, RELAY: GB}, rates={SEED: 8e8}), "at best", [8e8, None]),
        (going(sources={SEED: GB}, rates={SEED: 5e8}), "now", [5e8]),
    ],
    ids=["ended", "under way"],
)
def test_the_rate_of_each_source_is_as_told(fork: ForkView, heading: str, rates: list[float | None]) -> None:
    """Now, or in its fastest second once the fork has ended; a source of which none is told has none."""
    account = Account.of(fork)
    console = Console(file=io.StringIO(), width=120)
    console.print(picture(account, verdict(account), {}))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert (rates, True) == (
        [each.rate for each in account.given],
        all(word in shown for word in (heading, f"{rates[0]:.0f}"[:1] + "00.0 MB/s")),
    )


def test_losses_are_seconds_beyond_the_bound() -> None:
    """What the bytes need at the link's speed is no loss; each cause has its own seconds."""
    fork = forked(
        seconds=20.0, phases={"capture": 1.0, "plan": 2.0, "transfer": 12.0, "digest": 0.5}, replans=1
    )
    assert [("sources", 8.0), ("unknown", 4.5), ("planning", 2.0), ("target", 1.5)] == [
        (loss.cause, round(loss.seconds, 6)) for loss in losses(Account.of(fork))
    ]


def test_what_a_dead_process_had_left_did_not_come_over_the_link() -> None:
    """The bound of a fork that was resumed counts what it fetched."""
    phases = {"resume": 0.2, "plan": 0.1, "transfer": 1.0}
    account = Account.of(forked(seconds=1.2, phases=phases, sources={SEED: GB}))
    assert 1.0 == account.bound_s


@pytest.mark.parametrize(
    ("fork_s", "storage_s", "said"),
    [
        (None, None, ""),
        (2.0, None, "2.0 times the median fork (2.00 s)"),
        (2.0, 40.0, "2.0 times the median fork (2.00 s), 0.1 times a load from storage (40.0 s)"),
    ],
)
def test_comparison(fork_s: float | None, storage_s: float | None, said: str) -> None:
    """It is set beside its model's other forks, as far as those are known."""
    assert said == comparison(Account.of(forked(), model(fork_s=fork_s, storage_s=storage_s)))


def test_each_advice_is_on_an_error_that_there_is() -> None:
    """The table of advice names classes of the error tree."""
    assert [] == [name for name in ADVICE if not hasattr(errors, name)]


def test_there_is_advice_on_each_error() -> None:
    """Whatever a fork can end with: each error of the tree that has no kinds of its own, and ForkFailed."""
    assert {"ForkFailed"} | _leaves(errors.RforkError) <= set(ADVICE)


def _leaves(kind: type[Exception]) -> set[str]:
    own = [each for each in kind.__subclasses__() if each.__module__ == errors.__name__]
    return set().union(*map(_leaves, own)) if own else {kind.__name__}


def test_no_advice_repeats_itself() -> None:
    """No sentence stands twice in what is said on one error."""
    sentences = {name: text.rstrip(".").split(". ") for name, text in ADVICE.items()}
    assert [] == [name for name, said in sentences.items() if len(set(said)) != len(said)]


def test_advice_is_on_the_root_of_it() -> None:
    """That nobody is left follows from what happened to those that were."""
    assert ADVICE["SourceStalled"] == advice_on(["SourceStalled", "NoSource"])

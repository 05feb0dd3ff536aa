"""Records as patches of JSON parts, and changes as messages of patches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.core.records import (
    Accusation,
    ForkRecord,
    GroupKey,
    InstanceRecord,
    RouteRecord,
    SourceFaultRecord,
    StoreChange,
    Witness,
)
from planner.store.messages import CHANGE_ADAPTER, FORKS, INSTANCES, ChangeMessage, body_of, group_from, group_text
from rfork.image.ranges import normalise
from rfork.schema import ForkProgress, ForkResult, Rank, StorageAssignment, StorageCandidate
from tests.unit.planner.builders import CHUNKS, report
from tests.unit.planner.records import FORKED, GROUP, fork, instance

NAMES = st.text("abc:-._", min_size=1, max_size=8)
TIMES = st.floats(min_value=0, max_value=2e9) | st.just(float("inf"))
CHUNK_RANGES = st.lists(
    st.tuples(st.integers(0, CHUNKS), st.integers(0, CHUNKS)), max_size=4
).map(normalise)  # fmt: skip
PRINTABLE = st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"])
TEXTS = st.text(PRINTABLE, max_size=20)
OFFERS = st.lists(
    st.builds(StorageCandidate, kind=st.sampled_from(["snapshot", "loader"]), uri=TEXTS), max_size=2
).map(tuple)  # fmt: skip
INSTANCE_RECORDS = st.builds(
    InstanceRecord,
    report=st.builds(
        lambda verified, **changes: report("i", *verified, **changes),
        verified=CHUNK_RANGES,
        readers=st.lists(NAMES, max_size=3).map(tuple),
        generation=st.integers(0, 3),
        state=st.sampled_from(["loading", "serving", "draining"]),
        storage=OFFERS,
        egress_rate=st.none() | st.integers(1, 1 << 40),
        model=st.text(PRINTABLE, min_size=1, max_size=20),
        rank=st.builds(Rank, dp=st.integers(0, 3)),
    ),
    seen_at=TIMES,
    ttl_s=TIMES,
    drained=st.booleans(),
    quarantined_until=TIMES,
    quarantine=TEXTS,
    reported_missing=st.booleans(),
    ingress_rate=st.none() | TIMES,
    since=TIMES,
    plan_requested=st.booleans(),
    owner=st.sampled_from(["", "0" * 64]),
    accusations=st.lists(
        st.builds(
            Accusation,
            st.builds(Witness, NAMES, NAMES, NAMES),
            fork_id=NAMES,
            reason=TEXTS,
            at=st.floats(0, 2e9),
            until=st.floats(0, 2e9),
            generation=st.integers(0, 3),
            credibility=st.sampled_from([1.0, 0.5]),
            contradicted_by=st.lists(NAMES, max_size=2).map(tuple),
        ),
        max_size=2,
    ).map(tuple),
    contradiction_count=st.integers(0, 3),
)
READS = st.builds(
    RouteRecord,
    source_id=NAMES,
    chunks=CHUNK_RANGES,
    transports=st.lists(NAMES).map(tuple),
    generation=st.integers(0),
)
FORK_RECORDS = st.builds(
    fork,
    st.just("f"),
    seen_at=TIMES,
    reads=st.lists(READS, max_size=3).map(tuple),
    storage=st.lists(
        st.builds(StorageAssignment, kind=st.just("checkpoint"), uri=TEXTS, chunks=CHUNK_RANGES), max_size=2
    ).map(tuple),
    weights_id=st.none() | st.just("1" * 32),
    reason=TEXTS,
    progress=st.none()
    | st.builds(
        ForkProgress,
        verified=CHUNK_RANGES,
        bytes_read=st.integers(0, 1 << 50),
        bytes_per_s=st.floats(0, 1e12),
        sources=st.dictionaries(NAMES, st.integers(0, 2**63 - 1), max_size=2),
        source_bytes_per_s=st.dictionaries(NAMES, st.floats(0, 1e12), max_size=2),
        phases=st.dictionaries(st.sampled_from(["plan", "transfer"]), st.floats(0, 1e9), max_size=2),
    ),
    finish=st.none() | st.just(FORKED) | st.just(ForkResult(outcome="failed", seconds=0, bytes_read=0)),
    abandoned=st.booleans(),
    faults_by_source=st.dictionaries(
        NAMES,
        st.builds(SourceFaultRecord, reason=TEXTS, until=st.floats(0, 2e9), generation=st.none() | st.integers(0)),
        max_size=2,
    ),
    sources_used=st.frozensets(NAMES, max_size=3),
    source_rate_limits=st.dictionaries(NAMES, st.integers(1, 1 << 50), max_size=2),
)


@given(INSTANCE_RECORDS, INSTANCE_RECORDS)
def test_an_instance_is_restored_from_its_parts(before: InstanceRecord, after: InstanceRecord) -> None:
    """It is restored from all parts, or from changed ones on top of the old record."""
    full_patch, partial_patch = INSTANCES.patch(None, after), INSTANCES.patch(before, after)
    assert after == INSTANCES.apply(None, full_patch)
    assert after == INSTANCES.apply(before, partial_patch)


@given(FORK_RECORDS, FORK_RECORDS)
def test_a_fork_is_restored_from_its_parts(before: ForkRecord, after: ForkRecord) -> None:
    """Mappings, sets and tuples keep their types."""
    full_patch, partial_patch = FORKS.patch(None, after), FORKS.patch(before, after)
    assert after == FORKS.apply(None, full_patch)
    assert after == FORKS.apply(before, partial_patch)


def test_unchanged_parts_are_not_sent() -> None:
    """An unchanged heartbeat is one number; a relay's chunks are sent without its report."""
    seen = instance("a")
    relay_report = report("a", (0, 6))
    grown = relay_report.model_copy(update={"verified": ((0, 7),)})
    assert {} == INSTANCES.patch(seen, replace(seen, report=seen.report.model_copy()))
    assert {"seen_at": "1700000000.25"} == INSTANCES.patch(seen, replace(seen, seen_at=1700000000.25))
    assert {"verified": "[[0,7]]"} == INSTANCES.patch(replace(seen, report=relay_report), replace(seen, report=grown))
    assert {"quarantine": '"lied"', "quarantined_until": "Infinity"} == INSTANCES.patch(
        seen, replace(seen, quarantine="lied", quarantined_until=float("inf"))
    )


def test_changes_of_different_parts_are_merged() -> None:
    """A drain, a heartbeat and progress based on the same record merge in any order."""
    base = replace(instance("a"), report=report("a", (0, 6)))
    drained = INSTANCES.patch(base, replace(base, drained=True))
    heartbeat = INSTANCES.patch(
        base, replace(base, seen_at=5.0, report=base.report.model_copy(update={"state": "serving"}))
    )
    progress = INSTANCES.patch(base, replace(base, report=base.report.model_copy(update={"verified": ((0, 12),)})))
    expected = replace(
        base, drained=True, seen_at=5.0,
        report=base.report.model_copy(update={"state": "serving", "verified": ((0, 12),)}),
    )  # fmt: skip
    one = base
    for patch in (drained, heartbeat, progress):
        one = INSTANCES.apply(one, patch)
    other = base
    for patch in (progress, heartbeat, drained):
        other = INSTANCES.apply(other, patch)
    assert expected == one
    assert expected == other


@pytest.mark.parametrize(
    "patch",
    [
        {"seen_at": "1.0"},
        {"report": "{}"},
        {"seen_at": "soon"},
        INSTANCES.patch(None, instance("a")) | {"colour": '"red"'},
    ],
    ids=["torn", "empty report", "invalid number", "unknown part"],
)
def test_an_invalid_patch_is_a_value_error(patch: dict[str, str]) -> None:
    """No partial record is created."""
    with pytest.raises(ValueError, match=r"InstanceRecord|InstanceReport|valid number|JSON"):
        INSTANCES.apply(None, patch)


def test_a_change_is_sent_as_patches() -> None:
    """Unchanged records are omitted, new ones are complete, and the message survives serialization."""
    known, new = instance("known"), instance("new")
    change = StoreChange(
        instances=(known, new), forks=(fork("f", ended=True),), removed=("old",), group=GROUP, version=3
    )
    body = body_of(change, {"known": known}, {"f": fork("f")})
    expected = ChangeMessage(
        instances=(("new", INSTANCES.patch(None, new)),),
        forks=(("f", {"finish": FORKED.model_dump_json()}),),
        removed=("old",),
        group=group_text(GROUP),
        version=3,
    )
    assert expected == body
    assert expected == CHANGE_ADAPTER.validate_json(CHANGE_ADAPTER.dump_json(body))


@given(st.text(min_size=1, max_size=20))
def test_a_group_is_one_line_of_text(model: str) -> None:
    """Any model name is serialized without line breaks."""
    key = GroupKey(model, model, Rank().key)
    assert key == group_from(group_text(key))

"""Reports of instances that share their equal parts."""

from __future__ import annotations

from planner.core.compact_reports import MAX_RANGES, compact_report
from rfork.schema import InstanceReport, Rank, StorageCandidate
from tests.unit.planner.builders import seed_report


def parsed(name: str, **changes: object) -> InstanceReport:
    """Return a seed's report as it is parsed from a request."""
    return InstanceReport.model_validate_json(seed_report(name, **changes).model_dump_json())


def test_a_repeated_report_is_the_known_one() -> None:
    """A heartbeat that reports nothing new costs no memory."""
    known = compact_report(parsed("a"), None)
    assert known is compact_report(parsed("a"), known)


def test_a_changed_report_is_the_new_one() -> None:
    """The new values replace the known ones."""
    known = compact_report(parsed("a"), None)
    assert 7 == compact_report(parsed("a", generation=7), known).generation


def test_a_compact_report_equals_the_original() -> None:
    """Its JSON and its values are those that the instance sent."""
    report = parsed("a", rank=Rank(dp=3), storage=(StorageCandidate(kind="loader"),))
    compact = compact_report(report, None)
    assert report == compact
    assert report.model_dump_json() == compact.model_dump_json()


def test_reports_of_one_model_share_their_equal_parts() -> None:
    """Rank, storage and names are kept once for all instances."""
    storage = (StorageCandidate(kind="checkpoint", uri="file:///models/m", origin="0" * 32),)
    one, other = (compact_report(parsed(name, storage=storage), None) for name in "ab")
    assert one.rank is other.rank
    assert one.storage is other.storage
    assert one.layout_id is other.layout_id
    assert one.__pydantic_fields_set__ is other.__pydantic_fields_set__


def test_a_copy_of_a_compact_report_changes_no_other_report() -> None:
    """The names of the fields that are set are shared, and copied before they change."""
    report = compact_report(InstanceReport(**{name: getattr(parsed("a"), name) for name in REQUIRED}), None)
    report.model_copy(update={"generation": 1})
    assert set(REQUIRED) == report.model_fields_set


def test_long_lists_of_chunks_are_not_shared() -> None:
    """They are no other instance's, and would fill the memory."""
    chunks = tuple((2 * index, 2 * index + 1) for index in range(MAX_RANGES + 1))
    one, other = (compact_report(parsed(name, chunk_count=64, verified=chunks), None) for name in "ab")
    assert one.verified == other.verified
    assert one.verified is not other.verified


REQUIRED = (
    "instance_id", "model", "layout_id", "image_bytes", "chunk_count", "state", "address", "placement",
)  # fmt: skip

"""The planner's Prometheus metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from planner.core.records import ForkRecord, InstanceRecord, RouteRecord
from planner.metrics import REFUSALS, Metrics
from rfork.schema import ForkResult, InstanceState, Rank, StorageAssignment
from tests.unit.planner.builders import fault, seed_report

ALL_CHUNKS = ((0, 12),)


def exported_samples(
    metrics: Metrics, instances: tuple[InstanceRecord, ...] = (), live: tuple[ForkRecord, ...] = ()
) -> Mapping[str, float]:
    """Return each sample by name and labels, parsed by the Prometheus client."""
    text = metrics.exposition(instances, live).decode()
    return {
        sample.name + "".join(f" {name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def nonzero_with_prefix(samples: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the samples above 0 with this prefix, without it."""
    return {name.removeprefix(prefix): value for name, value in samples.items() if name.startswith(prefix) and value}


def instance(state: InstanceState, *, drained: bool = False) -> InstanceRecord:
    """Return an instance that reported this state."""
    return InstanceRecord(seed_report("i", state=state), seen_at=0.0, ttl_s=20.0, drained=drained)


def fork(*reads: str, storage: tuple[StorageAssignment, ...] = ()) -> ForkRecord:
    """Return a running fork that reads from this storage."""
    return ForkRecord(
        fork_id="f", instance_id="t", model="m", rank=Rank(), chunk_count=12, image_bytes=12,
        requested_at=0.0, planned_at=0.0, seen_at=0.0, storage=storage,
        reads=tuple(RouteRecord(name, ALL_CHUNKS, ("http",), 0) for name in reads),
    )  # fmt: skip


def finish(outcome: str = "forked", **changes: object) -> ForkResult:
    """Return a fork result."""
    return ForkResult.model_validate({"outcome": outcome, "seconds": 1, "bytes_read": 1} | changes)


def test_instances_are_counted_by_state() -> None:
    """A drained instance counts as draining, whatever it reports."""
    instances = (
        instance("serving"),
        instance("serving"),
        instance("loading"),
        instance("serving", drained=True),
    )
    assert {"serving": 2.0, "loading": 1.0, "draining": 1.0} == nonzero_with_prefix(
        exported_samples(Metrics(), instances), "rfork_planner_instances state="
    )


def test_live_forks_are_counted_by_state() -> None:
    """Planning and running forks, leases, and elected storage readers are counted."""
    snapshot = StorageAssignment(kind="snapshot", uri="file:///s", chunks=((0, 6),))
    rest = StorageAssignment(kind="snapshot", uri="file:///s", chunks=((8, 9),))
    loader = StorageAssignment(kind="loader", chunks=ALL_CHUNKS)
    forks = (fork(), fork("a", "b"), fork("a", storage=(snapshot, rest)), fork(storage=(loader,)))
    samples = exported_samples(Metrics(), live=forks)
    assert {"planning": 1.0, "running": 3.0} == nonzero_with_prefix(samples, "rfork_planner_live_forks state=")
    assert 3.0 == samples["rfork_planner_active_leases"]
    assert {"snapshot": 1.0, "loader": 1.0} == nonzero_with_prefix(samples, "rfork_planner_storage_readers kind=")


def test_gauges_decrease() -> None:
    """Removed items count as 0 at the next scrape."""
    metrics = Metrics()
    loader = StorageAssignment(kind="loader", chunks=ALL_CHUNKS)
    exported_samples(metrics, (instance("serving"),), (fork("a", storage=(loader,)),))
    samples = exported_samples(metrics)
    names = ("instances state=", "live_forks state=", "active_leases", "storage_readers kind=")
    assert [{}, {}, {}, {}] == [nonzero_with_prefix(samples, f"rfork_planner_{name}") for name in names]


def test_bytes_are_counted_by_source_type() -> None:
    """Every instance is a peer."""
    metrics = Metrics()
    metrics.ended(finish(sources={"seed-1": 5, "seed-2": 7, "snapshot:s3://b/m": 3, "loader:": 2}))
    metrics.ended(finish(sources={"checkpoint:file:///m": 11}))
    assert {"peer": 12.0, "snapshot": 3.0, "loader": 2.0, "checkpoint": 11.0} == nonzero_with_prefix(
        exported_samples(metrics), "rfork_planner_verified_bytes_total source="
    )


def test_the_first_of_a_version_has_its_own_fallback_reason() -> None:
    """Each rollout has one, which raises no alert."""
    metrics = Metrics()
    reason = "NoSource: first of version v2 of model m; 4 instances serve v1"
    metrics.ended(finish("fallback", fallback="loader", reasons=(reason,)))
    found = nonzero_with_prefix(exported_samples(metrics), "rfork_planner_fallbacks_total ")
    assert {"fallback=loader reason=FirstOfVersion": 1.0} == found


def test_outcomes_fallbacks_and_efficiency_are_counted() -> None:
    """A fallback has the last error as its reason; only forks that report efficiency are observed."""
    metrics = Metrics()
    metrics.ended(finish(efficiency=0.92))
    metrics.ended(finish("interrupted"))
    metrics.ended(finish("fallback", fallback="snapshot:s3://b/m", reasons=("x", "SourceTimeout: no byte for 10 s")))
    samples = exported_samples(metrics)
    assert {"forked": 1.0, "interrupted": 1.0, "fallback": 1.0} == nonzero_with_prefix(
        samples, "rfork_planner_forks_total outcome="
    )
    assert {"fallback=snapshot reason=SourceTimeout": 1.0} == nonzero_with_prefix(
        samples, "rfork_planner_fallbacks_total "
    )
    assert 1.0 == samples["rfork_planner_fork_efficiency_count"]
    assert 0.0 == samples["rfork_planner_fork_efficiency_bucket le=0.9"]
    assert 1.0 == samples["rfork_planner_fork_efficiency_bucket le=0.95"]


def test_the_first_of_a_version_is_distinguished_from_other_fallbacks() -> None:
    """Alerts exclude it, because a rollout starts with it."""
    metrics = Metrics()
    first = "NoSource: first of version v2 of model m; 4 instances serve v1"
    several = "NoSource: 2 versions of m are served (v1, v2) and this target states none"
    for reason in (first, several):
        metrics.ended(finish("fallback", fallback="checkpoint:file:///m", reasons=(reason,)))
    expected = {
        "fallback=checkpoint reason=FirstOfVersion": 1.0,
        "fallback=checkpoint reason=NoSource": 1.0,
    }
    assert expected == nonzero_with_prefix(exported_samples(metrics), "rfork_planner_fallbacks_total ")


def test_fork_durations_are_observed() -> None:
    """They are labelled by outcome and origin, and by phase; unknown phases are `other`."""
    metrics = Metrics()
    phases = {"plan": 0.5, "transfer": 2.0, "dancing": 9.0}
    metrics.ended(finish(seconds=3.0, sources={"s": 5}, phases=phases), seconds_saved=4.0)
    metrics.ended(finish("fallback", seconds=8.0, sources={"loader:": 5}), seconds_saved=-1.5)
    samples = exported_samples(metrics)
    seconds = "rfork_planner_fork_seconds_sum origin="
    assert {"peers outcome=forked": 3.0, "storage outcome=fallback": 8.0} == nonzero_with_prefix(samples, seconds)
    assert {"plan": 0.5, "transfer": 2.0, "other": 9.0} == nonzero_with_prefix(
        samples, "rfork_planner_fork_phase_seconds_sum phase="
    )
    assert 4.0 == samples["rfork_planner_saved_seconds_total"]
    assert 1.5 == samples["rfork_planner_lost_seconds_total"]


def test_refusals_faults_and_store_errors_are_counted() -> None:
    """Rejected requests, faults, quarantines, batch sizes and store errors are counted."""
    metrics = Metrics()
    for slug in ("unauthorized", "too-many-requests", "too-many-requests"):
        metrics.request_refused(slug)
    metrics.fault(fault("s", "SourceCorrupt"))
    metrics.quarantined()
    metrics.planned(3)
    metrics.store_conflict()
    metrics.store_unavailable()
    samples = exported_samples(metrics)
    assert {"unauthorized": 1.0, "too-many-requests": 2.0} == nonzero_with_prefix(
        samples, "rfork_planner_refused_requests_total reason="
    )
    assert {"error=SourceCorrupt fault=source": 1.0} == nonzero_with_prefix(
        samples, "rfork_planner_source_faults_total "
    )
    assert 1.0 == samples["rfork_planner_quarantines_total"]
    assert 3.0 == samples["rfork_planner_plan_batch_size_sum"]
    assert 1.0 == samples["rfork_planner_store_conflicts_total"]
    assert 1.0 == samples["rfork_planner_store_unavailable_total"]


def test_labels_have_few_values() -> None:
    """A thousand invented names add only one series each."""
    metrics = Metrics()

    def send(word: str) -> None:
        metrics.request_refused(word)
        metrics.fault(fault("s", word))
        metrics.ended(finish("fallback", fallback=word, reasons=(f"{word}: {word}",), sources={word: 1, f"{word}:": 1}))

    send("first")
    before = set(exported_samples(metrics))
    for number in range(1000):
        send(f"word-{number}")
    assert before == set(exported_samples(metrics))


@pytest.mark.parametrize(
    ("changes", "counted"),
    [
        ({"sources": {"s": -5}}, 0.0),
        ({"sources": {"s": 10**400}}, float(1 << 60)),
        ({"efficiency": float("inf")}, 0.0),
    ],
)
def test_invalid_numbers_do_not_break_counters(changes: dict[str, object], counted: float) -> None:
    """A counter never decreases, and one caller cannot make it infinite."""
    metrics = Metrics()
    metrics.ended(finish().model_copy(update=changes))
    samples = exported_samples(metrics)
    assert counted == samples["rfork_planner_verified_bytes_total source=peer"]
    assert 0.0 == samples["rfork_planner_fork_efficiency_count"]


def test_counters_start_at_zero() -> None:
    """An alert on an increase sees the first event too."""
    samples = exported_samples(Metrics())
    names = [f"rfork_planner_refused_requests_total reason={reason}" for reason in REFUSALS]
    names += [
        f"rfork_planner_forks_total outcome={word}"
        for word in ("forked", "fallback", "failed", "interrupted", "abandoned")
    ]
    names += [
        f"rfork_planner_verified_bytes_total source={type_name}"
        for type_name in ("peer", "snapshot", "checkpoint", "loader")
    ]
    assert [0.0] * len(names) == [samples.get(name) for name in names]


def test_names_and_help_follow_prometheus_conventions() -> None:
    """Every metric has help, counters end in _total, and names include units."""
    text = Metrics().exposition((), ()).decode()
    types = dict(re.findall(r"^# TYPE (rfork_planner_\w+) (\w+)$", text, re.MULTILINE))
    helped = dict(re.findall(r"^# HELP (rfork_planner_\w+) (.+)$", text, re.MULTILINE))
    counters = {name for name, type_name in types.items() if type_name == "counter"}
    assert set(types) == set(helped)
    assert set() == {name for name in counters if not name.endswith("_total")}


def test_process_metrics_are_exported() -> None:
    """Memory, CPU time and open files have the usual names."""
    names = {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"}
    assert names <= set(exported_samples(Metrics()))


def test_routes_are_counted_by_preferred_transport() -> None:
    """Unknown names are `other`; routes that run kernels are also counted separately."""
    metrics = Metrics()
    for transports in (("shared_memory", "http"), ("nccl",), ("nccl", "gloo"), ("x" * 200,), ()):
        metrics.route_planned(transports)
    samples = exported_samples(metrics)
    assert {"shared_memory": 1.0, "nccl": 2.0, "other": 2.0} == nonzero_with_prefix(
        samples, "rfork_planner_routes_total transport="
    )
    assert 2.0 == samples["rfork_planner_kernel_routes_total"]

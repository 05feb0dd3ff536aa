from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from planner.metrics import REFUSALS, Metrics
from planner.store.records import ForkRecord, InstanceRecord, RouteRecord
from rfork.schema import ForkResult, Rank, StorageAssignment
from rfork.schema.types import InstanceState
from tests.unit.planner.builders import fault, seed_report

ALL_CHUNKS = ((0, 12),)


def exported_samples(
    metrics: Metrics, instances: tuple[InstanceRecord, ...] = (), live: tuple[ForkRecord, ...] = ()
) -> Mapping[str, float]:
    """Each sample by its name and labels, as Prometheus reads them."""
    text = metrics.exposition(instances, live).decode()
    return {
        sample.name + "".join(f" {name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def nonzero_with_prefix(samples: Mapping[str, float], prefix: str) -> dict[str, float]:
    """The samples above 0 whose names begin so, without that beginning."""
    return {name.removeprefix(prefix): value for name, value in samples.items() if name.startswith(prefix) and value}


def instance(state: InstanceState, *, drained: bool = False) -> InstanceRecord:
    """One that reported this state."""
    return InstanceRecord(seed_report("i", state=state), seen_at=0.0, ttl_s=20.0, drained=drained)


def fork(*reads: str, storage: tuple[StorageAssignment, ...] = ()) -> ForkRecord:
    """A fork under way that reads from these."""
    return ForkRecord(
        fork_id="f", instance_id="t", model="m", rank=Rank(), chunk_count=12, image_bytes=12,
        requested_at=0.0, planned_at=0.0, seen_at=0.0, storage=storage,
        reads=tuple(RouteRecord(name, ALL_CHUNKS, ("http",), 0) for name in reads),
    )  # fmt: skip


def finish(outcome: str = "forked", **changes: object) -> ForkResult:
    """How a fork ended."""
    return ForkResult.model_validate({"outcome": outcome, "seconds": 1, "bytes_read": 1} | changes)


def test_instances_are_counted_by_state() -> None:
    """One that was drained through the planner counts as draining, whatever it reports."""
    instances = (
        instance("serving"),
        instance("serving"),
        instance("loading"),
        instance("serving", drained=True),
    )
    assert {"serving": 2.0, "loading": 1.0, "draining": 1.0} == nonzero_with_prefix(
        exported_samples(Metrics(), instances), "rfork_planner_instances state="
    )


def test_live_forks_are_counted_by_what_they_do() -> None:
    """Those that wait for a plan, those that run, their leases, and who is elected to read storage."""
    snapshot = StorageAssignment(kind="snapshot", uri="file:///s", chunks=((0, 6),))
    rest = StorageAssignment(kind="snapshot", uri="file:///s", chunks=((8, 9),))
    loader = StorageAssignment(kind="loader", chunks=ALL_CHUNKS)
    forks = (fork(), fork("a", "b"), fork("a", storage=(snapshot, rest)), fork(storage=(loader,)))
    samples = exported_samples(Metrics(), live=forks)
    assert ({"planning": 1.0, "running": 3.0}, 3.0, {"snapshot": 1.0, "loader": 1.0}) == (
        nonzero_with_prefix(samples, "rfork_planner_live_forks state="),
        samples["rfork_planner_active_leases"],
        nonzero_with_prefix(samples, "rfork_planner_storage_readers kind="),
    )


def test_gauges_fall_again() -> None:
    """What is gone at the next look is 0, not what it was."""
    metrics = Metrics()
    loader = StorageAssignment(kind="loader", chunks=ALL_CHUNKS)
    exported_samples(metrics, (instance("serving"),), (fork("a", storage=(loader,)),))
    samples = exported_samples(metrics)
    names = ("instances state=", "live_forks state=", "active_leases", "storage_readers kind=")
    assert [{}, {}, {}, {}] == [nonzero_with_prefix(samples, f"rfork_planner_{name}") for name in names]


def test_storage_egress_is_told_from_what_was_forked() -> None:
    """Verified bytes by the kind of their source; every instance is a peer."""
    metrics = Metrics()
    metrics.ended(finish(sources={"seed-1": 5, "seed-2": 7, "snapshot:s3://b/m": 3, "loader:": 2}))
    metrics.ended(finish(sources={"checkpoint:file:///m": 11}))
    assert {"peer": 12.0, "snapshot": 3.0, "loader": 2.0, "checkpoint": 11.0} == nonzero_with_prefix(
        exported_samples(metrics), "rfork_planner_verified_bytes_total source="
    )


def test_the_first_of_a_version_is_a_fallback_for_a_reason_of_its_own() -> None:
    """Each rollout to new weights has one, of which no alert is raised."""
    metrics = Metrics()
    reason = "NoSource: first of version v2 of model m; 4 instances serve v1"
    metrics.ended(finish("fallback", fallback="loader", reasons=(reason,)))
    found = nonzero_with_prefix(exported_samples(metrics), "rfork_planner_fallbacks_total ")
    assert {"fallback=loader reason=FirstOfVersion": 1.0} == found


def test_outcomes_fallbacks_and_efficiency_of_ended_forks() -> None:
    """A fallback is told with the last error before it; only forks that say it count for efficiency."""
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
    assert (1.0, 0.0, 1.0) == (
        samples["rfork_planner_fork_efficiency_count"],
        samples["rfork_planner_fork_efficiency_bucket le=0.9"],
        samples["rfork_planner_fork_efficiency_bucket le=0.95"],
    )


def test_the_first_of_a_version_is_a_fallback_of_its_own_kind() -> None:
    """Alerts leave it out: a rollout of new weights begins with it."""
    metrics = Metrics()
    first = "NoSource: first of version v2 of model m; 4 instances serve v1"
    several = "NoSource: 2 versions of m are served (v1, v2) and this target states none: set RFORK_VERSION"
    for reason in (first, several):
        metrics.ended(finish("fallback", fallback="checkpoint:file:///m", reasons=(reason,)))
    expected = {
        "fallback=checkpoint reason=FirstOfVersion": 1.0,
        "fallback=checkpoint reason=NoSource": 1.0,
    }
    assert expected == nonzero_with_prefix(exported_samples(metrics), "rfork_planner_fallbacks_total ")


def test_the_time_that_forks_took() -> None:
    """By outcome and origin, and by phase; a phase that nobody knows is `other`."""
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
    assert (4.0, 1.5) == (
        samples["rfork_planner_saved_seconds_total"],
        samples["rfork_planner_lost_seconds_total"],
    )


def test_what_guards_the_routes_is_counted() -> None:
    """Requests turned away by reason; faults, quarantines; plans made together; the store's troubles."""
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
    assert [1.0, 3.0, 1.0, 1.0] == [
        samples[f"rfork_planner_{name}"]
        for name in (
            "quarantines_total",
            "plan_forks_sum",
            "store_conflicts_total",
            "store_unavailable_total",
        )
    ]


def test_labels_stay_few_whatever_callers_send() -> None:
    """A thousand invented names make not one sample more than the first did."""
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
def test_a_number_that_makes_no_sense_breaks_no_counter(changes: dict[str, object], counted: float) -> None:
    """A counter cannot fall, and one caller cannot make it infinite."""
    metrics = Metrics()
    metrics.ended(finish().model_copy(update=changes))
    samples = exported_samples(metrics)
    assert (counted, 0.0) == (
        samples["rfork_planner_verified_bytes_total source=peer"],
        samples["rfork_planner_fork_efficiency_count"],
    )


def test_what_has_not_happened_is_zero_and_not_missing() -> None:
    """An alert on a rise sees the first one too."""
    samples = exported_samples(Metrics())
    names = [f"rfork_planner_refused_requests_total reason={reason}" for reason in REFUSALS]
    names += [
        f"rfork_planner_forks_total outcome={word}" for word in ("forked", "fallback", "failed", "interrupted", "lost")
    ]
    names += [
        f"rfork_planner_verified_bytes_total source={type_name}"
        for type_name in ("peer", "snapshot", "checkpoint", "loader")
    ]
    assert [0.0] * len(names) == [samples.get(name) for name in names]


def test_names_and_help_are_as_prometheus_wants_them() -> None:
    """Every metric of the planner has help, counters end in _total, and names say their unit."""
    text = Metrics().exposition((), ()).decode()
    types = dict(re.findall(r"^# TYPE (rfork_planner_\w+) (\w+)$", text, re.MULTILINE))
    helped = dict(re.findall(r"^# HELP (rfork_planner_\w+) (.+)$", text, re.MULTILINE))
    counters = {name for name, type_name in types.items() if type_name == "counter"}
    assert (set(types), set()) == (set(helped), {name for name in counters if not name.endswith("_total")})


def test_the_process_itself_is_told_of() -> None:
    """Memory, processor time and open files, under the names that dashboards know."""
    names = {"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds"}
    assert names <= set(exported_samples(Metrics()))


def test_routes_are_counted_by_the_transport_that_is_tried_first() -> None:
    """A name that nobody knows is "other"; those that run kernels are counted once more."""
    metrics = Metrics()
    for transports in (("shared_memory", "http"), ("nccl",), ("nccl", "gloo"), ("x" * 200,), ()):
        metrics.route_planned(transports)
    samples = exported_samples(metrics)
    assert ({"shared_memory": 1.0, "nccl": 2.0, "other": 2.0}, 2.0) == (
        nonzero_with_prefix(samples, "rfork_planner_routes_total transport="),
        samples["rfork_planner_kernel_routes_total"],
    )

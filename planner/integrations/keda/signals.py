"""Computes trigger readings from the planner's lists and the engines' metrics. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from planner.integrations.keda.triggers import Metric, Trigger
from rfork.schema import ForkInfo, InstanceInfo, ScaleUpInfo

METRIC_NAMES: Final[Mapping[Metric, tuple[str, ...]]] = {
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "kv_cache": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
}
"""Metric names in vLLM and SGLang, newest first. If a page has several, the first one counts."""
LINE_PREFIXES: Final = tuple(
    f"{name}{after}".encode() for names in METRIC_NAMES.values() for name in names for after in "{ "
)
"""Prefixes of the lines that contain these metrics. A page has thousands of other lines."""
RANK_LABELS: Final = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
"""Labels that distinguish the ranks of one scheduler."""

MAX_SAMPLES: Final = 4000
MAX_SAMPLE_BYTES: Final = 4096
"""Limits for one page: a broken page must not delay all other triggers by seconds."""

MetricPage = Mapping[Metric, float]
"""Metrics of one engine."""


@dataclass(frozen=True, slots=True)
class EngineReports:
    """Result of polling the engines of one model once."""

    reported: Mapping[str, MetricPage]
    """By host."""
    silent: Mapping[str, str]
    """By host: the reason why a serving engine returned no metrics."""
    loading_ranks: int = 0
    """Number of ranks that are loading their weights."""


@dataclass(frozen=True, slots=True)
class TriggerReading:
    """Value and state of a trigger."""

    value: float
    """Total over all replicas. KEDA and the HPA divide it by `target`."""
    active: bool
    """False: KEDA may scale to zero."""


@dataclass(frozen=True, slots=True)
class AnnouncedReplicas:
    """The largest scale-up that is still missing replicas."""

    replicas: int = 0
    """Number of announced replicas."""
    missing: int = 0
    """Number of these that have not arrived."""


NO_SCALEUP: Final = AnnouncedReplicas()


class MetricUnavailable(Exception):
    """Engines serve, but none of them reports the metric: its value is unknown, which is not zero."""


def parse_metrics(body: bytes) -> MetricPage:
    """Parse an engine's ``/metrics``. Missing metrics are left out. Raises ValueError.

    Label sets (data-parallel engines of one server) are summed; the usage of the KV cache is averaged.
    """
    lines = [line for line in body.split(b"\n") if line.startswith(LINE_PREFIXES)]
    if len(lines) > MAX_SAMPLES or any(len(line) > MAX_SAMPLE_BYTES for line in lines):
        raise ValueError(f"more than {MAX_SAMPLES} samples, or one of more than {MAX_SAMPLE_BYTES} bytes")
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        text = b"\n".join(lines).decode("utf-8", "replace")
        for family in text_string_to_metric_families(f"{text}\n"):
            for sample in family.samples:
                if 0 <= sample.value < math.inf:
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except IndexError as error:  # raised by the parser for some malformed lines
        raise ValueError(str(error)) from error
    page: dict[Metric, float] = {}
    for metric, names in METRIC_NAMES.items():
        found = next((samples[name] for name in names if name in samples), None)
        if found is not None:
            values = _totals(found)
            page[metric] = sum(values) / (len(values) if metric == "kv_cache" else 1)
    return page


def _totals(samples: list[tuple[Mapping[str, str], float]]) -> list[float]:
    """Return one total per scheduler.

    SGLang with priorities reports the total under ``priority=""`` in addition to one value per priority, and
    with ``--enable-metrics-for-all-schedulers`` all ranks of a scheduler report the same value.
    """
    unlabelled = [each for each in samples if not each[0].get("priority")] or samples
    schedulers: dict[frozenset[tuple[str, str]], float] = {}
    for labels, value in unlabelled:
        scheduler = frozenset(label for label in labels.items() if label[0] not in RANK_LABELS)
        schedulers[scheduler] = max(value, schedulers.get(scheduler, 0.0))
    return list(schedulers.values())


def engine_host(view: InstanceInfo) -> str:
    """Return the host of an instance's address; IPv6 addresses without brackets."""
    return view.report.address.rpartition(":")[0].strip("[]")


def engine_hosts(instances: Iterable[InstanceInfo]) -> tuple[str, ...]:
    """Return one host for each serving server.

    A server with several ranks, on any number of nodes, listens on the node of its first rank. Ranks of a
    speculative model have no server.
    """
    found = {
        engine_host(view)
        for view in instances
        if view.report.state == "serving"
        and (view.report.rank.role, view.report.rank.pp, view.report.rank.tp) == ("main", 0, 0)
    }
    return tuple(sorted(found - {""}))


def hosts_to_poll(
    known: Mapping[str, float], instances: Iterable[InstanceInfo], now: float, keep_s: float
) -> dict[str, float]:
    """Return for each host the time until which it is polled.

    There is no limit while it is listed as serving; afterwards it is polled for `keep_s` more.

    A planner that restarted lists instances only after their next heartbeats. Until then, an engine that
    responds still serves.
    """
    views = tuple(instances)
    listed = {engine_host(view) for view in views}
    unlisted = {host: min(until, now + keep_s) for host, until in known.items() if host not in listed}
    return {host: until for host, until in unlisted.items() if now < until} | dict.fromkeys(
        engine_hosts(views), math.inf
    )


def expected_replicas(scaleups: Iterable[ScaleUpInfo]) -> dict[str, AnnouncedReplicas]:
    """Return the announced replicas that have not arrived, by model.

    Only the largest scale-up counts: Pods that an autoscaler announced are announced by the controller again
    when it sees them, and a sum would request more Pods each time.
    """
    found: dict[str, AnnouncedReplicas] = {}
    for view in scaleups:
        replicas, missing = view.scaleup.replicas, view.scaleup.replicas - view.arrived_count
        if missing > 0:
            before = found.get(view.scaleup.model, NO_SCALEUP)
            found[view.scaleup.model] = AnnouncedReplicas(max(replicas, before.replicas), max(missing, before.missing))
    return found


def forking_ranks(forks: Iterable[ForkInfo]) -> Counter[str]:
    """Return the number of engines' ranks that are receiving their weights, by model."""
    return Counter(fork.model for fork in forks if fork.holder is None and fork.state in ("planning", "running"))


def scaleup_reading(trigger: Trigger, expected: AnnouncedReplicas) -> TriggerReading:
    """Reading of `expected`: the announced replicas until all have arrived. Active while one is missing."""
    return TriggerReading(float(expected.replicas), expected.missing > trigger.activation)


def fork_reading(trigger: Trigger, running: int) -> TriggerReading:
    """Reading of `forks`: the number of forks in progress."""
    return TriggerReading(float(running), running > trigger.activation)


def engine_reading(trigger: Trigger, engines: EngineReports) -> TriggerReading:
    """Reading of an engine metric while engines serve. Raises MetricUnavailable if none reports it.

    Silent engines are left out of a sum. For the usage of the KV cache, `activation` is compared with the
    average, and the value is the average times the number of engines, because the HPA divides by the number
    of replicas.
    """
    reported = [page[trigger.metric] for page in engines.reported.values() if trigger.metric in page]
    if not reported:
        names = " or ".join(METRIC_NAMES[trigger.metric])
        reason = {**dict.fromkeys(engines.reported, f"does not report {names}"), **engines.silent}
        raise MetricUnavailable(
            f"{trigger.metric} of {trigger.model} is unknown: {_listing(reason)}"
            + ("; SGLang reports metrics only if started with --enable-metrics" if engines.reported else "")
        )
    level = total = sum(reported)
    if trigger.metric == "kv_cache":
        level = total / len(reported)
        total = level * (len(engines.reported) + len(engines.silent))
    return TriggerReading(total, level > trigger.activation)


def reading_without_engines(expected: AnnouncedReplicas, loading: int) -> TriggerReading:
    """Reading of an engine metric when no engine serves: active if replicas are announced or loading."""
    return TriggerReading(0.0, expected.missing > 0 or loading > 0)


def loading_ranks(instances: Iterable[InstanceInfo]) -> int:
    """Return the number of ranks that are loading their weights."""
    return sum(view.report.state == "loading" for view in instances)


def _listing(reasons: Mapping[str, str], limit: int = 3) -> str:
    """Return the first few reasons as text."""
    named = [f"{host} {reason}" for host, reason in sorted(reasons.items())[:limit]]
    more = len(reasons) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more > 0 else "")

"""What is measured, out of what the planner lists and the engines tell. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from planner.integrations.keda.triggers import Metric, Trigger
from rfork.schema import ForkInfo, InstanceInfo, ScaleUpInfo

NAMES: Final[Mapping[Metric, tuple[str, ...]]] = {
    "waiting": ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "running": ("vllm:num_requests_running", "sglang:num_running_reqs"),
    "kv_cache": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
}
"""What vLLM and SGLang call it, the newest name first; of several on one page, the first counts."""
LINES: Final = tuple(f"{name}{after}".encode() for names in NAMES.values() for name in names for after in "{ ")
"""How the lines begin that say something of these; a page has thousands of others."""
RANKS: Final = frozenset({"tp_rank", "pp_rank", "moe_ep_rank"})
"""Labels that tell ranks of one scheduler apart."""

MAX_SAMPLES: Final = 4000
MAX_SAMPLE_BYTES: Final = 4096
"""Of what is read of one page: one that has gone wrong must not hold all other triggers for seconds."""

MetricPage = Mapping[Metric, float]
"""What one engine tells."""


@dataclass(frozen=True, slots=True)
class EngineReports:
    """What the engines of one model told at one look."""

    reported: Mapping[str, MetricPage]
    """By host."""
    silent: Mapping[str, str]
    """Why nothing is known of an engine that serves, by host."""
    loading_ranks: int = 0
    """Ranks that load their weights now."""


@dataclass(frozen=True, slots=True)
class TriggerReading:
    """The answer to a trigger."""

    value: float
    """Of all replicas together: KEDA and the HPA divide it by `target`."""
    active: bool
    """Whether there is anything to do; if not, KEDA may scale to zero."""


@dataclass(frozen=True, slots=True)
class AnnouncedReplicas:
    """The largest scale-up under way, of those that some replica is missing of."""

    replicas: int = 0
    """As announced."""
    missing: int = 0
    """Of these, those that have not come."""


NO_SCALEUP: Final = AnnouncedReplicas()


class MetricUnavailable(Exception):
    """Engines serve, and none of them says what is asked: a value is not known, which is not zero."""


def parse_metrics(body: bytes) -> MetricPage:
    """What an engine's ``/metrics`` says; a metric that is not there is left out. Raises ValueError.

    Label sets (data-parallel engines behind one server) are summed, of the KV cache's use averaged.
    """
    lines = [line for line in body.split(b"\n") if line.startswith(LINES)]
    if len(lines) > MAX_SAMPLES or any(len(line) > MAX_SAMPLE_BYTES for line in lines):
        raise ValueError(f"more than {MAX_SAMPLES} samples, or one of more than {MAX_SAMPLE_BYTES} bytes")
    samples: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    try:
        text = b"\n".join(lines).decode("utf-8", "replace")
        for family in text_string_to_metric_families(f"{text}\n"):
            for sample in family.samples:
                if 0 <= sample.value < math.inf:
                    samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except IndexError as error:  # the parser's way with some lines that are none
        raise ValueError(str(error)) from error
    page: dict[Metric, float] = {}
    for metric, names in NAMES.items():
        found = next((samples[name] for name in names if name in samples), None)
        if found is not None:
            values = _totals(found)
            page[metric] = sum(values) / (len(values) if metric == "kv_cache" else 1)
    return page


def _totals(samples: list[tuple[Mapping[str, str], float]]) -> list[float]:
    """Of each scheduler its total, once.

    SGLang with priorities tells the total under ``priority=""`` and each priority's part beside it; it can be
    told to have all ranks of one scheduler say the same (``--enable-metrics-for-all-schedulers``).
    """
    unlabelled = [each for each in samples if not each[0].get("priority")] or samples
    schedulers: dict[frozenset[tuple[str, str]], float] = {}
    for labels, value in unlabelled:
        scheduler = frozenset(label for label in labels.items() if label[0] not in RANKS)
        schedulers[scheduler] = max(value, schedulers.get(scheduler, 0.0))
    return list(schedulers.values())


def engine_host(view: InstanceInfo) -> str:
    """The host of an instance's address, an IPv6 address without brackets."""
    return view.report.address.rpartition(":")[0].strip("[]")


def engine_hosts(instances: Iterable[InstanceInfo]) -> tuple[str, ...]:
    """Where engines answer: one host for each server that serves.

    A server of many ranks, on however many nodes, listens where its first rank is. A draft has none.
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
    """Until when each host is asked: for ever while it is listed as serving, `ttl_s` more if nothing is.

    A planner that restarted knows nobody until their next heartbeats: they still serve, if they answer.
    """
    views = tuple(instances)
    listed = {engine_host(view) for view in views}
    unlisted = {host: min(until, now + keep_s) for host, until in known.items() if host not in listed}
    return {host: until for host, until in unlisted.items() if now < until} | dict.fromkeys(
        engine_hosts(views), math.inf
    )


def expected_replicas(scaleups: Iterable[ScaleUpInfo]) -> dict[str, AnnouncedReplicas]:
    """What is announced and has not come yet, by model.

    The largest, not the sum: Pods that an autoscaler announced are announced by the controller again when it
    sees them, and a sum of both would ask for more of them each time.
    """
    found: dict[str, AnnouncedReplicas] = {}
    for view in scaleups:
        replicas, missing = view.scaleup.replicas, view.scaleup.replicas - view.arrived_count
        if missing > 0:
            before = found.get(view.scaleup.model, NO_SCALEUP)
            found[view.scaleup.model] = AnnouncedReplicas(max(replicas, before.replicas), max(missing, before.missing))
    return found


def forking_ranks(forks: Iterable[ForkInfo]) -> Counter[str]:
    """Ranks that receive their weights now, by model."""
    return Counter(fork.model for fork in forks if fork.state in ("planning", "running"))


def scaleup_reading(trigger: Trigger, expected: AnnouncedReplicas) -> TriggerReading:
    """`expected`: as many replicas as were announced, until all of them came; active while one is missing."""
    return TriggerReading(float(expected.replicas), expected.missing > trigger.activation)


def fork_reading(trigger: Trigger, running: int) -> TriggerReading:
    """`forks`: those under way."""
    return TriggerReading(float(running), running > trigger.activation)


def engine_reading(trigger: Trigger, engines: EngineReports) -> TriggerReading:
    """A metric of engines, where some serve. Raises MetricUnavailable where none of these tells it.

    Silent ones are left out of a sum. Of the KV cache's use, `activation` is compared with the average, and
    the value is the average times the engines, which the HPA divides by the replicas again.
    """
    reported = [page[trigger.metric] for page in engines.reported.values() if trigger.metric in page]
    if not reported:
        names = " or ".join(NAMES[trigger.metric])
        reason = {**dict.fromkeys(engines.reported, f"tells no {names}"), **engines.silent}
        raise MetricUnavailable(
            f"{trigger.metric} of {trigger.model} is not known: {_listing(reason)}"
            + ("; SGLang tells metrics if it is started with --enable-metrics" if engines.reported else "")
        )
    level = total = sum(reported)
    if trigger.metric == "kv_cache":
        level = total / len(reported)
        total = level * (len(engines.reported) + len(engines.silent))
    return TriggerReading(total, level > trigger.activation)


def reading_without_engines(expected: AnnouncedReplicas, loading: int) -> TriggerReading:
    """A metric of engines, where none serves: there is something to do if replicas are announced, or load."""
    return TriggerReading(0.0, expected.missing > 0 or loading > 0)


def loading_ranks(instances: Iterable[InstanceInfo]) -> int:
    """Ranks that load their weights."""
    return sum(view.report.state == "loading" for view in instances)


def _listing(reasons: Mapping[str, str], limit: int = 3) -> str:
    """A few of them, for people."""
    named = [f"{host} {reason}" for host, reason in sorted(reasons.items())[:limit]]
    more = len(reasons) - len(named)
    return "; ".join(named) + (f"; and {more} more" if more > 0 else "")

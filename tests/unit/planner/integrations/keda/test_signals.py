"""Values of the scaler's metrics, from pages of engines and the planner's lists."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.integrations.keda import signals
from planner.integrations.keda.signals import (
    METRIC_NAMES,
    AnnouncedReplicas,
    EngineReports,
    MetricPage,
    MetricUnavailable,
    TriggerReading,
    parse_metrics,
)
from planner.integrations.keda.triggers import Trigger
from rfork.schema import InstanceInfo, Rank, ScaleUpInfo
from tests.unit.planner.integrations.keda.fakes import (
    MODEL,
    OLD_VLLM,
    SGLANG,
    SGLANG_PRIORITIES,
    VLLM,
    fork,
    instance,
    scaleup,
)

WAITING = Trigger(MODEL, "waiting", 10.0, port=8000)
KV_CACHE = Trigger(MODEL, "kv_cache", 0.8, activation=0.5, port=8000)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (VLLM, {"waiting": 20.0, "running": 7.0, "kv_cache": 0.5}),
        (OLD_VLLM, {"waiting": 2.0, "kv_cache": 0.0625}),
        (SGLANG, {"waiting": 5.0, "running": 9.0, "kv_cache": 0.28}),
        (SGLANG_PRIORITIES, {"waiting": 6.0}),
        # A release with both names: only the newer one counts.
        (
            'vllm:gpu_cache_usage_perc{a="b"} 0.1\nvllm:kv_cache_usage_perc{a="b"} 0.9\n',
            {"kv_cache": 0.9},
        ),
        ("vllm:num_requests_waiting 3\n", {"waiting": 3.0}),
        ("vllm:num_requests_waiting NaN\nvllm:num_requests_running -1\nsglang:token_usage +Inf\n", {}),
        ("", {}),
        ("<html>not found</html>", {}),
    ],
)
def test_pages_are_parsed(body: str, expected: MetricPage) -> None:
    """Label sets of one server are summed, cache usage is averaged, and missing metrics are left out."""
    assert expected == parse_metrics(body.encode())


@pytest.mark.parametrize(
    "line", ["sglang:num_running_reqs{,=\\{ee}{", "sglang:num_running_reqs{", "sglang:token_usage x"]
)
def test_malformed_lines_raise_value_error(line: str) -> None:
    """Every error of the parser is converted."""
    with pytest.raises(ValueError, match=r".+"):
        parse_metrics(line.encode())


@given(st.sampled_from(sorted(name for names in METRIC_NAMES.values() for name in names)), st.binary(max_size=60))
def test_any_page_results_in_values_or_value_error(name: str, rest: bytes) -> None:
    """Whatever follows a known name, the result is a value or a ValueError."""
    for between in (b" ", b"{", b'{a="'):
        try:
            page = parse_metrics(name.encode() + between + rest)
        except ValueError:
            continue
        assert all(value >= 0 for value in page.values())


@pytest.mark.parametrize(
    ("instances", "expected"),
    [
        ([instance("10.0.0.2"), instance("10.0.0.1")], ("10.0.0.1", "10.0.0.2")),
        ([instance("a"), instance("b", "loading"), instance("c", "draining")], ("a",)),
        # Two nodes of one replica, and a speculative model: one server.
        (
            [
                instance("a", rank=Rank(tp=0, tp_size=2)),
                instance("b", rank=Rank(tp=1, tp_size=2)),
                instance("a", rank=Rank(role="speculative")),
            ],
            ("a",),
        ),
        ([instance("a", rank=Rank(pp=0, pp_size=2)), instance("b", rank=Rank(pp=1, pp_size=2))], ("a",)),
        # Data-parallel ranks of one server share its host; other servers have their own.
        ([instance("a"), instance("a", rank=Rank(dp=1)), instance("b", rank=Rank(dp=2))], ("a", "b")),
        ([instance("fd00::1")], ("fd00::1",)),
        ([], ()),
    ],
)
def test_each_server_has_one_host(instances: list[InstanceInfo], expected: tuple[str, ...]) -> None:
    """The host of its first rank."""
    assert expected == signals.engine_hosts(instances)


def test_unlisted_hosts_are_polled_for_a_while() -> None:
    """Hosts that the planner stopped listing are polled a while longer. A draining host is listed."""
    first = signals.hosts_to_poll({}, [instance(host) for host in "abc"], now=100.0, keep_s=20.0)
    second = signals.hosts_to_poll(first, [instance("a"), instance("b", "draining")], now=500.0, keep_s=20.0)
    third = signals.hosts_to_poll(second, [instance("a")], now=519.0, keep_s=20.0)
    fourth = signals.hosts_to_poll(third, [], now=520.0, keep_s=20.0)
    assert {"a": inf, "b": inf, "c": inf} == first
    assert {"a": inf, "c": 520.0} == second
    assert {"a": inf, "c": 520.0} == third
    assert {"a": 540.0} == fourth


@pytest.mark.parametrize(
    ("reported", "silent", "trigger", "expected"),
    [
        ({"a": {"waiting": 4.0}, "b": {"waiting": 9.0}}, {}, WAITING, TriggerReading(13.0, True)),
        ({"a": {"waiting": 0.0}}, {}, WAITING, TriggerReading(0.0, False)),
        ({"a": {"waiting": 4.0}}, {"b": "is unreachable"}, WAITING, TriggerReading(4.0, True)),
        ({"a": {"waiting": 4.0}, "b": {"running": 9.0}}, {}, WAITING, TriggerReading(4.0, True)),
        # The average of two is 0.5. The HPA gets the sum and divides it by the number of replicas.
        ({"a": {"kv_cache": 0.75}, "b": {"kv_cache": 0.25}}, {}, KV_CACHE, TriggerReading(1.0, False)),
        (
            {"a": {"kv_cache": 0.75}},
            {"b": "is unreachable", "c": "is unreachable"},
            KV_CACHE,
            TriggerReading(2.25, True),
        ),
    ],
)
def test_responding_engines_are_summed(
    reported: dict[str, MetricPage], silent: dict[str, str], trigger: Trigger, expected: TriggerReading
) -> None:
    """The cache usage of silent engines is assumed to be the average of the others."""
    assert expected == signals.engine_reading(trigger, EngineReports(reported, silent))


@pytest.mark.parametrize(
    ("reported", "silent", "expected"),
    [
        (
            {},
            {"a": "is unreachable", "b": "is unreachable too"},
            "waiting of org/llama is unknown: a is unreachable; b is unreachable too",
        ),
        (
            {"a": {"running": 1.0}},
            {},
            "waiting of org/llama is unknown: "
            "a does not report vllm:num_requests_waiting or sglang:num_queue_reqs; "
            "SGLang reports metrics only if started with --enable-metrics",
        ),
        (
            {},
            dict.fromkeys("abcde", "is unreachable"),
            "waiting of org/llama is unknown: a is unreachable; b is unreachable; c is unreachable; and 2 more",
        ),
    ],
)
def test_without_any_value_the_metric_is_unavailable(
    reported: dict[str, MetricPage], silent: dict[str, str], expected: str
) -> None:
    """The result is an error with its reasons, not zero."""
    with pytest.raises(MetricUnavailable) as unknown:
        signals.engine_reading(WAITING, EngineReports(reported, silent))
    assert expected == str(unknown.value)


@pytest.mark.parametrize(
    ("scaleups", "expected"),
    [
        ([], {}),
        ([scaleup(3, 1)], {MODEL: AnnouncedReplicas(3, 2)}),
        ([scaleup(3, 3)], {}),
        # The same three Pods, announced by the autoscaler and by the controller.
        ([scaleup(3, 1), scaleup(2, 0, by="controller")], {MODEL: AnnouncedReplicas(3, 2)}),
        (
            [scaleup(3), scaleup(5, model="other")],
            {MODEL: AnnouncedReplicas(3, 3), "other": AnnouncedReplicas(5, 5)},
        ),
    ],
)
def test_the_largest_incomplete_scale_up_counts(
    scaleups: list[ScaleUpInfo], expected: dict[str, AnnouncedReplicas]
) -> None:
    """For each model, the largest scale-up that is missing replicas."""
    assert expected == signals.expected_replicas(scaleups)


@pytest.mark.parametrize(
    ("expected_replicas", "activation", "expected"),
    [
        (AnnouncedReplicas(3, 2), 0.0, TriggerReading(3.0, True)),
        (AnnouncedReplicas(3, 2), 2.0, TriggerReading(3.0, False)),
        (signals.NO_SCALEUP, 0.0, TriggerReading(0.0, False)),
    ],
)
def test_expected_replicas_count_until_the_last_has_arrived(
    expected_replicas: AnnouncedReplicas, activation: float, expected: TriggerReading
) -> None:
    """The value is the announced number until the last replica has arrived, so that the HPA scales up to it."""
    assert expected == signals.scaleup_reading(Trigger(MODEL, "expected", 1.0, activation), expected_replicas)


def test_only_forks_in_progress_count() -> None:
    """Finished forks do not count."""
    forks = [fork(1), fork(2, "planning"), fork(3, "finished"), fork(4, "failed"), fork(5, model="other")]
    running = signals.forking_ranks(forks)
    trigger = Trigger(MODEL, "forks", 1.0, activation=1.0)
    assert {MODEL: 2, "other": 1} == running
    assert TriggerReading(2.0, True) == signals.fork_reading(trigger, running[MODEL])


def test_the_forks_of_holders_do_not_count() -> None:
    """They are no replicas that start."""
    assert {MODEL: 1} == signals.forking_ranks([fork(1), fork(2).model_copy(update={"holder": "h"})])


@pytest.mark.parametrize(
    ("expected_replicas", "loading", "expected"),
    [(AnnouncedReplicas(2, 1), 0, True), (signals.NO_SCALEUP, 1, True), (signals.NO_SCALEUP, 0, False)],
)
def test_a_model_without_engines_has_the_value_zero(
    expected_replicas: AnnouncedReplicas, loading: int, expected: bool
) -> None:
    """The value is zero. The trigger is active while replicas are announced or loading."""
    assert TriggerReading(0.0, expected) == signals.reading_without_engines(expected_replicas, loading)

"""Parsing of a ScaledObject's trigger metadata."""

from __future__ import annotations

import pytest

from planner.integrations.keda.triggers import InvalidTrigger, Trigger, parse_trigger

REQUIRED_METADATA = {"model": "org/llama", "metric": "waiting", "target": "10", "port": "8000"}
MISSING = "`{}` is missing from the trigger's metadata: {}"


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (REQUIRED_METADATA, Trigger("org/llama", "waiting", 10.0, port=8000)),
        (
            {
                **REQUIRED_METADATA, "metric": "kv_cache", "target": " 0.8 ", "activation": "0.1",
                "path": "/stats/prometheus", "scheme": "https", "poll": "0.5",
            },
            Trigger("org/llama", "kv_cache", 0.8, 0.1, 8000, "/stats/prometheus", "https", 0.5),
        ),
        ({"model": "m", "metric": "expected"}, Trigger("m", "expected", 1.0)),
        ({"model": "m", "metric": "forks", "target": "2"}, Trigger("m", "forks", 2.0)),
        # An unused port is no error: triggers are often copied.
        ({**REQUIRED_METADATA, "metric": "forks", "port": "no"}, Trigger("org/llama", "forks", 10.0)),
        # KEDA passes all of the trigger's metadata, including its own keys.
        (
            {**REQUIRED_METADATA, "scalerAddress": "rfork:9444", "enableTLS": "true", "unsafeSsl": "false"},
            Trigger("org/llama", "waiting", 10.0, port=8000),
        ),
        (
            {"modelFromEnv": "org/llama", "metric": "waiting", "target": "10", "portFromEnv": "8000"},
            Trigger("org/llama", "waiting", 10.0, port=8000),
        ),
        ({**REQUIRED_METADATA, "modelFromEnv": "other"}, Trigger("org/llama", "waiting", 10.0, port=8000)),
    ],
)  # fmt: skip
def test_each_key_of_the_metadata_is_used(metadata: dict[str, str], expected: Trigger) -> None:
    """Each key is used, and missing ones get their default."""
    assert expected == parse_trigger(metadata)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": ""}, MISSING.format("model", "the model name that the instances report")),
        ({"model": "m" * 2000}, "`model` must have at most 1024 characters"),
        ({"metric": " "}, MISSING.format("metric", "one of waiting, running, kv_cache, forks, expected")),
        ({"metric": "queue"}, "`metric` must be one of waiting, running, kv_cache, forks, expected, not 'queue'"),
        ({"target": ""}, MISSING.format("target", "amount of the metric per replica")),
        ({"target": "0"}, "`target` must be a number from 0.001 to 1e+12, not '0'"),
        ({"target": "ten"}, "`target` must be a number from 0.001 to 1e+12, not 'ten'"),
        ({"target": "nan"}, "`target` must be a number from 0.001 to 1e+12, not 'nan'"),
        ({"target": "inf"}, "`target` must be a number from 0.001 to 1e+12, not 'inf'"),
        ({"activation": "-1"}, "`activation` must be a number from 0 to 1e+12, not '-1'"),
        ({"port": ""}, MISSING.format("port", "the engines' HTTP port, which serves /metrics")),
        ({"port": "0"}, "`port` must be a number from 1 to 65535, not '0'"),
        ({"port": "http"}, "`port` must be a number from 1 to 65535, not 'http'"),
        ({"port": "٨٠٠٠"}, "`port` must be a number from 1 to 65535, not '٨٠٠٠'"),
        ({"port": "9" * 5000}, f"`port` must be a number from 1 to 65535, not {'9' * 100!r}"),
        ({"path": "metrics"}, "`path` must begin with / and contain no space, ? or #, not 'metrics'"),
        ({"path": "/a?b=c"}, "`path` must begin with / and contain no space, ? or #, not '/a?b=c'"),
        ({"path": "/a b"}, "`path` must begin with / and contain no space, ? or #, not '/a b'"),
        ({"scheme": "grpc"}, "`scheme` must be http or https, not 'grpc'"),
        ({"poll": "0"}, "`poll` must be a number from 0.1 to 3600, not '0'"),
        ({"activaton": "3"}, "unknown metadata key `activaton`: did you mean `activation`?"),
        ({"Target": "3"}, "unknown metadata key `Target`: did you mean `target`?"),
    ],
)  # fmt: skip
def test_an_error_names_the_key_and_the_allowed_values(changes: dict[str, str], expected: str) -> None:
    """One sentence names the key and the allowed values."""
    with pytest.raises(InvalidTrigger) as refused:
        parse_trigger({**REQUIRED_METADATA, **changes})
    assert expected == str(refused.value)


def test_the_metric_name_is_valid_in_kubernetes() -> None:
    """Lower case, short, and unique per model and metric."""
    names = [
        parse_trigger({**REQUIRED_METADATA, "model": model, "metric": metric}).name
        for model, metric in (("org/llama", "kv_cache"), ("org/llama", "waiting"), ("Ünï/Modell", "waiting"))
    ]
    assert ["rfork-kv-cache-5bc623025e", "rfork-waiting-5bc623025e", "rfork-waiting-fec2c43661"] == names

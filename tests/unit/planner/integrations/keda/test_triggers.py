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
        # A port that is not needed is no error: one trigger is copied from another.
        ({**REQUIRED_METADATA, "metric": "forks", "port": "no"}, Trigger("org/llama", "forks", 10.0)),
        # KEDA hands all of the trigger's metadata on, its own keys too.
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
def test_metadata_that_can_be_used(metadata: dict[str, str], expected: Trigger) -> None:
    """Each key has its place, and those that are left out their default."""
    assert expected == parse_trigger(metadata)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model": ""}, MISSING.format("model", "the name that the model's instances report")),
        ({"model": "m" * 2000}, "`model` has at most 1024 characters"),
        ({"metric": " "}, MISSING.format("metric", "one of waiting, running, kv_cache, forks, expected")),
        ({"metric": "queue"}, "`metric` is one of waiting, running, kv_cache, forks, expected: not 'queue'"),
        ({"target": ""}, MISSING.format("target", "how much of it one replica is to have")),
        ({"target": "0"}, "`target` is a number from 0.001 to 1e+12: not '0'"),
        ({"target": "ten"}, "`target` is a number from 0.001 to 1e+12: not 'ten'"),
        ({"target": "nan"}, "`target` is a number from 0.001 to 1e+12: not 'nan'"),
        ({"target": "inf"}, "`target` is a number from 0.001 to 1e+12: not 'inf'"),
        ({"activation": "-1"}, "`activation` is a number from 0 to 1e+12: not '-1'"),
        ({"port": ""}, MISSING.format("port", "the engines' HTTP port, where they answer /metrics")),
        ({"port": "0"}, "`port` is a number from 1 to 65535: not '0'"),
        ({"port": "http"}, "`port` is a number from 1 to 65535: not 'http'"),
        ({"port": "٨٠٠٠"}, "`port` is a number from 1 to 65535: not '٨٠٠٠'"),
        ({"port": "9" * 5000}, f"`port` is a number from 1 to 65535: not {'9' * 100!r}"),
        ({"path": "metrics"}, "`path` begins with / and has no spaces, no ? and no #: not 'metrics'"),
        ({"path": "/a?b=c"}, "`path` begins with / and has no spaces, no ? and no #: not '/a?b=c'"),
        ({"path": "/a b"}, "`path` begins with / and has no spaces, no ? and no #: not '/a b'"),
        ({"scheme": "grpc"}, "`scheme` is http or https: not 'grpc'"),
        ({"poll": "0"}, "`poll` is a number from 0.1 to 3600: not '0'"),
        ({"activaton": "3"}, "`activaton` is no key of the metadata: write `activation`"),
        ({"Target": "3"}, "`Target` is no key of the metadata: write `target`"),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_used(changes: dict[str, str], expected: str) -> None:
    """One sentence names the key, and says what is allowed."""
    with pytest.raises(InvalidTrigger) as refused:
        parse_trigger({**REQUIRED_METADATA, **changes})
    assert expected == str(refused.value)


def test_the_name_is_one_for_kubernetes() -> None:
    """Lower case, short, and of one model and metric alone."""
    names = [
        parse_trigger({**REQUIRED_METADATA, "model": model, "metric": metric}).name
        for model, metric in (("org/llama", "kv_cache"), ("org/llama", "waiting"), ("Ünï/Modell", "waiting"))
    ]
    assert ["rfork-kv-cache-5bc623025e", "rfork-waiting-5bc623025e", "rfork-waiting-fec2c43661"] == names

"""What a trigger of a ScaledObject asks for, out of its metadata. Pure."""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

Metric = Literal["waiting", "running", "kv_cache", "forks", "expected"]
Scheme = Literal["http", "https"]

OF_ENGINES: Final[frozenset[Metric]] = frozenset({"waiting", "running", "kv_cache"})
"""Metrics that the engines tell; the planner knows the others."""
KEYS: Final = ("model", "metric", "target", "activation", "port", "path", "scheme", "poll")
FROM_ENVIRONMENT: Final = "FromEnv"
"""KEDA passes a key that ends so with the value that the variable has in the scaled container."""
PATH: Final = re.compile(r"/[!-\"$->@-~]{0,255}")
"""Of printable characters, without a query or a fragment."""
LONGEST_MODEL: Final = 1024
MOST_KEYS: Final = 100
"""Of the metadata: each that is not known is compared with those that are."""
SMALLEST: Final = 0.001
"""Kubernetes counts in thousandths."""
LARGEST: Final = 1e12


class BadTrigger(ValueError):
    """The metadata cannot be used; one sentence that names the key, and what is allowed."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """One trigger of a ScaledObject."""

    model: str
    metric: Metric
    target: float
    """How much of the metric one replica is to have."""
    activation: float = 0.0
    """There is something to do while the metric is above it."""
    port: int = 0
    """The engines' HTTP port; 0: the planner alone is asked."""
    path: str = "/metrics"
    scheme: Scheme = "http"
    poll: float = 2.0
    """Seconds between two looks, of a stream."""

    @property
    def name(self) -> str:
        """The metric's name in Kubernetes: lower case, and another for each model."""
        digest = hashlib.sha256(self.model.encode()).hexdigest()[:10]
        return f"rfork-{self.metric.replace('_', '-')}-{digest}"


def trigger_of(metadata: Mapping[str, str]) -> Trigger:
    """The trigger that the metadata describes. Raises BadTrigger.

    Keys that are KEDA's own are passed over, as are others that look like none of ours.
    """
    if len(metadata) > MOST_KEYS:
        raise BadTrigger(f"the metadata has {len(metadata)} keys: at most {MOST_KEYS} are read")
    given = {key: value.strip() for key, value in metadata.items() if key in KEYS and value.strip()}
    for key, value in metadata.items():
        plain = key.removesuffix(FROM_ENVIRONMENT)
        if plain != key and plain in KEYS and value.strip():
            given.setdefault(plain, value.strip())
        elif plain not in KEYS and (meant := difflib.get_close_matches(plain.lower(), KEYS, 1, 0.8)):
            raise BadTrigger(f"`{key}` is no key of the metadata: write `{meant[0]}`")
    model = _needed(given, "model", "the name that the model's instances report")
    if len(model) > LONGEST_MODEL:
        raise BadTrigger(f"`model` has at most {LONGEST_MODEL} characters")
    metric = _metric(_needed(given, "metric", f"one of {', '.join(get_args(Metric))}"))
    if metric == "expected":
        given.setdefault("target", "1")
    target = _number(_needed(given, "target", "how much of it one replica is to have"), "target", SMALLEST)
    port = 0
    if metric in OF_ENGINES:
        port = _port(_needed(given, "port", "the engines' HTTP port, where they answer /metrics"))
    path = given.get("path", "/metrics")
    if not PATH.fullmatch(path):
        raise BadTrigger(f"`path` begins with / and has no spaces, no ? and no #: not {path[:100]!r}")
    return Trigger(
        model=model,
        metric=metric,
        target=target,
        activation=_number(given.get("activation", "0"), "activation", 0.0),
        port=port,
        path=path,
        scheme=_scheme(given.get("scheme", "http")),
        poll=_number(given.get("poll", "2"), "poll", 0.1, 3600.0),
    )


def _needed(given: Mapping[str, str], key: str, what: str) -> str:
    if key not in given:
        raise BadTrigger(f"`{key}` is missing from the trigger's metadata: {what}")
    return given[key]


def _metric(value: str) -> Metric:
    for known in get_args(Metric):
        if value == known:
            found: Metric = known
            return found
    raise BadTrigger(f"`metric` is one of {', '.join(get_args(Metric))}: not {value[:100]!r}")


def _scheme(value: str) -> Scheme:
    if value == "http":
        return "http"
    if value == "https":
        return "https"
    raise BadTrigger(f"`scheme` is http or https: not {value[:100]!r}")


def _number(value: str, key: str, least: float, most: float = LARGEST) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not least <= number <= most:  # neither is NaN
        raise BadTrigger(f"`{key}` is a number from {least:g} to {most:g}: not {value[:100]!r}")
    return number


def _port(value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 5 and 1 <= int(value) <= 65535):
        raise BadTrigger(f"`port` is a number from 1 to 65535: not {value[:100]!r}")
    return int(value)

"""Parses the metadata of a ScaledObject's trigger. Pure."""

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

ENGINE_METRICS: Final[frozenset[Metric]] = frozenset({"waiting", "running", "kv_cache"})
"""Metrics read from the engines. All others come from the planner."""
KEYS: Final = ("model", "metric", "target", "activation", "port", "path", "scheme", "poll")
FROM_ENVIRONMENT: Final = "FromEnv"
"""For a key with this suffix, KEDA passes the value of that environment variable of the scaled container."""
PATH: Final = re.compile(r"/[!-\"$->@-~]{0,255}")
"""Printable characters, without a query or a fragment."""
MAX_MODEL_CHARS: Final = 1024
MAX_KEYS: Final = 100
"""Maximum number of metadata keys: each unknown key is compared with all known ones."""
MIN_TARGET: Final = 0.001
"""Kubernetes counts in thousandths."""
MAX_NUMBER: Final = 1e12


class InvalidTrigger(ValueError):
    """The metadata is invalid. The text is one sentence that names the key and the allowed values."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """One trigger of a ScaledObject."""

    model: str
    metric: Metric
    target: float
    """Amount of the metric per replica."""
    activation: float = 0.0
    """The trigger is active while the metric is above this value."""
    port: int = 0
    """The engines' HTTP port. 0: only the planner is polled."""
    path: str = "/metrics"
    scheme: Scheme = "http"
    poll: float = 2.0
    """Poll interval of a stream, in seconds."""

    @property
    def name(self) -> str:
        """Name of the metric in Kubernetes: lower case and unique per model."""
        digest = hashlib.sha256(self.model.encode()).hexdigest()[:10]
        return f"rfork-{self.metric.replace('_', '-')}-{digest}"


def parse_trigger(metadata: Mapping[str, str]) -> Trigger:
    """Parse the metadata of a trigger. Raises InvalidTrigger.

    KEDA's own keys are ignored, as are unknown keys that do not resemble a known one.
    """
    if len(metadata) > MAX_KEYS:
        raise InvalidTrigger(f"the metadata has {len(metadata)} keys; the maximum is {MAX_KEYS}")
    values = {key: value.strip() for key, value in metadata.items() if key in KEYS and value.strip()}
    for key, value in metadata.items():
        plain = key.removesuffix(FROM_ENVIRONMENT)
        if plain != key and plain in KEYS and value.strip():
            values.setdefault(plain, value.strip())
        elif plain not in KEYS and (suggestion := difflib.get_close_matches(plain.lower(), KEYS, 1, 0.8)):
            raise InvalidTrigger(f"unknown metadata key `{key}`: did you mean `{suggestion[0]}`?")
    model = _require(values, "model", "the model name that the instances report")
    if len(model) > MAX_MODEL_CHARS:
        raise InvalidTrigger(f"`model` must have at most {MAX_MODEL_CHARS} characters")
    metric = _metric(_require(values, "metric", f"one of {', '.join(get_args(Metric))}"))
    if metric == "expected":
        values.setdefault("target", "1")
    target = _number(_require(values, "target", "amount of the metric per replica"), "target", MIN_TARGET)
    port = 0
    if metric in ENGINE_METRICS:
        port = _port(_require(values, "port", "the engines' HTTP port, which serves /metrics"))
    path = values.get("path", "/metrics")
    if not PATH.fullmatch(path):
        raise InvalidTrigger(f"`path` must begin with / and contain no space, ? or #, not {path[:100]!r}")
    return Trigger(
        model=model,
        metric=metric,
        target=target,
        activation=_number(values.get("activation", "0"), "activation", 0.0),
        port=port,
        path=path,
        scheme=_scheme(values.get("scheme", "http")),
        poll=_number(values.get("poll", "2"), "poll", 0.1, 3600.0),
    )


def _require(values: Mapping[str, str], key: str, what: str) -> str:
    if key not in values:
        raise InvalidTrigger(f"`{key}` is missing from the trigger's metadata: {what}")
    return values[key]


def _metric(value: str) -> Metric:
    for known in get_args(Metric):
        if value == known:
            found: Metric = known
            return found
    raise InvalidTrigger(f"`metric` must be one of {', '.join(get_args(Metric))}, not {value[:100]!r}")


def _scheme(value: str) -> Scheme:
    if value == "http":
        return "http"
    if value == "https":
        return "https"
    raise InvalidTrigger(f"`scheme` must be http or https, not {value[:100]!r}")


def _number(value: str, key: str, min_value: float, max_value: float = MAX_NUMBER) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not min_value <= number <= max_value:  # also rejects NaN
        raise InvalidTrigger(f"`{key}` must be a number from {min_value:g} to {max_value:g}, not {value[:100]!r}")
    return number


def _port(value: str) -> int:
    if not (value.isascii() and value.isdigit() and len(value) <= 5 and 1 <= int(value) <= 65535):
        raise InvalidTrigger(f"`port` must be a number from 1 to 65535, not {value[:100]!r}")
    return int(value)

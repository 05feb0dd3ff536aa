"""Parsing of Pods: the engine's probe and the times of conditions."""

from __future__ import annotations

from typing import Any

import pytest

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.cluster import parse_pod

Document = dict[str, Any]
PROBE = {"httpGet": {"path": "/health", "port": 8000}}
CHANGED = [{"name": "RFORK_REPLICA", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}]


def document(*containers: Document, annotations: dict[str, str] | None = None, **status: object) -> Document:
    """Return a Pod as sent by the API server."""
    return {
        "metadata": {
            "namespace": "default",
            "name": "llama",
            "uid": "u",
            "creationTimestamp": "1970-01-01T00:01:00Z",
            "annotations": annotations,
        },
        "spec": {"containers": list(containers)},
        "status": status,
    }


def container(name: str = "engine", **more: object) -> Document:
    return {"name": name, **more}


@pytest.mark.parametrize(
    ("containers", "annotations", "expected"),
    [
        pytest.param([container()], {}, False, id="none"),
        pytest.param([container(livenessProbe=PROBE)], {}, False, id="a liveness probe does not count"),
        pytest.param([container(readinessProbe=PROBE)], {}, True, id="readiness"),
        pytest.param([container(startupProbe=PROBE)], {}, True, id="startup"),
        pytest.param([container(), container("side", readinessProbe=PROBE)], {}, True, id="any container"),
        pytest.param(
            [container(env=CHANGED), container("side", readinessProbe=PROBE)], {}, False,
            id="only the injected container counts",
        ),
        pytest.param(
            [container("a", readinessProbe=PROBE), container("b")], {names.CONTAINER: "a"}, True,
            id="the named container",
        ),
        pytest.param(
            [container("a"), container("b", readinessProbe=PROBE, env=CHANGED)], {names.CONTAINER: "a"},
            False,
            id="only the named container counts",
        ),
        pytest.param(
            [container(readinessProbe=PROBE)], {names.CONTAINER: "gone"}, True, id="an unknown name",
        ),
        pytest.param([], None, False, id="no container"),
    ],
)  # fmt: skip
def test_the_probe_of_the_engines_container_counts(
    containers: list[Document], annotations: dict[str, str] | None, expected: bool
) -> None:
    """A readinessProbe or a startupProbe of its container; of any container if the engine's is unknown."""
    assert expected == parse_pod(document(*containers, annotations=annotations)).has_readiness_probe


@pytest.mark.parametrize(
    ("status", "since", "expected"),
    [("True", "1970-01-01T00:02:00Z", 120.0), ("False", "1970-01-01T00:02:00Z", None), ("True", None, None)],
)
def test_only_a_true_condition_has_a_transition_time(status: str, since: str | None, expected: float | None) -> None:
    """Only if the condition is True and has a time."""
    conditions = [
        {"type": condition_type, "status": status, "lastTransitionTime": since}
        for condition_type in ("ContainersReady", "PodScheduled")
    ]
    seen = parse_pod(document(container(), conditions=conditions))
    assert expected == seen.containers_ready_at
    assert expected == seen.scheduled_at

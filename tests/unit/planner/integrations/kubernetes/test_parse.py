from __future__ import annotations

from typing import Any

import pytest

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.parse import parse_pod

Document = dict[str, Any]
PROBE = {"httpGet": {"path": "/health", "port": 8000}}
CHANGED = [{"name": "RFORK_REPLICA", "valueFrom": {"fieldRef": {"fieldPath": "metadata.uid"}}}]


def document(*containers: Document, annotations: dict[str, str] | None = None, **status: object) -> Document:
    """A Pod as the API server tells of it."""
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
        pytest.param([container(livenessProbe=PROBE)], {}, False, id="liveness holds nothing back"),
        pytest.param([container(readinessProbe=PROBE)], {}, True, id="readiness"),
        pytest.param([container(startupProbe=PROBE)], {}, True, id="startup"),
        pytest.param([container(), container("side", readinessProbe=PROBE)], {}, True, id="any of them"),
        pytest.param(
            [container(env=CHANGED), container("side", readinessProbe=PROBE)], {}, False,
            id="not that of the one that the webhook changed",
        ),
        pytest.param(
            [container("a", readinessProbe=PROBE), container("b")], {names.CONTAINER: "a"}, True,
            id="the one named",
        ),
        pytest.param(
            [container("a"), container("b", readinessProbe=PROBE, env=CHANGED)], {names.CONTAINER: "a"},
            False,
            id="not that of another than is named",
        ),
        pytest.param(
            [container(readinessProbe=PROBE)], {names.CONTAINER: "gone"}, True, id="nobody has that name",
        ),
        pytest.param([], None, False, id="no container"),
    ],
)  # fmt: skip
def test_whether_somebody_asks_the_engine(
    containers: list[Document], annotations: dict[str, str] | None, expected: bool
) -> None:
    """A readinessProbe or a startupProbe of its container; of any where nobody knows which that is."""
    assert expected == parse_pod(document(*containers, annotations=annotations)).has_readiness_probe


@pytest.mark.parametrize(
    ("status", "since", "expected"),
    [("True", "1970-01-01T00:02:00Z", 120.0), ("False", "1970-01-01T00:02:00Z", None), ("True", None, None)],
)
def test_since_when_conditions_hold(status: str, since: str | None, expected: float | None) -> None:
    """Only while they are True, and where somebody says since when."""
    conditions = [
        {"type": condition_type, "status": status, "lastTransitionTime": since}
        for condition_type in ("ContainersReady", "PodScheduled")
    ]
    seen = parse_pod(document(container(), conditions=conditions))
    assert (expected, expected) == (seen.containers_ready_at, seen.scheduled_at)

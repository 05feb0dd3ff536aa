"""Pods that are injected a second time, after changes by other webhooks."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as trying
from hypothesis import strategies as st

import rfork
from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.inject import inject
from rfork.settings import KubernetesSettings
from tests.unit.planner.integrations.kubernetes.injected_pods import inject_pod, injected_pod, request_of
from tests.unit.planner.integrations.kubernetes.pod_documents import (
    PLANNER,
    SETTINGS,
    Document,
    container,
    defaulted,
    labelled_pods,
    pod,
    webhook_settings,
)


def test_the_grace_period_is_extended_once() -> None:
    """The server keeps its original time to shut down, even if the webhook is called again."""
    once = injected_pod(pod(terminationGracePeriodSeconds=600))
    again = injected_pod(defaulted(once))
    assert (660, 660) == tuple(each["spec"]["terminationGracePeriodSeconds"] for each in (once, again))


def test_a_previous_rejection_is_removed() -> None:
    """A Pod that was copied from a rejected one and fixed."""
    made = injected_pod(pod(annotations={names.REJECTED: "no", names.NOTES: "stale"}))
    assert {names.INJECTED: rfork.__version__} == made["metadata"]["annotations"]


def modified_by_others(document: Document) -> Document:
    """Change the document as another webhook does: defaults, a sidecar, variables, mounts, a label."""
    made = defaulted(copy.deepcopy(document))
    spec = made["spec"]
    for key in ("containers", "initContainers", "volumes"):
        spec[key] = spec.get(key) or []
    for each in spec["containers"]:
        each["env"] = [{"name": "FIRST", "value": "1"}, *(each.get("env") or []), {"name": "LAST"}]
        each["volumeMounts"] = [*(each.get("volumeMounts") or []), {"name": "mesh", "mountPath": "/mesh"}]
    spec["containers"].insert(0, {"name": "mesh", "image": "mesh:1", "args": ["proxy"]})
    spec["initContainers"].insert(0, {"name": "mesh-init", "image": "mesh:1"})
    spec["volumes"].insert(0, {"name": "mesh", "emptyDir": {}})
    made["metadata"]["labels"]["mesh"] = "on"
    made["metadata"]["annotations"]["kubectl.kubernetes.io/default-container"] = "engine"
    return made


@pytest.mark.parametrize("files", ["none", "init", "image"])
@pytest.mark.parametrize(
    "document",
    [
        pod(),
        pod(container(image="vllm/vllm-openai:v1", args=["m"])),
        pod(container(args=["m"]), annotations={names.ENGINE: "sglang", names.SAME_HOST: "ipc"}),
        pod(container(env=[{"name": "RFORK_MODEL", "value": "x"}, {"name": "PYTHONPATH", "value": "/a"}])),
        pod(container(lifecycle={"preStop": {"exec": {"command": ["sleep", "1"]}}})),
    ],
)
def test_a_second_call_changes_nothing(document: Document, files: str) -> None:
    """Even after another webhook and the API server's defaults."""
    settings = webhook_settings(injection_mode=files, tls_secret="mtls", same_host=True)
    between = modified_by_others(inject_pod(document, settings)[0])
    assert (between, ()) == inject_pod(between, settings)


@trying(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(labelled_pods(), SETTINGS, st.booleans(), st.booleans())
def test_injection_is_idempotent(document: Document, settings: KubernetesSettings, led: bool, led_later: bool) -> None:
    """For any Pod that can be injected, with or without a leader; the input is not modified."""
    document = json.loads(json.dumps(document))  # without shared lists
    found = request_of(document)
    assume(found is not None)
    assert found is not None
    kept = copy.deepcopy(document)
    once, _ = inject(document, found, settings, PLANNER, has_leader=led)
    again = request_of(once)
    assert again is not None
    twice, notes = inject(once, again, settings, PLANNER, has_leader=led_later)
    assert kept == document
    assert once == twice
    assert () == notes

"""Pods that are changed a second time, by this webhook or by others between."""

from __future__ import annotations

import copy
import json

import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as trying
from hypothesis import strategies as st

import rfork
from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.mutate import mutated
from planner.hooks.kubernetes.pods import Wanted, wanted
from rfork.settings import HookSettings
from tests.unit.hooks.kubernetes.changed import change, injected
from tests.unit.hooks.kubernetes.documents import (
    PLANNER,
    SETTINGS,
    Document,
    container,
    defaulted,
    hook,
    labelled_pods,
    pod,
)


def test_the_grace_period_grows_by_the_drain_once() -> None:
    """What the server had to end in is left to it, also when the webhook is called again."""
    once = injected(pod(terminationGracePeriodSeconds=600))
    again = injected(defaulted(once))
    assert (660, 660) == tuple(each["spec"]["terminationGracePeriodSeconds"] for each in (once, again))


def test_a_refusal_of_before_is_taken_back() -> None:
    """A Pod that was copied from one that could not be helped, and mended."""
    made = injected(pod(annotations={names.REFUSED: "no", names.NOTES: "stale"}))
    assert {names.INJECTED: rfork.__version__} == made["metadata"]["annotations"]


def meddled(document: Document) -> Document:
    """After another webhook: defaults, a sidecar, variables, mounts, an init container, a label."""
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
    """Also after another webhook, and after the API server's own defaults."""
    settings = hook(files=files, ca_secret="mtls", same_host=True)
    between = meddled(change(document, settings)[0])
    assert (between, ()) == change(between, settings)


@trying(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(labelled_pods(), SETTINGS, st.booleans(), st.booleans())
def test_twice_is_once(document: Document, settings: HookSettings, led: bool, led_later: bool) -> None:
    """For any Pod that can be helped, whoever leads then; the Pod itself stays as it was."""
    document = json.loads(json.dumps(document))  # in which no list stands in two places
    found = wanted(document)
    assume(isinstance(found, Wanted))
    assert isinstance(found, Wanted)
    kept = copy.deepcopy(document)
    once, _ = mutated(document, found, settings, PLANNER, led=led)
    again = wanted(once)
    assert isinstance(again, Wanted), again
    twice, notes = mutated(once, again, settings, PLANNER, led=led_later)
    assert (kept, once, ()) == (document, twice, notes)

"""The webhook's responses to the API server."""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
import jsonpatch
import pytest
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as trying
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.api_server import Upserted
from planner.integrations.kubernetes.cluster import ObservedNode
from planner.integrations.kubernetes.inject import inject
from planner.integrations.kubernetes.webhook import MAX_BODY_BYTES, NodeTopology, admission_app
from rfork.settings import KubernetesSettings
from tests.unit.planner.integrations.kubernetes.injected_pods import request_of
from tests.unit.planner.integrations.kubernetes.pod_documents import (
    ANY_JSON,
    PLANNER,
    SETTINGS,
    VLLM,
    Document,
    container,
    damaged_pods,
    labelled_pods,
    pod,
    webhook_settings,
)

POD = {"group": "", "version": "v1", "kind": "Pod"}
BINDING = {"group": "", "version": "v1", "kind": "Binding"}


@dataclass
class Webhook:
    """The application and its metrics."""

    settings: KubernetesSettings = field(default_factory=webhook_settings)
    led: bool = False
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        topology = NodeTopology(self.settings)
        topology.apply(Upserted(ObservedNode("a", {"topology.kubernetes.io/zone": "z1"})))
        self.app: ASGIApp = admission_app(self.settings, PLANNER, topology, self.registry, lambda: self.led)

    async def post(self, path: str, body: bytes | object) -> httpx.Response:
        """Send a body; objects are encoded as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="https://webhook") as client:
            return await client.post(path, content=content)

    async def send_review(self, path: str, subject: object, **request: object) -> Document:
        """Return the response to a review of this object."""
        response = await self.post(path, review(subject, **request))
        assert 200 == response.status_code
        document: Document = response.json()
        assert "admission.k8s.io/v1" == document["apiVersion"]
        assert "AdmissionReview" == document["kind"]
        review_response: Document = document["response"]
        assert "u-1" == review_response["uid"]
        assert review_response["allowed"] is True
        return review_response

    def counted(self) -> dict[tuple[str, str], float]:
        """Return the number of reviews by path and result, without zeros."""
        return {
            (sample.labels["path"], sample.labels["result"]): sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name == "rfork_webhook_reviews_total" and sample.value
        }


def review(subject: object, **request: object) -> Document:
    """Return an AdmissionReview, by default for the CREATE of a Pod."""
    request_fields = {
        "uid": "u-1",
        "kind": POD,
        "operation": "CREATE",
        "namespace": "serving",
        "object": subject,
    }
    return {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "request": {**request_fields, **request},
    }


def patched(before: Any, review_response: Mapping[str, Any]) -> Document:
    """Return the object after the patch."""
    assert "JSONPatch" == review_response["patchType"]
    after: Document = jsonpatch.apply_patch(before, json.loads(base64.b64decode(review_response["patch"])))
    return after


async def test_a_labelled_pod_is_injected(caplog: pytest.LogCaptureFixture) -> None:
    """The patch leads to the injected Pod; a second call has no patch."""
    webhook = Webhook()
    with caplog.at_level(logging.INFO):
        review_response = await webhook.send_review("/mutate", pod(), dryRun=True)
    made = patched(pod(), review_response)
    again = await webhook.send_review("/mutate", made)
    assert [*VLLM, "--load-format", "rfork"] == made["spec"]["containers"][0]["command"]
    assert {"uid": "u-1", "allowed": True} == again
    assert {("mutate", "injected"): 2.0} == webhook.counted()
    assert ["pod injected pod=serving/llama-7d9-…"] == [
        record.getMessage().partition(" model=")[0] for record in caplog.records if "planner" in record.name
    ]


UNTOUCHED: list[tuple[str, object, Document]] = [
    ("no label", {"metadata": {"name": "x"}, "spec": {}}, {}),
    ("opted out", pod(annotations={names.INJECT: "false"}), {}),
    ("an update", pod(), {"operation": "UPDATE"}),
    ("a deletion, without an object", None, {"operation": "DELETE"}),
    ("a subresource", pod(), {"subResource": "ephemeralcontainers"}),
    ("another kind", pod(), {"kind": {"group": "apps", "version": "v1", "kind": "Deployment"}}),
    ("no kind", pod(), {"kind": None}),
    ("a list", [], {}),
]


@pytest.mark.parametrize(
    ("subject", "request_of_it"), [row[1:] for row in UNTOUCHED], ids=[row[0] for row in UNTOUCHED]
)
async def test_other_requests_are_allowed_unchanged(subject: object, request_of_it: Document) -> None:
    """Without a patch, a warning or a log line."""
    webhook = Webhook()
    assert {"uid": "u-1", "allowed": True} == await webhook.send_review("/mutate", subject, **request_of_it)
    assert {("mutate", "untouched"): 1.0} == webhook.counted()


async def test_a_rejected_pod_starts_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    """In an annotation, a warning and one log line; it is allowed and otherwise unchanged."""
    webhook = Webhook()
    before = pod(container(command=["sh", "-c", "vllm serve"]))
    review_response = await webhook.send_review("/mutate", before)
    after = patched(before, review_response)
    reason = after["metadata"].pop("annotations")[names.REJECTED]
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert before == after
    assert {("mutate", "refused"): 1.0} == webhook.counted()
    assert reason.startswith("container engine: the command starts a shell (sh)")
    assert [f"pod not injected pod=serving/llama-7d9-… reason={reason}"] == lines
    assert [f"rfork leaves this Pod unchanged: {reason}"[:249] + "…"] == review_response["warnings"]


async def test_without_an_image_of_the_files_the_pod_is_unchanged() -> None:
    """The engine would not start with an unknown load format."""
    before = pod(annotations={names.INJECTION_MODE: "init"})
    after = patched(before, await Webhook().send_review("/mutate", before))
    assert before["spec"] == after["spec"]
    assert after["metadata"]["annotations"][names.REJECTED].startswith("no image with rfork's files")


async def test_an_unsupported_image_volume_leaves_the_pod_unchanged() -> None:
    """The reason names the settings to change."""
    before = pod(annotations={names.INJECTION_MODE: "image"})
    after = patched(before, await Webhook(webhook_settings(injection_mode="init")).send_review("/mutate", before))
    assert before["spec"] == after["spec"]
    assert after["metadata"]["annotations"][names.REJECTED] == (
        "this cluster is not known to support image volumes: set rfork.dev/injection-mode: init, or "
        "RFORK_K8S_IMAGE_VOLUMES=true for the webhook (Kubernetes 1.35 or newer)"
    )


async def test_the_gate_is_added_while_a_controller_leads(caplog: pytest.LogCaptureFixture) -> None:
    """Leadership is checked for each Pod; an injected Pod keeps its state."""
    webhook = Webhook()
    with caplog.at_level(logging.DEBUG):
        without_gate = patched(pod(), await webhook.send_review("/mutate", pod()))
    webhook.led = True
    with_gate = patched(pod(), await webhook.send_review("/mutate", pod()))
    assert "patch" not in await webhook.send_review("/mutate", without_gate)
    webhook.led = False
    assert "patch" not in await webhook.send_review("/mutate", with_gate)
    assert without_gate["spec"].get("readinessGates") is None
    assert [{"conditionType": names.WEIGHTS_READY}] == with_gate["spec"].get("readinessGates")
    assert 1 == sum("gets no readiness gate" in record.getMessage() for record in caplog.records)


async def test_a_second_engine_that_is_added_later_changes_nothing() -> None:
    """An injected Pod does not get a rejection in addition."""
    made = patched(pod(), await Webhook().send_review("/mutate", pod()))
    made["spec"]["containers"].append(container("b"))
    assert "patch" not in await Webhook().send_review("/mutate", made)


async def test_notes_are_warnings() -> None:
    """Each note is a warning for the creator of the Pod."""
    before = pod(container(env=[{"name": "RFORK_PLANNER", "value": "http://mine"}]))
    review_response = await Webhook().send_review("/mutate", before)
    assert ["kept as set by the Pod: RFORK_PLANNER"] == review_response["warnings"]


async def test_a_bug_blocks_no_pod(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Any exception is logged with the Pod's name, and the Pod starts unchanged."""

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("planner.integrations.kubernetes.webhook.inject", broken)
    webhook = Webhook()
    assert {"uid": "u-1", "allowed": True} == await webhook.send_review("/mutate", pod(), name="llama-0")
    assert {("mutate", "failed"): 1.0} == webhook.counted()
    assert ["review failed, object left unchanged path=mutate pod=serving/llama-0"] == [
        record.getMessage() for record in caplog.records
    ]


MALFORMED = [
    (b"", "the body is not JSON (JSONDecodeError)"),
    (b'"\xff"', "the body is not JSON (UnicodeDecodeError)"),
    (b"[" * 100_000, "the body is not JSON (RecursionError)"),
    (b"[]", "its kind is another one"),
    (b'{"kind": "Pod"}', "its kind is another one"),
    (
        b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1beta1"}',
        "its apiVersion is not admission.k8s.io/v1",
    ),
    (
        b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"}',
        "it has no request with a uid",
    ),
    (
        b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1", "request": {"uid": 1}}',
        "it has no request with a uid",
    ),
]


@pytest.mark.parametrize("path", ["/mutate", "/bind"])
@pytest.mark.parametrize(("body", "reason"), MALFORMED)
async def test_an_invalid_review_is_a_bad_request(path: str, body: bytes, reason: str) -> None:
    """Status 400 with one line, on both paths."""
    webhook = Webhook()
    response = await webhook.post(path, body)
    assert 400 == response.status_code
    assert f"not an AdmissionReview: {reason}\n" == response.text
    assert {(path[1:], "malformed"): 1.0} == webhook.counted()


async def test_an_oversized_body_is_not_read() -> None:
    """Reviews have at most 16 MiB."""
    webhook = Webhook()
    response = await webhook.post("/mutate", b" " * (MAX_BODY_BYTES + 1))
    assert 413 == response.status_code
    assert {("other", "malformed"): 1.0} == webhook.counted()


async def test_only_the_health_endpoint_exists_besides_the_webhook() -> None:
    """Other paths do not exist."""
    transport = httpx.ASGITransport(Webhook().app)
    async with httpx.AsyncClient(transport=transport, base_url="https://webhook") as client:
        codes = [
            (await client.get("/healthz")).status_code,
            (await client.get("/mutate")).status_code,
            (await client.get("/x")).status_code,
        ]
    assert [200, 405, 404] == codes


def binding(node: object = "a", **metadata: object) -> Document:
    """Return the Binding that a scheduler posts."""
    return {"metadata": {"name": "llama-0", **metadata}, "target": {"kind": "Node", "name": node}}


BINDINGS = [
    (binding(), {names.ZONE: "z1"}),
    (binding(annotations={}), {names.ZONE: "z1"}),
    (binding(annotations=None), {names.ZONE: "z1"}),
    (binding(annotations={"x": "y"}), {"x": "y", names.ZONE: "z1"}),
    (binding(annotations={names.ZONE: "mine"}), None),
    (binding("b"), None),
    (binding(None), None),
    (binding({}), None),
    (binding(annotations=["x"]), None),
    ({}, None),
    ({"target": {"name": "a"}}, None),
]


@pytest.mark.parametrize(("subject", "expected"), BINDINGS)
async def test_a_binding_gets_the_topology_of_its_node(subject: Document, expected: dict[str, str] | None) -> None:
    """In annotations, which the API server copies to the Pod; existing ones stay."""
    review_response = await Webhook().send_review("/bind", subject, kind=BINDING, subResource="binding")
    if expected is None:
        assert {"uid": "u-1", "allowed": True} == review_response
    else:
        after = patched(subject, review_response)
        assert expected == after["metadata"]["annotations"]
        assert subject["target"] == after["target"]


@trying(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(labelled_pods(), SETTINGS)
async def test_patches_are_correct(subject: Document, settings: KubernetesSettings) -> None:
    """By another implementation of RFC 6902."""
    subject = json.loads(json.dumps(subject))
    found = request_of(subject)
    assume(found is not None)
    assert found is not None
    expected, _ = inject(subject, found, settings, PLANNER)
    assert expected == patched(subject, await Webhook(settings).send_review("/mutate", subject))


@given(damaged_pods() | labelled_pods() | ANY_JSON, ANY_JSON)
async def test_every_review_is_allowed(subject: object, other: object) -> None:
    """For any object and any request with a uid: status 200, allowed, and a valid patch."""
    webhook = Webhook()
    subject = json.loads(json.dumps(subject))
    review_response = await webhook.send_review("/mutate", subject)
    if "patch" in review_response:
        patched(subject, review_response)
    await webhook.send_review("/bind", subject, kind=BINDING, name=other, namespace=other)
    await webhook.send_review("/mutate", subject, name=other, namespace=other, kind=other)
    await webhook.send_review("/bind", {"metadata": other, "target": subject}, kind=BINDING)
    assert not [result for _, result in webhook.counted() if result in ("failed", "malformed")]

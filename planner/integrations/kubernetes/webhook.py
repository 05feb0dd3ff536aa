"""The admission webhook, called by the API server for each created Pod and binding.

``POST /mutate`` and ``POST /bind`` receive an AdmissionReview (admission.k8s.io/v1) and return a JSON Patch.
``GET /healthz`` responds while the process runs. Every review is allowed: a Pod that cannot be injected is
created unchanged, with the reason in an annotation, in a warning for its creator, and in one log line. There
are no side effects, so dry runs need no special handling.

Bindings pass the zone, rack and NVLink domain of a Pod's node to the Pod before it starts. Kubernetes exposes
only the name of the node to containers. The API server copies the annotations of a Binding to the Pod, so the
webhook sets them there, and the container reads them with ``fieldRef``. Bindings of all Pods pass through
here, because a Binding does not show if its Pod uses rfork, so a lookup is one step.
"""

from __future__ import annotations

import base64
import contextlib
import json
import time
from asyncio import TaskGroup  # type: ignore[attr-defined]  # Python 3.11: see runner.py
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from planner.clock import Clock
from planner.http_server import address_of, listen, run_server
from planner.integrations.health import IntegrationStatus
from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.api_server import Deleted, Document, Synced, Upserted, WatchEvent, open_server
from planner.integrations.kubernetes.certificates import (
    CertificateStore,
    CertSource,
    FolderCertSource,
    SecretCertSource,
    ServingCertificate,
    refresh_forever,
)
from planner.integrations.kubernetes.cluster import Cluster, ObservedNode, connect
from planner.integrations.kubernetes.inject import inject
from planner.integrations.kubernetes.leader_election import LeaderWatch
from planner.integrations.kubernetes.pod_request import is_enabled, parse_request, rejection_reason
from planner.middleware import BodyLimit
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.schema import sanitize_text
from rfork.settings import InstanceSettings, KubernetesSettings
from rfork.tracing import NOOP_TRACER, TRACEPARENT, Span, TraceContext, Tracer

Result = Literal["untouched", "injected", "refused", "failed", "malformed"]

API_VERSION: Final = "admission.k8s.io/v1"
MAX_BODY_BYTES: Final = 16 << 20
"""Maximum bytes of one review. The API server accepts objects of up to 3 MiB."""
MAX_WARNING_CHARS: Final = 250
"""Maximum characters of one warning. The API server truncates warnings over 256."""
SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)
NO_ANNOTATIONS: Final[Mapping[str, str]] = MappingProxyType({})
log = logger("planner.integrations.webhook")


class NodeTopology:
    """The Nodes' labels, in the memory of the webhook's process."""

    def __init__(self, settings: KubernetesSettings) -> None:
        labels = {
            names.ZONE: settings.zone_label,
            names.RACK: settings.rack_label,
            names.NVLINK: settings.nvlink_label,
        }
        self._labels = labels if settings.inject_topology else {}
        self._annotations: dict[str, Mapping[str, str]] = {}

    async def follow(self, cluster: Cluster) -> None:
        """Watch the cluster's Nodes forever. While the cluster is unreachable, the last state stays."""
        async for event in cluster.nodes():
            self.apply(event)

    def apply(self, event: WatchEvent[ObservedNode]) -> None:
        """Update the state from a watch event."""
        match event:
            case Synced(nodes):
                self._annotations = {node.name: self._of(node) for node in nodes}
            case Upserted(node):
                self._annotations[node.name] = self._of(node)
            case Deleted(node):
                self._annotations.pop(node.name, None)

    def annotations_for(self, node: str) -> Mapping[str, str]:
        """Return the annotations for a Pod that is bound to the node. Empty for an unknown node."""
        return self._annotations.get(node, NO_ANNOTATIONS)

    def _of(self, node: ObservedNode) -> Mapping[str, str]:
        found = {name: node.labels.get(label, "") for name, label in self._labels.items() if label}
        return {name: value for name, value in found.items() if value} or NO_ANNOTATIONS


def json_patch(before: Document, after: Document | None) -> str | None:
    """Return the JSON Patch (RFC 6902) between two documents in base64. None if they are equal."""
    if after is None or after == before:
        return None
    return base64.b64encode(json.dumps([*_diff(before, after)]).encode("ascii")).decode("ascii")


def _diff(before: object, after: object, at: str = "") -> Iterator[Document]:
    """Yield the operations from one value to another. Optimized for additions; moves are not detected.

    A general differ (jsonpatch) takes milliseconds per Pod, which delays the next review. Numbers and
    booleans that Python considers equal are left alone: `inject` changes no such value.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in before.keys() - after.keys():
            yield {"op": "remove", "path": f"{at}/{_escaped(key)}"}
        for key, value in after.items():
            if key not in before:
                yield {"op": "add", "path": f"{at}/{_escaped(key)}", "value": value}
            elif before[key] != value:
                yield from _diff(before[key], value, f"{at}/{_escaped(key)}")
    elif isinstance(before, list) and isinstance(after, list) and 0 < len(before) <= len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=False)):
            if old != new:
                yield from _diff(old, new, f"{at}/{index}")
        for value in after[len(before) :]:
            yield {"op": "add", "path": f"{at}/-", "value": value}
    else:
        yield {"op": "replace", "path": at, "value": after}


def _escaped(key: str) -> str:
    """Escape a part of a JSON Pointer (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


@dataclass(frozen=True, slots=True)
class ReviewDecision:
    """Result of one review."""

    result: Result
    document: Document | None = None
    """The changed object. None: unchanged."""
    warnings: tuple[str, ...] = ()
    model: str | None = None
    """The Pod's model, for its span."""


ALLOW_UNCHANGED: Final = ReviewDecision("untouched")
Reviewer = Callable[[Document, Document], ReviewDecision]
"""Decides about an object, from its review request."""


class MalformedReview(Exception):
    """The body is not an AdmissionReview. The text is one line with the reason."""


def admission_app(
    settings: KubernetesSettings,
    planner_url: str,
    topology: NodeTopology,
    registry: CollectorRegistry,
    is_leader: Callable[[], bool] = lambda: False,
    tracer: Tracer = NOOP_TRACER,
) -> ASGIApp:
    """Return the application. `planner_url` is the URL for Pods. Metrics are added to `registry`.

    `is_leader` returns True if a controller leads now; otherwise Pods get no readiness gate. Each review of a
    Pod gets a span, in the API server's trace if it sends one. Bindings, which exist for all Pods of a
    cluster, get none.
    """
    reviews = Counter("rfork_webhook_reviews", "Completed reviews", ("path", "result"), registry=registry)
    seconds = Histogram(
        "rfork_webhook_seconds", "Time to complete a review", ("path",), buckets=SECONDS, registry=registry
    )

    def reviewing(path: str, decide: Reviewer, tracer: Tracer) -> Route:
        for result in get_args(Result):  # start at 0, so that the first failure shows as an increase
            reviews.labels(path, result)

        async def review_endpoint(request: Request) -> Response:
            body = await request.body()
            with tracer.span(
                f"POST /{path}",
                kind="server",
                parent=TraceContext.parse(request.headers.get(TRACEPARENT)),
                method="POST",
                route=f"/{path}",
            ) as span:
                response = reviewed(body, span)
                span.set(status=response.status_code)
                return response

        def reviewed(body: bytes, span: Span) -> Response:
            began = time.perf_counter()
            try:
                review_request, subject = _read(body)
            except MalformedReview as error:
                reviews.labels(path, "malformed").inc()
                span.set(result="malformed")
                log.warning("webhook received a request that is not an AdmissionReview", path=path, reason=str(error))
                return PlainTextResponse(f"not an AdmissionReview: {error}\n", 400)
            try:
                decision = decide(review_request, subject)
                patch = json_patch(subject, decision.document)
            except Exception as error:  # outermost handler: a bug here must not block a Pod
                span.fail(error)
                log.exception(
                    "review failed, object left unchanged",
                    path=path,
                    **_object_name(review_request, subject),
                )
                decision, patch = ReviewDecision("failed"), None
            response = _response(review_request["uid"], patch, decision.warnings)
            reviews.labels(path, decision.result).inc()
            span.set(
                # Sanitized: the document is not validated yet.
                namespace=str(sanitize_text(_namespace(review_request, subject))) or None,
                pod=str(sanitize_text(_name(review_request, subject))) or None,
                model=decision.model,
                result=decision.result,
                notes=decision.warnings or None,
            )
            seconds.labels(path).observe(time.perf_counter() - began)
            return response

        return Route(f"/{path}", review_endpoint, methods=["POST"])

    def review_pod(review_request: Document, pod: Document) -> ReviewDecision:
        return _review_pod(review_request, pod, settings, planner_url, is_leader())

    def review_binding(review_request: Document, binding: Document) -> ReviewDecision:
        return _review_binding(review_request, binding, topology)

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    app = Starlette(
        routes=[
            reviewing("mutate", review_pod, tracer),
            reviewing("bind", review_binding, NOOP_TRACER),
            Route("/healthz", healthz, methods=["GET"]),
        ]
    )
    rejection = reviews.labels("other", "malformed")
    return BodyLimit(app, MAX_BODY_BYTES, lambda _: rejection.inc())


def _read(body: bytes) -> tuple[Document, Document]:
    """Return the request of a review and its object. Raises MalformedReview."""
    try:
        review = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedReview(f"the body is not JSON ({type(error).__name__})") from None
    if not isinstance(review, dict) or review.get("kind") != "AdmissionReview":
        raise MalformedReview("its kind is another one")
    if review.get("apiVersion") != API_VERSION:
        raise MalformedReview(f"its apiVersion is not {API_VERSION}")
    review_request = review.get("request")
    if not isinstance(review_request, dict) or not isinstance(review_request.get("uid"), str):
        raise MalformedReview("it has no request with a uid")
    subject = review_request.get("object")
    return review_request, subject if isinstance(subject, dict) else {}


def _is_resource(review_request: Document, resource_kind: str) -> bool:
    return review_request.get("operation") == "CREATE" and review_request.get("kind") == {
        "group": "",
        "version": "v1",
        "kind": resource_kind,
    }


def _review_pod(
    review_request: Document, pod: Document, settings: KubernetesSettings, planner_url: str, has_leader: bool
) -> ReviewDecision:
    if not is_enabled(pod) or not _is_resource(review_request, "Pod") or review_request.get("subResource"):
        return ALLOW_UNCHANGED
    pod_log = log.bind(**_object_name(review_request, pod))
    try:
        request = parse_request(pod)
        if request is None:
            return ALLOW_UNCHANGED
        document, notes = inject(pod, request, settings, planner_url, has_leader=has_leader)
    except SettingsError as error:
        reason = rejection_reason(error)
        pod_log.warning("pod not injected", reason=reason)
        warning = f"rfork leaves this Pod unchanged: {reason}"
        return ReviewDecision("refused", _annotate_rejection(pod, reason), (warning,))
    if settings.readiness_gate and not has_leader:
        # No note on the Pod: each Pod of a rollout would repeat it, and its owner cannot fix it.
        pod_log.debug("no controller leads: the Pod gets no readiness gate")
    pod_log.info("pod injected", model=request.model, container=request.container, engine=request.engine, notes=notes)
    return ReviewDecision("injected", document, notes, request.model)


def _annotate_rejection(pod: Document, reason: str) -> Document | None:
    """Return the Pod with the reason as annotation, or None if it was injected before or is malformed."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations")
    if annotations is None:
        annotations = {}
    if not isinstance(annotations, dict) or names.INJECTED in annotations:
        return None
    return {**pod, "metadata": {**metadata, "annotations": {**annotations, names.REJECTED: reason}}}


def _review_binding(review_request: Document, binding: Document, topology: NodeTopology) -> ReviewDecision:
    target, metadata = binding.get("target"), binding.get("metadata")
    if not _is_resource(review_request, "Binding") or not isinstance(target, dict) or not isinstance(metadata, dict):
        return ALLOW_UNCHANGED
    node = target.get("name")
    if not isinstance(node, str) or not (found := topology.annotations_for(node)):
        return ALLOW_UNCHANGED
    before = metadata.get("annotations") or {}
    if not isinstance(before, dict) or (after := {**found, **before}) == before:
        return ALLOW_UNCHANGED
    return ReviewDecision("injected", {**binding, "metadata": {**metadata, "annotations": after}})


def _response(uid: str, patch: str | None, warnings: Sequence[str]) -> Response:
    response_body: Document = {"uid": uid, "allowed": True}
    if patch is not None:
        response_body |= {"patchType": "JSONPatch", "patch": patch}
    if warnings:
        response_body["warnings"] = [_truncate_warning(warning) for warning in warnings]
    review = {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response_body}
    return Response(json.dumps(review), media_type="application/json")


def _truncate_warning(warning: str) -> str:
    line = str(sanitize_text(warning))
    return line if len(line) <= MAX_WARNING_CHARS else line[: MAX_WARNING_CHARS - 1] + "…"


def _object_name(review_request: Document, subject: Document) -> dict[str, str]:
    """Return the object's name for log lines. A Pod's name may not be generated yet."""
    name = _name(review_request, subject) or f"{_text(_metadata(subject), 'generateName')}…"
    return {"pod": str(sanitize_text(f"{_namespace(review_request, subject)}/{name}"))}


def _namespace(review_request: Document, subject: Document) -> str:
    return _text(review_request, "namespace") or _text(_metadata(subject), "namespace")


def _name(review_request: Document, subject: Document) -> str:
    """Return the object's name; empty if the API server generates it later from `generateName`."""
    return _text(review_request, "name") or _text(_metadata(subject), "name")


def _metadata(subject: Document) -> Document:
    metadata = subject.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _text(document: Document, key: str) -> str:
    value = document.get(key)
    return value if isinstance(value, str) else ""


async def run(
    settings: KubernetesSettings,
    planner_settings: InstanceSettings,
    status: IntegrationStatus,
    tracer: Tracer = NOOP_TRACER,
) -> None:
    """Serve until cancelled, then finish requests in progress.

    With a certificate directory no cluster is needed; without one, Pods get no topology and no readiness
    gate. Without a directory it serves immediately, but TLS handshakes fail until its own certificate was
    created or read.

    Raises PortInUse, or SettingsError for an unusable certificate directory, hosts or planner URL.
    """
    url = settings.pod_planner_url or planner_settings.planner
    if url is None:
        raise SettingsError(
            "the webhook does not know the URL at which Pods reach the planner", hint="set RFORK_K8S_POD_PLANNER_URL"
        )
    serving = ServingCertificate(status, Clock())
    topology, leader_watch = NodeTopology(settings), LeaderWatch(settings)
    app = admission_app(settings, url, topology, status.registry, leader_watch, tracer)
    async with _cert_source(settings, serving) as cert_source:
        listener = listen(settings.bind, settings.webhook_port, prefix="RFORK_K8S_", port_setting="WEBHOOK_PORT")
        async with run_server(app, listener, serving.context), TaskGroup() as tasks:
            log.info("webhook ready", url=f"https://{address_of(settings.bind, listener)}", planner=url)
            tasks.create_task(refresh_forever(cert_source, settings.poll_interval_s))
            tasks.create_task(_follow(settings, topology, leader_watch))


@contextlib.asynccontextmanager
async def _cert_source(settings: KubernetesSettings, serving: ServingCertificate) -> AsyncIterator[CertSource]:
    if settings.certificate_dir is not None:
        yield FolderCertSource(settings.certificate_dir, serving)
        return
    store = CertificateStore(open_server(settings))
    try:
        yield SecretCertSource(settings, store, serving)
    finally:
        await store.close()


async def _follow(settings: KubernetesSettings, topology: NodeTopology, leader_watch: LeaderWatch) -> None:
    """Watch Nodes and the controller's Lease, if the settings need them."""
    watches: list[tuple[str, Callable[[Cluster], Coroutine[None, None, None]]]] = []
    if settings.inject_topology:
        watches.append(("Pods get no topology", topology.follow))
    if settings.readiness_gate:
        watches.append(("Pods get no readiness gate", leader_watch.follow))
    if not watches:
        return
    try:
        cluster = connect(settings)
    except SettingsError as error:
        for missing, _ in watches:
            log.warning(f"{missing}: the webhook cannot connect to the cluster", reason=str(error), hint=error.hint)
        return
    try:
        async with TaskGroup() as tasks:
            for missing, follow in watches:
                tasks.create_task(_run_best_effort(follow(cluster), missing))
    finally:
        await cluster.close()


async def _run_best_effort(watch: Coroutine[None, None, None], missing: str) -> None:
    """Run a watch. If it fails, log the error and continue without it."""
    try:
        await watch
    except Exception:  # outermost handler of the task: Pods are still injected
        log.exception(f"{missing}: unexpected error in the watch")

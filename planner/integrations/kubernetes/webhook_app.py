"""HTTP application of the webhook, called by the API server for each created Pod and binding.

``POST /mutate`` and ``POST /bind`` receive an AdmissionReview (admission.k8s.io/v1) and return a JSON Patch.
``GET /healthz`` responds while the process runs. Every review is allowed: a Pod that cannot be injected is
created unchanged, with the reason in an annotation, in a warning for its creator, and in one log line. There
are no side effects, so dry runs need no special handling.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from planner.integrations.kubernetes import names
from planner.integrations.kubernetes.inject import inject
from planner.integrations.kubernetes.json_patch import json_patch
from planner.integrations.kubernetes.manifests import Document
from planner.integrations.kubernetes.pod_request import InjectionRejected, is_enabled, parse_request
from planner.integrations.kubernetes.topology import NodeTopology
from planner.middleware import BodyLimit
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.schema import sanitize_text
from rfork.settings import KubernetesSettings
from rfork.tracing import NOOP_TRACER, TRACEPARENT, Span, TraceContext, Tracer

Result = Literal["untouched", "injected", "refused", "failed", "malformed"]

API_VERSION: Final = "admission.k8s.io/v1"
MAX_BODY_BYTES: Final = 16 << 20
"""Maximum bytes of one review. The API server accepts objects of up to 3 MiB."""
MAX_WARNING_CHARS: Final = 250
"""Maximum characters of one warning. The API server truncates warnings over 256."""
SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)


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
    log = logger(__name__)

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
    log = logger(__name__).bind(**_object_name(review_request, pod))
    injection_request = parse_request(pod)
    if injection_request is None:
        return ALLOW_UNCHANGED
    if isinstance(injection_request, InjectionRejected):
        rejection = injection_request
    else:
        try:
            document, notes = inject(pod, injection_request, settings, planner_url, has_leader=has_leader)
        except SettingsError as error:
            rejection = InjectionRejected(f"{error}: {error.hint}")
        else:
            if settings.readiness_gate and not has_leader:
                # No note on the Pod: each Pod of a rollout would repeat it, and its owner cannot fix it.
                log.debug("no controller leads: the Pod gets no readiness gate")
            log.info(
                "pod injected",
                model=injection_request.model,
                container=injection_request.container,
                engine=injection_request.engine,
                notes=notes,
            )
            return ReviewDecision("injected", document, notes, injection_request.model)
    log.warning("pod not injected", reason=rejection.reason)
    return ReviewDecision(
        "refused",
        _annotate_rejection(pod, rejection),
        (f"rfork leaves this Pod unchanged: {rejection.reason}",),
    )


def _annotate_rejection(pod: Document, rejection: InjectionRejected) -> Document | None:
    """Return the Pod with the reason as annotation, or None if it was injected before or is malformed."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations")
    if annotations is None:
        annotations = {}
    if not isinstance(annotations, dict) or names.INJECTED in annotations:
        return None
    return {**pod, "metadata": {**metadata, "annotations": {**annotations, names.REJECTED: rejection.reason}}}


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

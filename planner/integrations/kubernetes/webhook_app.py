"""The webhook's HTTP interface: what the API server asks for each Pod, and each binding, that is created.

``POST /mutate`` and ``POST /bind`` take an AdmissionReview (admission.k8s.io/v1) and answer with a JSON
Patch; ``GET /healthz`` answers while the process does. Whatever a review holds, it is allowed: a Pod that
cannot be helped starts as it was written, with the reason in an annotation, a warning to whoever created it,
and one log line. Nothing but the answer is changed, so dry runs are as any other.
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
from rfork.schema.types import sanitize_text
from rfork.settings import KubernetesSettings
from rfork.tracing import NOOP_TRACER, TRACEPARENT, Span, TraceContext, Tracer

Result = Literal["untouched", "injected", "refused", "failed", "malformed"]

API_VERSION: Final = "admission.k8s.io/v1"
MAX_BODY: Final = 16 << 20
"""Bytes of one review; the API server takes no object of more than 3 MiB."""
MAX_WARNINGS: Final = 250
"""Characters of one warning: the API server shortens what is longer than 256."""
SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)


@dataclass(frozen=True, slots=True)
class ReviewDecision:
    """What is said to one review."""

    result: Result
    document: Document | None = None
    """The object as it is to be; None: as it is."""
    warnings: tuple[str, ...] = ()
    model: str | None = None
    """What the Pod is to serve, for its span."""


ALLOW_UNCHANGED: Final = ReviewDecision("untouched")
Reviewer = Callable[[Document, Document], ReviewDecision]
"""Says what is to become of an object, given its request."""


class MalformedReview(Exception):
    """The body is no AdmissionReview; its text says why, in one line."""


def admission_app(
    settings: KubernetesSettings,
    planner_url: str,
    topology: NodeTopology,
    registry: CollectorRegistry,
    is_leader: Callable[[], bool] = lambda: False,
    tracer: Tracer = NOOP_TRACER,
) -> ASGIApp:
    """The application. `planner_url` is the one that Pods are told; metrics are put into `registry`.

    `is_leader`: whether a controller leads now; without one Pods get no readiness gate. Each review of a Pod is a
    span, of the API server's trace where that tells one; bindings, those of all Pods of a cluster, are none.
    """
    reviews = Counter("rfork_webhook_reviews", "Reviews answered", ("path", "result"), registry=registry)
    seconds = Histogram(
        "rfork_webhook_seconds", "Time to answer a review", ("path",), buckets=SECONDS, registry=registry
    )
    log = logger(__name__)

    def reviewing(path: str, judge: Reviewer, tracer: Tracer) -> Route:
        for result in get_args(Result):  # 0 rather than missing: the first failure is a rise
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
                log.warning("not an AdmissionReview", path=path, because=str(error))
                return PlainTextResponse(f"not an AdmissionReview: {error}\n", 400)
            try:
                decision = judge(review_request, subject)
                patch = json_patch(subject, decision.document)
            except Exception as error:  # the outermost edge: a Pod is not held up by a bug of ours
                span.fail(error)
                log.exception(
                    "review failed: the object is left as it is",
                    path=path,
                    **_object_name(review_request, subject),
                )
                decision, patch = ReviewDecision("failed"), None
            response = _response(review_request["uid"], patch, decision.warnings)
            reviews.labels(path, decision.result).inc()
            span.set(
                # As text that can be sent: nobody has checked the document yet.
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
    return BodyLimit(app, MAX_BODY, lambda _: rejection.inc())


def _read(body: bytes) -> tuple[Document, Document]:
    """The request of a review, and the object that it is about. Raises Malformed."""
    try:
        review = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedReview(f"it is no JSON ({type(error).__name__})") from None
    if not isinstance(review, dict) or review.get("kind") != "AdmissionReview":
        raise MalformedReview("its kind is another")
    if review.get("apiVersion") != API_VERSION:
        raise MalformedReview(f"its apiVersion is not {API_VERSION}")
    review_request = review.get("request")
    if not isinstance(review_request, dict) or not isinstance(review_request.get("uid"), str):
        raise MalformedReview("it holds no request with a uid")
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
                # No note: each Pod of a rollout would tell it anew, and its owner cannot mend it.
                log.debug("no controller leads: the Pod gets no readiness gate")
            log.info(
                "pod injected",
                model=injection_request.model,
                container=injection_request.container,
                engine=injection_request.engine,
                notes=notes,
            )
            return ReviewDecision("injected", document, notes, injection_request.model)
    log.warning("pod not injected", because=rejection.reason)
    return ReviewDecision(
        "refused",
        _annotate_rejection(pod, rejection),
        (f"rfork leaves this Pod as it is: {rejection.reason}",),
    )


def _annotate_rejection(pod: Document, rejection: InjectionRejected) -> Document | None:
    """The Pod with the reason; None where it has been changed by us already, or can hold no annotation."""
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
    return line if len(line) <= MAX_WARNINGS else line[: MAX_WARNINGS - 1] + "…"


def _object_name(review_request: Document, subject: Document) -> dict[str, str]:
    """Which object it is about, for log lines: a Pod's name may not be made yet."""
    name = _name(review_request, subject) or f"{_text(_metadata(subject), 'generateName')}…"
    return {"pod": str(sanitize_text(f"{_namespace(review_request, subject)}/{name}"))}


def _namespace(review_request: Document, subject: Document) -> str:
    return _text(review_request, "namespace") or _text(_metadata(subject), "namespace")


def _name(review_request: Document, subject: Document) -> str:
    """Empty where the API server makes it later, out of `generateName`."""
    return _text(review_request, "name") or _text(_metadata(subject), "name")


def _metadata(subject: Document) -> Document:
    metadata = subject.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _text(document: Document, key: str) -> str:
    value = document.get(key)
    return value if isinstance(value, str) else ""

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

from planner.hooks.kubernetes import names
from planner.hooks.kubernetes.mutate import mutated
from planner.hooks.kubernetes.patching import json_patch
from planner.hooks.kubernetes.pods import Refused, asks, wanted
from planner.hooks.kubernetes.shapes import Document
from planner.hooks.kubernetes.topology import Topology
from planner.middleware import BodyLimit
from rfork.errors import SettingsError
from rfork.fields import told
from rfork.logs import logger
from rfork.settings import HookSettings
from rfork.tracing import OFF, TRACEPARENT, Span, TraceContext, Tracer

Result = Literal["untouched", "injected", "refused", "failed", "malformed"]

API_VERSION: Final = "admission.k8s.io/v1"
MOST_BODY: Final = 16 << 20
"""Bytes of one review; the API server takes no object of more than 3 MiB."""
MOST_WARNED: Final = 250
"""Characters of one warning: the API server shortens what is longer than 256."""
SECONDS: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)


@dataclass(frozen=True, slots=True)
class Answer:
    """What is said to one review."""

    result: Result
    document: Document | None = None
    """The object as it is to be; None: as it is."""
    warnings: tuple[str, ...] = ()
    model: str | None = None
    """What the Pod is to serve, for its span."""


UNTOUCHED: Final = Answer("untouched")
Judge = Callable[[Document, Document], Answer]
"""Says what is to become of an object, given its request."""


class Malformed(Exception):
    """The body is no AdmissionReview; its text says why, in one line."""


def admission_app(
    settings: HookSettings,
    planner_url: str,
    topology: Topology,
    registry: CollectorRegistry,
    leads: Callable[[], bool] = lambda: False,
    tracer: Tracer = OFF,
) -> ASGIApp:
    """The application. `planner_url` is the one that Pods are told; metrics are put into `registry`.

    `leads`: whether a controller leads now; without one Pods get no readiness gate. Each review of a Pod is a
    span, of the API server's trace where that tells one; bindings, those of all Pods of a cluster, are none.
    """
    reviews = Counter("rfork_webhook_reviews", "Reviews answered", ("path", "result"), registry=registry)
    seconds = Histogram(
        "rfork_webhook_seconds", "Time to answer a review", ("path",), buckets=SECONDS, registry=registry
    )
    log = logger(__name__)

    def reviewing(path: str, judge: Judge, tracer: Tracer) -> Route:
        for result in get_args(Result):  # 0 rather than missing: the first failure is a rise
            reviews.labels(path, result)

        async def answer(request: Request) -> Response:
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
                asked, subject = _read(body)
            except Malformed as error:
                reviews.labels(path, "malformed").inc()
                span.set(result="malformed")
                log.warning("not an AdmissionReview", path=path, because=str(error))
                return PlainTextResponse(f"not an AdmissionReview: {error}\n", 400)
            try:
                answered = judge(asked, subject)
                patch = json_patch(subject, answered.document)
            except Exception as error:  # the outermost edge: a Pod is not held up by a bug of ours
                span.fail(error)
                log.exception(
                    "review failed: the object is left as it is", path=path, **_whose(asked, subject)
                )
                answered, patch = Answer("failed"), None
            response = _response(asked["uid"], patch, answered.warnings)
            reviews.labels(path, answered.result).inc()
            span.set(
                # As text that can be sent: nobody has checked the document yet.
                namespace=str(told(_namespace(asked, subject))) or None,
                pod=str(told(_name(asked, subject))) or None,
                model=answered.model,
                result=answered.result,
                notes=answered.warnings or None,
            )
            seconds.labels(path).observe(time.perf_counter() - began)
            return response

        return Route(f"/{path}", answer, methods=["POST"])

    def judge_pod(asked: Document, pod: Document) -> Answer:
        return _judged_pod(asked, pod, settings, planner_url, leads())

    def judge_binding(asked: Document, binding: Document) -> Answer:
        return _judged_binding(asked, binding, topology)

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    app = Starlette(
        routes=[
            reviewing("mutate", judge_pod, tracer),
            reviewing("bind", judge_binding, OFF),
            Route("/healthz", healthz, methods=["GET"]),
        ]
    )
    refused = reviews.labels("other", "malformed")
    return BodyLimit(app, MOST_BODY, lambda _: refused.inc())


def _read(body: bytes) -> tuple[Document, Document]:
    """The request of a review, and the object that it is about. Raises Malformed."""
    try:
        review = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is no JSON ({type(error).__name__})") from None
    if not isinstance(review, dict) or review.get("kind") != "AdmissionReview":
        raise Malformed("its kind is another")
    if review.get("apiVersion") != API_VERSION:
        raise Malformed(f"its apiVersion is not {API_VERSION}")
    asked = review.get("request")
    if not isinstance(asked, dict) or not isinstance(asked.get("uid"), str):
        raise Malformed("it holds no request with a uid")
    subject = asked.get("object")
    return asked, subject if isinstance(subject, dict) else {}


def _is(asked: Document, kind: str) -> bool:
    return asked.get("operation") == "CREATE" and asked.get("kind") == {
        "group": "",
        "version": "v1",
        "kind": kind,
    }


def _judged_pod(
    asked: Document, pod: Document, settings: HookSettings, planner_url: str, led: bool
) -> Answer:
    if not asks(pod) or not _is(asked, "Pod") or asked.get("subResource"):
        return UNTOUCHED
    log = logger(__name__).bind(**_whose(asked, pod))
    want = wanted(pod)
    if want is None:
        return UNTOUCHED
    if isinstance(want, Refused):
        refused = want
    else:
        try:
            document, notes = mutated(pod, want, settings, planner_url, led=led)
        except SettingsError as error:
            refused = Refused(f"{error}: {error.hint}")
        else:
            if settings.readiness_gate and not led:
                # No note: each Pod of a rollout would tell it anew, and its owner cannot mend it.
                log.debug("no controller leads: the Pod gets no readiness gate")
            log.info(
                "pod injected", model=want.model, container=want.container, engine=want.engine, notes=notes
            )
            return Answer("injected", document, notes, want.model)
    log.warning("pod not injected", because=refused.reason)
    return Answer("refused", _annotated(pod, refused), (f"rfork leaves this Pod as it is: {refused.reason}",))


def _annotated(pod: Document, refused: Refused) -> Document | None:
    """The Pod with the reason; None where it has been changed by us already, or can hold no annotation."""
    metadata = pod["metadata"]
    annotations = metadata.get("annotations")
    if annotations is None:
        annotations = {}
    if not isinstance(annotations, dict) or names.INJECTED in annotations:
        return None
    return {**pod, "metadata": {**metadata, "annotations": {**annotations, names.REFUSED: refused.reason}}}


def _judged_binding(asked: Document, binding: Document, topology: Topology) -> Answer:
    target, metadata = binding.get("target"), binding.get("metadata")
    if not _is(asked, "Binding") or not isinstance(target, dict) or not isinstance(metadata, dict):
        return UNTOUCHED
    node = target.get("name")
    if not isinstance(node, str) or not (found := topology.annotations_for(node)):
        return UNTOUCHED
    before = metadata.get("annotations") or {}
    if not isinstance(before, dict) or (after := {**found, **before}) == before:
        return UNTOUCHED
    return Answer("injected", {**binding, "metadata": {**metadata, "annotations": after}})


def _response(uid: str, patch: str | None, warnings: Sequence[str]) -> Response:
    said: Document = {"uid": uid, "allowed": True}
    if patch is not None:
        said |= {"patchType": "JSONPatch", "patch": patch}
    if warnings:
        said["warnings"] = [_short(warning) for warning in warnings]
    review = {"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": said}
    return Response(json.dumps(review), media_type="application/json")


def _short(warning: str) -> str:
    line = str(told(warning))
    return line if len(line) <= MOST_WARNED else line[: MOST_WARNED - 1] + "…"


def _whose(asked: Document, subject: Document) -> dict[str, str]:
    """Which object it is about, for log lines: a Pod's name may not be made yet."""
    name = _name(asked, subject) or f"{_text(_metadata(subject), 'generateName')}…"
    return {"pod": str(told(f"{_namespace(asked, subject)}/{name}"))}


def _namespace(asked: Document, subject: Document) -> str:
    return _text(asked, "namespace") or _text(_metadata(subject), "namespace")


def _name(asked: Document, subject: Document) -> str:
    """Empty where the API server makes it later, out of `generateName`."""
    return _text(asked, "name") or _text(_metadata(subject), "name")


def _metadata(subject: Document) -> Document:
    metadata = subject.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _text(document: Document, key: str) -> str:
    value = document.get(key)
    return value if isinstance(value, str) else ""

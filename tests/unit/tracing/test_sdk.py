"""Spans as OpenTelemetry's SDK makes them, and none where nothing is traced."""

from __future__ import annotations

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import StatusCode
from requests import PreparedRequest, Response
from requests.adapters import HTTPAdapter

from rfork.errors import MissingExtra, SettingsError
from rfork.settings import TracingSettings
from rfork.tracing import NO_SPAN, OFF, TraceContext, here, queue, sdk, tracer
from rfork.tracing.sdk import sending_tracer
from tests.unit.tracing.spans import Kept

PARENT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")


def test_a_span_within_another_belongs_to_it() -> None:
    """And to its trace; what has no name of OpenTelemetry's is rfork's own; None is left out."""
    kept = Kept()
    with kept.tracer.span("fork", model="m", reasons=(), fallback=None):
        with kept.tracer.span("transfer", kind="client", status=200) as span:
            span.set(bytes=5)
        loose = kept.tracer.begin("read")
    loose.end()
    loose.end()
    assert (["transfer", "fork", "read"], None, "fork", "fork") == (
        kept.names,
        kept.parent("fork"),
        kept.parent("transfer"),
        kept.parent("read"),
    )
    assert (
        {"rfork.model": "m", "rfork.reasons": ()},
        {"http.response.status_code": 200, "rfork.bytes": 5},
    ) == (
        kept.attributes("fork"),
        kept.attributes("transfer"),
    )
    assert (None, 1) == (here(), len({span.context.trace_id for span in kept.spans.values()}))


def test_a_span_goes_on_with_the_trace_of_another_process() -> None:
    """With the links it is given, to whichever traces."""
    kept, other = Kept(), TraceContext("1" * 32, "2" * 16)
    with kept.tracer.span("answer", parent=PARENT, links=[other, None], kind="server") as span:
        told = span.context
    made = kept.spans["answer"]
    assert made.parent is not None
    assert (PARENT.trace_id, f"{made.parent.span_id:016x}", [int("1" * 32, 16)]) == (
        told.trace_id if told else None,
        PARENT.span_id,
        [link.context.trace_id for link in made.links],
    )


def test_what_raises_fails_its_span() -> None:
    """With the error's kind; one that ended is not changed any more."""
    kept = Kept()
    with pytest.raises(ValueError, match="no"), kept.tracer.span("fork") as span:
        raise ValueError("no")
    span.fail("too late")
    span.event("too late")
    made = kept.spans["fork"]
    assert (StatusCode.ERROR, "ValueError: no", {"error.type": "ValueError"}, ()) == (
        made.status.status_code,
        made.status.description,
        kept.attributes("fork"),
        tuple(made.events),
    )


@pytest.mark.parametrize(
    ("share", "parent", "sent"),
    [(0.0, None, False), (0.0, PARENT, True), (1.0, TraceContext("1" * 32, "2" * 16, sampled=False), False)],
    ids=["none of ours", "its caller sends it", "its caller does not"],
)
def test_a_share_is_of_the_traces_that_begin_here(
    share: float, parent: TraceContext | None, sent: bool
) -> None:
    """What came with a call is sent if its caller sends it."""
    kept = Kept(share)
    with kept.tracer.span("fork", parent=parent) as span:
        context = span.context
        span.set(model="m")
        span.event("something")
        span.fail("anything")
    assert (sent, sent) == (bool(kept.names), context is not None and context.sampled)


def test_a_trace_that_begins_in_an_engine_links_to_the_engines_own() -> None:
    """Its tracer, and the span it works for, stay its own."""
    kept, engine = Kept(), TracerProvider().get_tracer("engine")
    with engine.start_as_current_span("start up") as theirs, kept.tracer.span("fork"):
        kept.tracer.begin("transfer").end()
    links = {name: [link.context.span_id for link in span.links] for name, span in kept.spans.items()}
    expected = {"fork": [theirs.get_span_context().span_id], "transfer": []}
    assert (expected, None) == (links, kept.parent("fork"))


def test_nothing_is_made_where_nothing_is_traced() -> None:
    """Not even a context manager."""
    with OFF.span("fork", model="m") as span:
        span.set(bytes=1)
        span.event("something", chunk=1)
        span.fail("anything")
        span.end()
    assert (False, True, True, None, None) == (
        OFF.on, OFF.begin("read") is NO_SPAN, span is NO_SPAN, span.context, here(),
    )  # fmt: skip


def test_a_process_that_does_not_trace_imports_no_opentelemetry() -> None:
    """Its own, that is: FastAPI imports the interface for itself."""
    code = (
        "import sys; from rfork.tracing import OFF, tracer; "
        "print(tracer() is OFF, [name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env={})
    assert "True []\n" == done.stdout


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://collector", "http://"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    """Before anything is traced."""
    with pytest.raises(SettingsError, match="RFORK_TRACING_ENDPOINT"):
        sending_tracer(endpoint, TracingSettings(), "rfork-test")


def test_headers_that_are_none_are_refused_and_not_told() -> None:
    """They hold secrets."""
    chosen = TracingSettings.model_validate({"headers": "hunter2"})
    with pytest.raises(SettingsError) as refused:
        sending_tracer("http://127.0.0.1:1", chosen, "rfork-test")
    assert "hunter2" not in str(refused.value)


class Collector(HTTPAdapter):
    """Takes every request, and keeps what it was sent with."""

    def __init__(self) -> None:
        super().__init__()
        self.headers: list[dict[str, str]] = []

    def send(self, request: PreparedRequest, *_: object, **__: object) -> Response:
        self.headers.append({name.lower(): str(value) for name, value in request.headers.items()})
        response = Response()
        response.status_code = 200
        return response


@pytest.mark.parametrize(("own", "expected"), [(None, None), ("authorization=ours", "ours")])
def test_what_the_engine_tells_its_collector_is_not_told_to_ours(
    own: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OTEL_* is about the engine's: its credentials, its headers, how it compresses."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=engine-secret,x-engine=1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    collector = Collector()
    monkeypatch.setattr(sdk._Session, "get_adapter", lambda session, url: collector)
    monkeypatch.setattr(queue, "CLOSE_S", 60.0)  # on a busy machine
    chosen = TracingSettings.model_validate({"headers": own})
    tracer = sending_tracer("http://127.0.0.1:1", chosen, "rfork-test")
    tracer.begin("fork").end()
    tracer.close()
    (sent,) = collector.headers
    assert (expected, None, None) == tuple(
        sent.get(name) for name in ("authorization", "x-engine", "content-encoding")
    )


def test_where_the_sdk_is_switched_off_nothing_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_SDK_DISABLED: there is no span that others could refer to."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    kept = Kept()
    with kept.tracer.span("fork") as span:
        told = span.context, here()
    assert ((None, None), []) == (told, kept.names)


def test_without_its_packages_tracing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is asked for; where it is not, nobody misses them."""
    monkeypatch.setitem(sys.modules, "rfork.tracing.sdk", None)
    monkeypatch.setenv("RFORK_TRACING_ENDPOINT", "http://127.0.0.1:4318")
    with pytest.raises(MissingExtra) as missing:
        tracer("rfork-nothing")
    assert "pip install 'rfork[tracing]'" == missing.value.hint

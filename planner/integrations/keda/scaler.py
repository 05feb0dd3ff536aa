"""External scaler for KEDA: the gRPC service that KEDA's operator calls, and the server that runs it."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NoReturn, Protocol

import grpc
import grpc.aio
from prometheus_client import Counter, Gauge

from planner.http_server import listen
from planner.integrations.health import IntegrationStatus
from planner.integrations.keda.engine_metrics import ENGINE_TIMEOUT_S, EngineMetricsClient
from planner.integrations.keda.metric_source import MetricSource
from planner.integrations.keda.signals import MetricUnavailable, TriggerReading
from planner.integrations.keda.triggers import InvalidTrigger, Trigger, parse_trigger
from planner.integrations.keda.v1 import externalscaler_pb2 as pb
from planner.integrations.keda.v1.externalscaler_pb2_grpc import (
    ExternalScalerServicer,
    add_ExternalScalerServicer_to_server,
)
from planner.integrations.planner_api import PlannerApi, PlannerUnavailable
from rfork.addresses import host_port
from rfork.asyncio_timeout import timeout
from rfork.errors import PortInUse
from rfork.logs import logger
from rfork.net.grpc_credentials import server_credentials
from rfork.net.health.v1 import health_pb2
from rfork.net.health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server
from rfork.settings import KubernetesSettings, TlsSettings, load
from rfork.tracing import NOOP_TRACER, TRACEPARENT, TraceContext, Tracer

if TYPE_CHECKING:
    from grpc.aio import ServicerContext as Context

SERVICE: Final = "externalscaler.ExternalScaler"
MAX_REQUEST_BYTES: Final = 256 << 10
PING_S: Final = 60.0
"""Keepalive interval of idle connections. Without keepalive, streams would wait forever for a lost client."""
STOP_GRACE_S: Final = 1.0


class CallContext(Protocol):
    """The part of grpc.aio.ServicerContext that is used here."""

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]] | None:
        """Return the metadata that the caller sent with the request."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        """End the call with an error."""


class _CallRejected(Exception):
    """A call that cannot be completed. Its text is the reason."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Scaler(ExternalScalerServicer):
    """KEDA's ExternalScaler service.

    Returns INVALID_ARGUMENT for invalid trigger metadata, and UNAVAILABLE if a value is unknown.
    """

    def __init__(self, metric_source: MetricSource, status: IntegrationStatus, tracer: Tracer = NOOP_TRACER) -> None:
        """Each call gets a span. Streams, which have no fixed end, get one for their first response only."""
        self._metric_source = metric_source
        self._tracer = tracer
        self._shutdown = asyncio.Event()
        self._streams = Gauge("rfork_scaler_streams", "Open streams of push triggers", registry=status.registry)
        self._call_counter = Counter(
            "rfork_scaler_calls", "Calls from KEDA", ["call", "code"], registry=status.registry
        )
        self._log = logger("planner.integrations.keda")

    async def IsActive(
        self,
        request: pb.ScaledObjectRef,
        context: Context[pb.ScaledObjectRef, pb.IsActiveResponse],
    ) -> pb.IsActiveResponse:
        """Return True if the trigger is active."""
        _, reading = await self._measure("IsActive", request, context)
        return pb.IsActiveResponse(result=reading.active)

    async def GetMetricSpec(
        self,
        request: pb.ScaledObjectRef,
        context: Context[pb.ScaledObjectRef, pb.GetMetricSpecResponse],
    ) -> pb.GetMetricSpecResponse:
        """Return the trigger's metric name and target. Needs no planner and no engine."""
        try:
            trigger = self._trigger("GetMetricSpec", request)
        except _CallRejected as rejection:
            await self._abort("GetMetricSpec", context, rejection)
        self._call_counter.labels("GetMetricSpec", "OK").inc()
        spec = pb.MetricSpec(
            metricName=trigger.name,
            targetSize=max(1, round(trigger.target)),
            targetSizeFloat=trigger.target,
        )
        return pb.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(
        self,
        request: pb.GetMetricsRequest,
        context: Context[pb.GetMetricsRequest, pb.GetMetricsResponse],
    ) -> pb.GetMetricsResponse:
        """Return the metric's value. Always uses the trigger's own metric name, whatever name was requested."""
        trigger, reading = await self._measure("GetMetrics", request.scaledObjectRef, context)
        value = pb.MetricValue(
            metricName=trigger.name, metricValue=math.ceil(reading.value), metricValueFloat=reading.value
        )
        return pb.GetMetricsResponse(metricValues=[value])

    async def StreamIsActive(
        self,
        request: pb.ScaledObjectRef,
        context: Context[pb.ScaledObjectRef, pb.IsActiveResponse],
    ) -> AsyncIterator[pb.IsActiveResponse]:
        """Stream the trigger's state: once immediately, then after each change, until the scaler stops.

        While the state is unknown, nothing is sent; KEDA gets the error from its own polls.
        """
        trigger, reading = await self._measure("StreamIsActive", request, context)
        active = reading.active
        with self._streams.track_inprogress():
            yield pb.IsActiveResponse(result=active)
            while not await self._shutdown_within(trigger.poll):
                before = active
                with suppress(PlannerUnavailable, MetricUnavailable):
                    active = (await self._metric_source.read(trigger)).active
                if active != before:
                    self._log_transition(trigger, active)
                    yield pb.IsActiveResponse(result=active)

    def end(self) -> None:
        """End all streams cleanly, so that KEDA reopens them immediately."""
        self._shutdown.set()

    async def _shutdown_within(self, seconds: float) -> bool:
        try:
            async with timeout(seconds):
                return await self._shutdown.wait()
        except TimeoutError:
            return False

    def _log_transition(self, trigger: Trigger, active: bool) -> None:
        self._log.info("trigger state changed", model=trigger.model, metric=trigger.metric, active=active)

    async def _measure(
        self, call: str, request: pb.ScaledObjectRef, context: CallContext
    ) -> tuple[Trigger, TriggerReading]:
        """Return the trigger and its reading, inside a span. A call that cannot be completed is aborted."""
        with self._tracer.span(
            f"{SERVICE}/{call}",
            kind="server",
            parent=_caller(context) if self._tracer.enabled else None,
            rpc="grpc",
            rpc_method=f"{SERVICE}/{call}",
            namespace=request.namespace or None,
            scaled_object=request.name or None,
        ) as span:
            try:
                trigger = self._trigger(call, request)
                span.set(model=trigger.model, metric=trigger.metric)
                reading = await self._reading(trigger)
            except _CallRejected as error:
                rejection = error
                span.set(rpc_status=error.code.name)
                if error.code is not grpc.StatusCode.INVALID_ARGUMENT:  # an error of the caller
                    span.fail(error)
            else:
                span.set(rpc_status="OK", value=reading.value, active=reading.active)
                self._call_counter.labels(call, "OK").inc()
                return trigger, reading
        await self._abort(call, context, rejection)

    def _trigger(self, call: str, request: pb.ScaledObjectRef) -> Trigger:
        """Parse the trigger of a request. Raises _CallRejected."""
        try:
            return parse_trigger(request.scalerMetadata)
        except InvalidTrigger as error:
            address = f"{request.namespace}/{request.name}"
            self._log.warning("invalid trigger", call=call, scaled_object=address, reason=str(error))
            raise _CallRejected(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None

    async def _reading(self, trigger: Trigger) -> TriggerReading:
        """Return the trigger's current reading. Raises _CallRejected."""
        try:
            return await self._metric_source.read(trigger)
        except (PlannerUnavailable, MetricUnavailable) as error:
            raise _CallRejected(grpc.StatusCode.UNAVAILABLE, str(error)) from None

    async def _abort(self, call: str, context: CallContext, rejection: _CallRejected) -> NoReturn:
        self._call_counter.labels(call, rejection.code.name).inc()
        await context.abort(rejection.code, str(rejection))


def _caller(context: CallContext) -> TraceContext | None:
    """Return the caller's trace context, if the call carries one."""
    for key, value in context.invocation_metadata() or ():
        if key == TRACEPARENT:
            return TraceContext.parse(value)
    return None


async def run(
    settings: KubernetesSettings,
    planner_api: PlannerApi,
    status: IntegrationStatus,
    tracer: Tracer = NOOP_TRACER,
    engine_timeout_s: float = ENGINE_TIMEOUT_S,
) -> None:
    """Serve KEDA at ``RFORK_K8S_BIND``:``RFORK_K8S_SCALER_PORT`` until cancelled.

    Raises PortInUse, and SettingsError for an invalid address or unusable TLS files.
    """
    tls, log = load(TlsSettings), logger("planner.integrations.keda")
    credentials = server_credentials(tls)
    engines = EngineMetricsClient(engine_timeout_s, tls)
    metric_source = MetricSource(planner_api, engines, time.monotonic, status.registry, tracer)
    scaler, health = Scaler(metric_source, status, tracer), _Health()
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),  # otherwise two processes could share one port unnoticed
            ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
            ("grpc.keepalive_time_ms", round(PING_S * 1000)),
            ("grpc.keepalive_timeout_ms", 20_000),
            ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
            ("grpc.keepalive_permit_without_calls", 1),
        ]
    )
    add_ExternalScalerServicer_to_server(scaler, server)
    add_HealthServicer_to_server(health, server)
    try:
        port = _listen(server, settings, credentials)
        await server.start()
        log.info("scaler ready", address=host_port(settings.bind, port), tls=tls.serves)
        status.ready()
        await asyncio.get_running_loop().create_future()
    finally:
        status.not_ready("stopping")
        health.is_serving = False
        scaler.end()
        await server.stop(STOP_GRACE_S)
        await metric_source.close()
        await engines.close()


class _Health(HealthServicer):
    """gRPC's health check, called by the kubelet."""

    def __init__(self) -> None:
        self.is_serving = True

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: Context[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    ) -> health_pb2.HealthCheckResponse:
        """See `health.proto`."""
        if request.service not in ("", SERVICE):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        response = health_pb2.HealthCheckResponse
        return response(status=response.SERVING if self.is_serving else response.NOT_SERVING)


def _listen(server: grpc.aio.Server, settings: KubernetesSettings, credentials: grpc.ServerCredentials | None) -> int:
    address = host_port(settings.bind, settings.scaler_port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError:  # gRPC binds and listens in one step and does not report the cause
        listen(settings.bind, settings.scaler_port, prefix="RFORK_K8S_", port_setting="SCALER_PORT").close()
        raise PortInUse(settings.bind, settings.scaler_port, setting="RFORK_K8S_SCALER_PORT") from None

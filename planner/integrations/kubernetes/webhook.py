"""The admission webhook as a task: TLS, certificate, watches of the cluster, and the HTTP application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine

from planner.clock import Clock
from planner.http_server import address_of, listen, run_server
from planner.integrations.health import IntegrationStatus
from planner.integrations.kubernetes.cert_source import (
    CertSource,
    FolderCertSource,
    SecretCertSource,
    refresh_forever,
)
from planner.integrations.kubernetes.cluster import Cluster
from planner.integrations.kubernetes.cluster_client import connect
from planner.integrations.kubernetes.leader_watch import LeaderWatch
from planner.integrations.kubernetes.reloading_tls import CertificateMonitor, ReloadingContext
from planner.integrations.kubernetes.secrets import connect_secrets
from planner.integrations.kubernetes.topology import NodeTopology
from planner.integrations.kubernetes.webhook_app import admission_app
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.settings import InstanceSettings, KubernetesSettings
from rfork.tracing import NOOP_TRACER, Tracer

log = logger("planner.integrations.webhook")


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
    tls_context, topology, leader_watch = ReloadingContext(), NodeTopology(settings), LeaderWatch(settings)
    app = admission_app(settings, url, topology, status.registry, leader_watch, tracer)
    async with _cert_source(settings, CertificateMonitor(tls_context, status, Clock())) as cert_source:
        listener = listen(settings.bind, settings.webhook_port, prefix="RFORK_K8S_", port_setting="WEBHOOK_PORT")
        async with run_server(app, listener, tls_context.context), asyncio.TaskGroup() as tasks:
            log.info("webhook ready", url=f"https://{address_of(settings.bind, listener)}", planner=url)
            tasks.create_task(refresh_forever(cert_source, settings.poll_interval_s))
            tasks.create_task(_follow(settings, topology, leader_watch))


@contextlib.asynccontextmanager
async def _cert_source(settings: KubernetesSettings, watch: CertificateMonitor) -> AsyncIterator[CertSource]:
    if settings.certificate_dir is not None:
        yield FolderCertSource(settings.certificate_dir, watch)
        return
    store = connect_secrets(settings)
    try:
        yield SecretCertSource(settings, store, watch)
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
        async with asyncio.TaskGroup() as tasks:
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

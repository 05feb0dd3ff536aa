"""The admission webhook as a task: TLS, its certificate, what it knows of a cluster, and the application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine

from planner.hooks.kubernetes.admission import admission_app
from planner.hooks.kubernetes.api import connect
from planner.hooks.kubernetes.certificates import FolderKeeper, Keeper, SecretKeeper, keep
from planner.hooks.kubernetes.cluster import Cluster
from planner.hooks.kubernetes.leading import Leading
from planner.hooks.kubernetes.secrets import connect_secrets
from planner.hooks.kubernetes.showing import LiveContext, Watch
from planner.hooks.kubernetes.topology import Topology
from planner.hooks.probes import Status
from planner.leases import Clock
from planner.listening import address_of, listen, serving
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.settings import HookSettings, Settings
from rfork.tracing import OFF, Tracer

log = logger("planner.hooks.webhook")


async def run(
    settings: HookSettings, planner_settings: Settings, status: Status, tracer: Tracer = OFF
) -> None:
    """Serve until cancelled, and then answer what is under way.

    With a folder of certificates no cluster is needed: where none is reached, Pods are not told their node's
    place, and get no readiness gate. Without, it serves from the start, but no handshake succeeds until it
    has made, or read, its own.
    Raises PortInUse, or SettingsError for a certificate folder, hosts or a planner that cannot be used.
    """
    url = settings.planner or planner_settings.planner
    if url is None:
        raise SettingsError(
            "the webhook does not know where Pods find the planner", hint="set RFORK_HOOK_PLANNER"
        )
    live, topology, leading = LiveContext(), Topology(settings), Leading(settings)
    app = admission_app(settings, url, topology, status.registry, leading, tracer)
    async with _keeper(settings, Watch(live, status, Clock())) as keeper:
        listener = listen(
            settings.bind, settings.webhook_port, prefix="RFORK_HOOK_", port_setting="WEBHOOK_PORT"
        )
        async with serving(app, listener, live.context), asyncio.TaskGroup() as tasks:
            log.info("webhook is up", url=f"https://{address_of(settings.bind, listener)}", planner=url)
            tasks.create_task(keep(keeper, settings.look_s))
            tasks.create_task(_follow(settings, topology, leading))


@contextlib.asynccontextmanager
async def _keeper(settings: HookSettings, watch: Watch) -> AsyncIterator[Keeper]:
    if settings.certificates is not None:
        yield FolderKeeper(settings.certificates, watch)
        return
    store = connect_secrets(settings)
    try:
        yield SecretKeeper(settings, store, watch)
    finally:
        await store.close()


async def _follow(settings: HookSettings, topology: Topology, leading: Leading) -> None:
    """Keep up with Nodes and the controller's Lease, as far as Pods are to get what depends on them."""
    wanted: list[tuple[str, Callable[[Cluster], Coroutine[None, None, None]]]] = []
    if settings.topology:
        wanted.append(("Pods are not told their zone and rack", topology.follow))
    if settings.readiness_gate:
        wanted.append(("Pods get no readiness gate", leading.follow))
    if not wanted:
        return
    try:
        cluster = connect(settings)
    except SettingsError as error:
        for without, _ in wanted:
            log.warning(f"{without}: no cluster is known", why=str(error))
        return
    try:
        async with asyncio.TaskGroup() as tasks:
            for without, follow in wanted:
                tasks.create_task(_kept(follow(cluster), without))
    finally:
        await cluster.close()


async def _kept(following: Coroutine[None, None, None], without: str) -> None:
    """What cannot go on is logged, and done without."""
    try:
        await following
    except Exception:  # the task's outermost edge: Pods are injected all the same
        log.exception(f"{without} any more")

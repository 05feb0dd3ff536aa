"""Forks the image of a running instance into plain memory, without its module. Runs on the target.

Used by commands that need an image's bytes but not the model: `rfork snapshot`, `rfork cache`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from uuid import uuid4

from torch import nn

from rfork.errors import DeadlineExceeded, LayoutMismatch, NoSource, SourceWeightsChanged
from rfork.image.buffer_views import allocate_buffer
from rfork.image.layout import Layout
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.peer.base import Dial
from rfork.peer.client import PeerClient
from rfork.planner_client.client import PlannerClient
from rfork.receiver.deadline import final_report_deadline
from rfork.receiver.progress import OnProgress
from rfork.receiver.report import ForkReport
from rfork.receiver.session import ForkSession
from rfork.schema import ForkRequest, ForkResult, InstanceReport
from rfork.settings import InstanceSettings
from rfork.source.seed import InstanceIdentity
from rfork.transport.selection import select_transports

TRANSIENT_EGRESS_SHARE = 0.01
"""Egress share of an instance that ends once it has the weights: the planner prefers other sources."""

CheckLayout = Callable[[Layout], None]
"""Receives the layout before memory is allocated for it; raises to refuse it."""


def fetch(
    source_instance: InstanceReport,
    connect: Callable[[], PlannerClient],
    settings: InstanceSettings,
    on_progress: OnProgress | None = None,
) -> tuple[Image, Manifest]:
    """Fork the image of `source_instance` into this process's memory, from the sources that the planner assigns.

    `connect` creates planner clients, one for each use. The image is verified chunk by chunk, and no longer
    served once this returns. Raises what `rfork.fork` raises.
    """
    image, manifest, _ = fetch_with_report(source_instance, connect, settings, on_progress)
    return image, manifest


def fetch_with_report(
    source_instance: InstanceReport,
    connect: Callable[[], PlannerClient],
    settings: InstanceSettings,
    on_progress: OnProgress | None = None,
    check: CheckLayout | None = None,
) -> tuple[Image, Manifest, ForkReport]:
    """Run `fetch`, and also return the report of the fork, whose seed is closed.

    Takes at most `InstanceSettings.deadline_s`, including the request for the layout. Also raises what `check`
    raises.
    """
    deadline = time.monotonic() + settings.deadline_s
    # A transient instance maps nothing: its source would keep files of the chunks, laid out for a reader that
    # has left instead of for the next instances.
    settings = settings.model_copy(update={"shm_mode": "copy"})
    with connect() as planner:
        layout = _layout(planner, source_instance, settings, deadline)
    if check is not None:
        check(layout)
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0:
        raise DeadlineExceeded(
            f"the deadline of {settings.deadline_s:g} s passed before the first byte of {source_instance.model}"
        )
    module = nn.Module()
    _, tensors = allocate_buffer(layout)
    # Names as in the image; `register_buffer` would refuse the dots.
    module._buffers.update(tensors)
    report = ForkSession(
        module,
        InstanceIdentity(
            source_instance.model,
            source_instance.rank,
            version=source_instance.version,
            replica=f"fetch-{uuid4().hex[:12]}",
            egress_share=TRANSIENT_EGRESS_SHARE,
        ),
        settings.model_copy(update={"snapshot": None, "deadline_s": remaining_s}),
        select_transports(settings),
        planner=connect(),
        dial=_dial(settings),
        on_progress=on_progress,
        like=layout,
    ).run()
    seed = report.seed
    if seed is None or seed.manifest is None:
        raise SourceWeightsChanged(f"the weights of {source_instance.model} changed during the fetch")
    image, manifest = seed.image, seed.manifest
    seed.close()
    return image, manifest, report


def _layout(
    planner: PlannerClient, source_instance: InstanceReport, settings: InstanceSettings, deadline: float
) -> Layout:
    """Return the layout of the image, with all its tensors, from an instance that has it, by `deadline`."""
    fork_request = ForkRequest(
        fork_id=uuid4().hex,
        instance=source_instance.model_copy(
            update={
                "instance_id": uuid4().hex,
                "replica": None,
                "weights_id": None,
                "state": "loading",
                "verified": (),
                "storage": (),
                "readers": (),
                "address": "none:0",
                "max_readers": 0,  # no instance must wait for this one
            }
        ),
    )
    retry_until = min(time.monotonic() + settings.source_idle_timeout_s, deadline)
    try:
        plan = planner.request_plan(fork_request, deadline=deadline)
        while not plan.routes and plan.retry_after_s is not None and time.monotonic() < retry_until:
            time.sleep(min(plan.retry_after_s, max(0.0, retry_until - time.monotonic())))
            plan = planner.request_plan(fork_request, deadline=deadline)
        # These routes are not used for reads; their leases authorize the requests.
        if not plan.routes:
            raise NoSource(f"no instance returned the layout of {source_instance.model}: {plan.reason}")
        route = plan.routes[0]
        peer = _dial(settings)(route.address, lambda: route.lease.token)
        try:
            layout = peer.full_manifest(retry_until).layout
        finally:
            peer.close()
    finally:
        end = final_report_deadline(deadline)
        planner.finish(fork_request.fork_id, ForkResult(outcome="interrupted", seconds=0, bytes_read=0), deadline=end)
        planner.remove(fork_request.instance.instance_id, deadline=end)
    if layout.layout_id != source_instance.layout_id:
        raise LayoutMismatch(f"the instances of {source_instance.model} changed during the request", hint="try again")
    return layout


def _dial(settings: InstanceSettings) -> Dial:
    return lambda address, token: PeerClient(address, token, settings.tls)

"""The image of a running instance without its module: forked into plain memory. Runs on the target.

For whoever wants the bytes of an image and not the model: `rfork snapshot`, `rfork artifacts`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from uuid import uuid4

from torch import nn

from rfork.control.client import PlannerClient
from rfork.errors import DeadlinePassed, LayoutMismatch, NoSource, SourceChanged
from rfork.fork.deadline import farewell
from rfork.fork.progress import OnProgress
from rfork.fork.report import ForkReport
from rfork.fork.session import ForkSession
from rfork.image.arena import allocate
from rfork.image.layout import Layout
from rfork.image.manifest import Manifest
from rfork.image.memory import Image
from rfork.peer.base import Dial
from rfork.peer.client import PeerClient
from rfork.seed.seed import Identity
from rfork.settings import Settings
from rfork.transport.choice import choose
from rfork.wire import ForkFinish, ForkRequest, InstanceReport

RARELY = 0.01
"""Weight of an instance that is gone once it has the weights: others are sent to it last."""

CheckLayout = Callable[[Layout], None]
"""Told the layout before memory is taken for it; refuses it by raising."""


def fetch(
    holder: InstanceReport,
    connect: Callable[[], PlannerClient],
    settings: Settings,
    on_progress: OnProgress | None = None,
) -> tuple[Image, Manifest]:
    """Fork the image that `holder` holds, from whomever the planner sends to, into this process's memory.

    `connect` makes planner clients, one for each use. The image is verified chunk by chunk; nothing is given
    once this returns. Raises what `rfork.fork` raises.
    """
    image, manifest, _ = fetch_reported(holder, connect, settings, on_progress)
    return image, manifest


def fetch_reported(
    holder: InstanceReport,
    connect: Callable[[], PlannerClient],
    settings: Settings,
    on_progress: OnProgress | None = None,
    check: CheckLayout | None = None,
) -> tuple[Image, Manifest, ForkReport]:
    """As `fetch`, with the report of the fork (whose seed is closed). Raises what `check` raises, too.

    All of it takes `Settings.deadline_s` at most, asking for the layout included.
    """
    until = time.monotonic() + settings.deadline_s
    # What passes through maps nothing: its source would keep files of the chunks ever after, laid out for a
    # reader that has gone and not for the instances to come.
    settings = settings.model_copy(update={"shared_memory": "copy"})
    with connect() as planner:
        layout = _layout(planner, holder, settings, until)
    if check is not None:
        check(layout)
    left = until - time.monotonic()
    if left <= 0:
        raise DeadlinePassed(
            f"the {settings.deadline_s:g} s are over before the first byte of {holder.model}"
        )
    module = nn.Module()
    _, tensors = allocate(layout)
    # Names as they are in the image, dots and all, which `register_buffer` would refuse.
    module._buffers.update(tensors)
    report = ForkSession(
        module,
        Identity(holder.model, holder.rank, version=holder.version, replica=f"fetch-{uuid4().hex[:12]}"),
        settings.model_copy(update={"weight": RARELY, "snapshot": None, "deadline_s": left}),
        choose(settings),
        planner=connect(),
        dial=_dial(settings),
        on_progress=on_progress,
        like=layout,
    ).run()
    seed = report.seed
    if seed is None or seed.manifest is None:
        raise SourceChanged(f"the weights of {holder.model} changed while they were fetched")
    image, manifest = seed.image, seed.manifest
    seed.close()
    return image, manifest, report


def _layout(planner: PlannerClient, holder: InstanceReport, settings: Settings, until: float) -> Layout:
    """The layout of the holder's image, with all its tensors, from an instance that holds it, by `until`."""
    asking = ForkRequest(
        fork_id=uuid4().hex,
        instance=holder.model_copy(
            update={
                "instance_id": uuid4().hex,
                "replica": None,
                "weights_id": None,
                "state": "loading",
                "verified": (),
                "storage": (),
                "readers": (),
                "address": "none:0",
                "max_readers": 0,  # nobody is to wait behind it
            }
        ),
    )
    give_up = min(time.monotonic() + settings.stall_s, until)
    try:
        plan = planner.ask(asking, deadline=until)
        while not plan.routes and plan.retry_after_s is not None and time.monotonic() < give_up:
            time.sleep(min(plan.retry_after_s, max(0.0, give_up - time.monotonic())))
            plan = planner.ask(asking, deadline=until)
        # By these routes nothing is read: their leases are for questions.
        if not plan.routes:
            raise NoSource(f"nobody tells the layout of {holder.model}: {plan.reason}")
        route = plan.routes[0]
        peer = _dial(settings)(route.address, lambda: route.lease.token)
        try:
            layout = peer.full_manifest(give_up).layout
        finally:
            peer.close()
    finally:
        end = farewell(until)
        planner.finish(
            asking.fork_id, ForkFinish(outcome="interrupted", seconds=0, bytes_read=0), deadline=end
        )
        planner.remove(asking.instance.instance_id, deadline=end)
    if layout.layout_id != holder.layout_id:
        raise LayoutMismatch(f"the instances of {holder.model} changed meanwhile", hint="try again")
    return layout


def _dial(settings: Settings) -> Dial:
    return lambda address, token: PeerClient(address, token, settings.tls)

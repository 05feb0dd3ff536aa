"""The weights of a running model without its engine: forked into plain memory. Runs on the target.

For whoever wants the bytes of each rank and not the model: `rfork snapshot`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from uuid import uuid4

from torch import nn

from rfork.control.client import PlannerClient
from rfork.errors import LayoutMismatch, NoSource, SourceChanged
from rfork.fork.progress import OnProgress
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
from rfork.wire import ForkFinish, ForkRequest, InstanceReport, Rank

RARELY = 0.01
"""Weight of an instance that is gone once it has the weights: others are sent to it last."""
NO_LAYOUT = "0" * 32
"""The layout_id of who does not know the layout yet: no image has it."""


def ranks_of(planner: PlannerClient, model: str) -> list[InstanceReport]:
    """One instance that holds the whole image of each rank of `model`, in the order of the ranks.

    Where instances differ in their weights, it is one of the most numerous. Raises NoSource where none is.
    """
    whole = [
        view.report
        for view in planner.instances(model=model)
        if view.report.state == "serving" and view.report.weights_id is not None
    ]
    if not whole:
        raise NoSource(
            f"no running instance holds the weights of {model}", hint="see `rfork status` for those there are"
        )
    alike = Counter(map(_kind, whole))
    chosen: dict[str, InstanceReport] = {}
    for report in whole:
        other = chosen.get(report.rank.key)
        if other is None or alike[_kind(report)] > alike[_kind(other)]:
            chosen[report.rank.key] = report
    return sorted(chosen.values(), key=lambda report: _place(report.rank))


def fetch(
    holder: InstanceReport, connect: Callable[[], PlannerClient], settings: Settings, on_progress: OnProgress
) -> tuple[Image, Manifest]:
    """Fork the image that `holder` holds, from whomever the planner sends to, into this process's memory.

    `connect` makes planner clients, one for each use. The image is verified chunk by chunk; nothing is given
    once this returns. Raises what `rfork.fork` raises.
    """
    with connect() as planner:
        layout = _layout(planner, holder, settings)
    module = nn.Module()
    _, tensors = allocate(layout)
    # Names as they are in the image, dots and all, which `register_buffer` would refuse.
    module._buffers.update(tensors)
    report = ForkSession(
        module,
        Identity(holder.model, holder.rank),
        settings.model_copy(update={"weight": RARELY, "snapshot": None}),
        choose(settings),
        planner=connect(),
        dial=_dial(settings),
        on_progress=on_progress,
    ).run()
    seed = report.seed
    if seed is None or seed.manifest is None:
        raise SourceChanged(f"the weights of {holder.model} changed while they were fetched")
    image, manifest = seed.image, seed.manifest
    seed.close()
    return image, manifest


def _layout(planner: PlannerClient, holder: InstanceReport, settings: Settings) -> Layout:
    """The layout of the holder's image, with all its tensors, from an instance of that model and rank."""
    asking = ForkRequest(
        fork_id=uuid4().hex,
        instance=holder.model_copy(
            update={
                "instance_id": uuid4().hex,
                "layout_id": NO_LAYOUT,
                "weights_id": None,
                "state": "loading",
                "verified": (),
                "storage": (),
                "readers": (),
                "address": "none:0",
            }
        ),
    )
    began = time.monotonic()
    try:
        plan = planner.ask(asking)
        # Nothing is to be read by this route: the lease is for questions.
        if plan.other_layout is None:
            raise NoSource(f"nobody tells the layout of {holder.model}: {plan.reason}")
        route = plan.other_layout
        peer = _dial(settings)(route.address, lambda: route.lease.token)
        try:
            layout = peer.full_manifest(began + settings.stall_s).layout
        finally:
            peer.close()
    finally:
        planner.finish(asking.fork_id, ForkFinish(outcome="interrupted", seconds=0, bytes_read=0))
        planner.remove(asking.instance.instance_id)
    if layout.layout_id != holder.layout_id:
        raise LayoutMismatch(
            f"instances of {holder.model} hold rank {holder.rank.key} in several layouts",
            hint="wait until all run one revision, or drain those of the other (see `rfork status`)",
        )
    return layout


def _dial(settings: Settings) -> Dial:
    return lambda address, token: PeerClient(address, token, settings.tls)


def _kind(report: InstanceReport) -> tuple[str, str, str | None]:
    return report.rank.key, report.layout_id, report.weights_id


def _place(rank: Rank) -> tuple[bool, int, int, int]:
    """The model before its draft, then as the names of their snapshots go."""
    return rank.role != "target", rank.pp, rank.tp, rank.ep

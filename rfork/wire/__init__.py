"""What instances and the planner say to one another over REST: the models both sides share.

Nothing here imports torch: the planner runs without it. Times are in seconds, sizes in bytes, chunk
ranges are half-open pairs of chunk indices.
"""

from __future__ import annotations

from rfork.wire.base import WireModel
from rfork.wire.forks import ForkEvent, ForkFinish, ForkPage, ForkProgress, ForkView, ProgressAck, source_kind
from rfork.wire.instances import (
    InstanceAck,
    InstancePage,
    InstanceReport,
    InstanceView,
    MayExit,
    Placement,
    Rank,
    StorageOffer,
)
from rfork.wire.models import ModelView
from rfork.wire.plans import ForkRequest, Lease, Plan, Route, Share, SourceFault, StorageRead
from rfork.wire.previews import Preview, PreviewPage, PreviewRequest, PreviewTarget
from rfork.wire.problems import Problem
from rfork.wire.scaleups import ScaleUp, ScaleUpView

__all__ = [
    "ForkEvent",
    "ForkFinish",
    "ForkPage",
    "ForkProgress",
    "ForkRequest",
    "ForkView",
    "InstanceAck",
    "InstancePage",
    "InstanceReport",
    "InstanceView",
    "Lease",
    "MayExit",
    "ModelView",
    "Placement",
    "Plan",
    "Preview",
    "PreviewPage",
    "PreviewRequest",
    "PreviewTarget",
    "Problem",
    "ProgressAck",
    "Rank",
    "Route",
    "ScaleUp",
    "ScaleUpView",
    "Share",
    "SourceFault",
    "StorageOffer",
    "StorageRead",
    "WireModel",
    "source_kind",
]

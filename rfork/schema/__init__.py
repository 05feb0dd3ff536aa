"""REST models shared by instances and the planner.

Does not import torch: the planner runs without it. Times are in seconds, sizes in bytes; chunk ranges are
half-open pairs of chunk indices.
"""

from __future__ import annotations

from rfork.schema.base import WireModel
from rfork.schema.forks import (
    ForkEvent,
    ForkInfo,
    ForkPage,
    ForkProgress,
    ForkResult,
    ProgressAck,
    source_type,
)
from rfork.schema.instances import (
    ExitCheck,
    InstanceAck,
    InstanceInfo,
    InstancePage,
    InstanceReport,
    Placement,
    Rank,
    StorageCandidate,
)
from rfork.schema.models import ModelInfo
from rfork.schema.plans import (
    ChunkAssignment,
    ForkRequest,
    Lease,
    Plan,
    Route,
    SourceFault,
    StorageAssignment,
)
from rfork.schema.previews import Preview, PreviewPage, PreviewRequest, PreviewTarget
from rfork.schema.problems import Problem
from rfork.schema.scaleups import ScaleUp, ScaleUpInfo

__all__ = [
    "ChunkAssignment",
    "ExitCheck",
    "ForkEvent",
    "ForkInfo",
    "ForkPage",
    "ForkProgress",
    "ForkRequest",
    "ForkResult",
    "InstanceAck",
    "InstanceInfo",
    "InstancePage",
    "InstanceReport",
    "Lease",
    "ModelInfo",
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
    "ScaleUpInfo",
    "SourceFault",
    "StorageAssignment",
    "StorageCandidate",
    "WireModel",
    "source_type",
]

"""The labels, annotations and conditions that rfork and Pods know one another by.

Set by users on a Pod template: `MODEL`, and as needed the annotations below it. Set by rfork: the others.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "rfork.dev/"

MODEL: Final = "rfork.dev/model"
"""Label of Pod templates, and of the workload that holds one: the model's name, if a label can say it."""

# Annotations of a Pod that users set.
MODEL_NAME: Final = "rfork.dev/model-name"
"""The model's name where a label cannot say it (``org/name``)."""
VERSION: Final = "rfork.dev/version"
"""Version of the model's weights: RFORK_VERSION. Without the annotation, the label of this name counts."""
CONTAINER: Final = "rfork.dev/container"
"""The engine's container, where several could be."""
ENGINE: Final = "rfork.dev/engine"
"""``vllm`` or ``sglang`` where the command is the image's own, or ``pytorch``: environment only."""
INJECT: Final = "rfork.dev/inject"
"""``false``: leave this Pod alone."""
SNAPSHOT: Final = "rfork.dev/snapshot"
"""URI of a snapshot: RFORK_SNAPSHOT."""
FILES: Final = "rfork.dev/files"
"""``none``, ``init`` or ``image``: as the setting of that name."""
SAME_HOST: Final = "rfork.dev/same-host"
"""``true`` or ``false``: as the setting of that name; ``ipc``: with the node's IPC and PID namespaces too."""
DRAIN_S: Final = "rfork.dev/drain-s"
"""Seconds: as the setting of that name."""
REQUIRED: Final = "rfork.dev/required"
"""``true``: RFORK_FAIL_IF_NOT_FORKED, a server that cannot be forked does not start."""
REPLICA_PODS: Final = "rfork.dev/replica-pods"
"""Pods that make one replica (nodes of a LeaderWorkerSet's group do by themselves); without: 1."""

# Annotations of a Pod that rfork sets.
INJECTED: Final = "rfork.dev/injected"
"""The version of rfork that changed the Pod."""
REJECTED: Final = "rfork.dev/not-injected"
"""Why the webhook left the Pod as it was."""
NOTES: Final = "rfork.dev/notes"
"""What the webhook could not do, one sentence a line."""
ZONE: Final = "rfork.dev/zone"
RACK: Final = "rfork.dev/rack"
NVLINK: Final = "rfork.dev/nvlink"
"""What is known of the Pod's node, from the moment it is bound to it."""
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Kubernetes' own: of a ReplicaSet's Pods, those that cost least go first."""

WEIGHTS_READY: Final = "rfork.dev/weights-ready"
"""Condition, and readiness gate, of a Pod."""
LWS_GROUP: Final = "leaderworkerset.sigs.k8s.io/group-key"
"""Label of LeaderWorkerSet's Pods: those of one group share it, and are one replica."""

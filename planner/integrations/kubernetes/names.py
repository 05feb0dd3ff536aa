"""Names of rfork's labels, annotations and conditions on Pods.

Users set `MODEL` on a Pod template and, if needed, the annotations below it. rfork sets the others.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "rfork.dev/"

MODEL: Final = "rfork.dev/model"
"""Label of Pod templates and their workloads: the model's name, if it is a valid label value."""

# Annotations of a Pod that users set.
MODEL_NAME: Final = "rfork.dev/model-name"
"""The model's name if it is not a valid label value (``org/name``)."""
VERSION: Final = "rfork.dev/version"
"""Version of the model's weights (RFORK_VERSION). Without the annotation, the label of this name applies."""
CONTAINER: Final = "rfork.dev/container"
"""Name of the engine's container, if several are candidates."""
ENGINE: Final = "rfork.dev/engine"
"""``vllm`` or ``sglang`` if the image's own command starts it, or ``pytorch``: set the environment only."""
INJECT: Final = "rfork.dev/inject"
"""``false``: do not change this Pod."""
SNAPSHOT: Final = "rfork.dev/snapshot"
"""URI of a snapshot (RFORK_SNAPSHOT)."""
INJECTION_MODE: Final = "rfork.dev/injection-mode"
"""``none``, ``init`` or ``image``; overrides RFORK_K8S_INJECTION_MODE."""
SAME_HOST: Final = "rfork.dev/same-host"
"""``true`` or ``false``; overrides RFORK_K8S_SAME_HOST. ``ipc``: also the node's IPC and PID namespaces."""
DRAIN_TIMEOUT_S: Final = "rfork.dev/drain-timeout-s"
"""Seconds; overrides RFORK_K8S_DRAIN_TIMEOUT_S."""
FAIL_IF_NOT_FORKED: Final = "rfork.dev/fail-if-not-forked"
"""``true``: the server does not start if it cannot be forked (RFORK_FAIL_IF_NOT_FORKED)."""
REPLICA_PODS: Final = "rfork.dev/replica-pods"
"""Number of Pods per replica, default 1. Not needed for LeaderWorkerSets."""

# Annotations of a Pod that rfork sets.
INJECTED: Final = "rfork.dev/injected"
"""Version of rfork that injected the Pod."""
REJECTED: Final = "rfork.dev/not-injected"
"""Reason why the webhook left the Pod unchanged."""
NOTES: Final = "rfork.dev/notes"
"""Steps that the webhook could not do, one sentence per line."""
ZONE: Final = "rfork.dev/zone"
RACK: Final = "rfork.dev/rack"
NVLINK: Final = "rfork.dev/nvlink"
"""Topology of the Pod's node, set when the Pod is bound to it."""
DELETION_COST: Final = "controller.kubernetes.io/pod-deletion-cost"
"""Kubernetes' annotation: a ReplicaSet deletes its Pods with the lowest cost first."""

WEIGHTS_READY: Final = "rfork.dev/weights-ready"
"""Condition and readiness gate of a Pod."""
LWS_GROUP: Final = "leaderworkerset.sigs.k8s.io/group-key"
"""Label of a LeaderWorkerSet's Pods: the Pods of one group share it and form one replica."""

"""What to do about each error that a fork tells of."""

from __future__ import annotations

from typing import Final

ADVICE: Final[dict[str, str]] = {
    "NoSource": "Start a seed of it (`rfork seed`), or set RFORK_SNAPSHOT so that a cold start reads "
    "verified bytes once for all.",
    "PlannerUnreachable": "Check RFORK_PLANNER, and the way from the target to the planner: run "
    "`rfork doctor` on the target's host.",
    "PlannerRejected": "Set RFORK_TOKEN on the target to a token that the planner takes; the "
    "planner's log says what it refused.",
    "DeadlineExceeded": "Find what held its sources back (phases and reasons above), or raise RFORK_DEADLINE_S.",
    "LayoutMismatch": "Build the target exactly as its seed: same revision, dtype, parallel ranks and "
    "quantisation. The reason names the first tensor that differs.",
    "WrongVersion": "Give all ranks of a server one version of the weights: the same files on all nodes, or "
    "RFORK_VERSION.",
    "LeaseRejected": "Synchronise the clocks of both hosts (NTP), and give all planner replicas one "
    "RFORK_PLANNER_LEASE_KEYS.",
    "SourceUnavailable": "See in the source's log why it ended; have it drained before it ends: `rfork drain "
    "INSTANCE --wait 60`.",
    "SourceUnreachable": "Let the target's packets reach the source's ports: a firewall or network policy "
    "drops them, or the path's MTU is smaller than the interface's.",
    "SourceTimeout": "Look at the source's host and network: it sent nothing for RFORK_SOURCE_IDLE_TIMEOUT_S "
    "seconds, or less than RFORK_MIN_SOURCE_BYTES_PER_S.",
    "SourceCorrupt": "Replace the source: its memory or its network changes bytes. `rfork status` "
    "shows what its readers accuse it of.",
    "SourceWeightsChanged": "The source's weights changed meanwhile. Update weights within "
    "`seed.updating()`, which waits for readers.",
    "SourceBusy": "Start another seed, or raise RFORK_MAX_READERS on those there are.",
    "NotSameHost": "Let both containers share what the transport needs: `rfork doctor` on the host names it.",
    "PeerAccessUnavailable": "Run `rfork doctor` on the host: it says why one GPU does not reach the other.",
    "GpuDirectUnavailable": "Load nvidia-peermem, or use a driver with dma-buf: `rfork doctor` says which is missing.",
    "DeviceDown": "Mend the RDMA device or its port, or correct RFORK_RDMA_DEVICES: see `rfork doctor`.",
    "VersionMismatch": "Install the same libraries on both sides: `rfork doctor` names those that differ.",
    "TransportUnavailable": "Run `rfork doctor` on both hosts: it says why the transport cannot be used.",
    "StorageNotFound": "Correct the URI (RFORK_SNAPSHOT), or write the snapshot: `rfork snapshot URI --name MODEL`.",
    "StorageAccessDenied": "Give the target credentials that may read it: `rfork snapshot ls URI` there tries them.",
    "StorageChanged": "Write snapshots under a new name rather than over one that is read.",
    "StorageCorrupt": "Find the damage with `rfork snapshot verify URI`, and write it again.",
    "StorageFull": "Make room on the target's disk.",
    "StorageError": "Look at the disk or the object store that the reason names.",
    "CheckpointError": "Give the target a checkpoint that fits its model: the reason says what does not.",
    "MissingExtra": "Install the extra that the reason names.",
    "UnsupportedTensor": "Leave the tensor out (`exclude`), or give it memory of its own: the reason names it.",
    "SettingsError": "Correct the setting that the reason names.",
    "ModelError": "Correct the model folder: the reason says what is wrong with it.",
    "EngineMismatch": "Install a version of the engine that was tested: the reason says what this one lacks.",
    "PortInUse": "Stop the process that holds the port, or set RFORK_PEER_PORT and RFORK_HTTP_PORT to 0 "
    "(any free port), or RFORK_PORT_RANGE_SIZE to more of them.",
    "ForkFailed": "Do what the reason says: no way to get the weights was left.",
    "AllSourcesFailed": "Mend the first of its reasons: each source and each fallback failed for its own.",
}
"""By the error that a reason begins with."""

CONSEQUENCES: Final = ("NoSource", "DeadlineExceeded", "AllSourcesFailed", "ForkFailed")
"""Errors that mostly follow from those before them, which are the ones to mend."""


def advice_on(error_kinds: list[str]) -> str:
    """What to do about errors in the order in which they happened: about the last that is no consequence."""
    roots = [kind for kind in error_kinds if kind in ADVICE and kind not in CONSEQUENCES]
    known_kinds = roots or [kind for kind in error_kinds if kind in ADVICE]
    return ADVICE[known_kinds[-1]] if known_kinds else "See the target's own log around that time."

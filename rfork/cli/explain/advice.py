"""Advice for each error that a fork can report."""

from __future__ import annotations

from typing import Final

ADVICE: Final[dict[str, str]] = {
    "NoSource": "Start a seed (`rfork seed`), or set RFORK_SNAPSHOT so that a cold start reads verified bytes "
    "from storage once for the group.",
    "PlannerUnreachable": "Check RFORK_PLANNER and the network between target and planner: run `rfork doctor` "
    "on the target's host.",
    "PlannerRejected": "Set RFORK_TOKEN on the target to a token that the planner accepts. The planner's log "
    "names the rejected request.",
    "DeadlineExceeded": "Find what slowed its sources down (phases and errors above), or raise RFORK_DEADLINE_S.",
    "LayoutMismatch": "Build the target exactly like its seed: same revision, dtype, parallel ranks and "
    "quantisation. The error names the first tensor that differs.",
    "WrongVersion": "Use one version of the weights for all ranks of a replica: the same files on all nodes, or "
    "one RFORK_VERSION.",
    "LeaseRejected": "Synchronise the clocks of both hosts (NTP), and set the same RFORK_PLANNER_LEASE_KEYS on "
    "all planner replicas.",
    "SourceUnavailable": "Check the source's log for why it exited. Drain instances before they exit: `rfork drain "
    "INSTANCE --wait 60`.",
    "SourceUnreachable": "Allow connections from the target to the source's ports. A firewall or network policy "
    "drops them, or the path's MTU is smaller than the interface's.",
    "SourceTimeout": "Check the source's host and network: it sent nothing for RFORK_SOURCE_IDLE_TIMEOUT_S "
    "seconds, or less than RFORK_MIN_SOURCE_BYTES_PER_S.",
    "SourceCorrupt": "Replace the source: its memory or its network corrupts data. `rfork status` shows what its "
    "readers reported.",
    "SourceWeightsChanged": "The source's weights changed during the fork. Update weights inside "
    "`seed.updating()`, which waits for readers.",
    "SourceBusy": "Start another seed, or raise RFORK_MAX_READERS on the existing ones.",
    "NotSameHost": "Share what the transport needs between both containers: `rfork doctor` on the host names it.",
    "PeerAccessUnavailable": "Run `rfork doctor` on the host: it shows why one GPU cannot access the other.",
    "GpuDirectUnavailable": "Load nvidia-peermem, or use a driver with dma-buf: `rfork doctor` shows which is missing.",
    "DeviceDown": "Repair the RDMA device or its port, or correct RFORK_RDMA_DEVICES: see `rfork doctor`.",
    "VersionMismatch": "Install the same libraries on both sides: `rfork doctor` names those that differ.",
    "TransportUnavailable": "Run `rfork doctor` on both hosts: it shows why the transport is unavailable.",
    "StorageNotFound": "Correct the URI (RFORK_SNAPSHOT), or write the snapshot: `rfork snapshot write URI --name "
    "MODEL`.",
    "StorageAccessDenied": "Configure credentials on the target that may read it. Test them there with "
    "`rfork snapshot ls URI`.",
    "StorageChanged": "Write snapshots under a new name instead of overwriting one that is being read.",
    "StorageCorrupt": "Find the damage with `rfork snapshot verify URI`, and write the snapshot again.",
    "StorageFull": "Free space on the target's disk.",
    "StorageError": "Check the disk or object store that the error names.",
    "CheckpointError": "Use a checkpoint that fits the target's model: the error names what does not fit.",
    "MissingExtra": "Install the extra that the error names.",
    "UnsupportedTensor": "Exclude the tensor (`exclude`), or allocate separate memory for it: the error names it.",
    "SettingsError": "Correct the setting that the error names.",
    "ModelError": "Correct the model folder: the error names the problem.",
    "EngineMismatch": "Install a tested version of the engine: the error names what this one lacks.",
    "PortInUse": "Stop the process that uses the port, or set RFORK_PEER_PORT and RFORK_HTTP_PORT to 0 "
    "(any free port), or raise RFORK_PORT_RANGE_SIZE.",
    "ForkFailed": "Fix what the error names: no way to load the weights was left.",
    "AllSourcesFailed": "Fix the first of its errors: each source and each fallback failed for its own reason.",
}
"""Advice by the error with which a reason begins."""

CONSEQUENCES: Final = ("NoSource", "DeadlineExceeded", "AllSourcesFailed", "ForkFailed")
"""Errors that usually follow from earlier ones, which are the ones to fix."""
DEFAULT_ADVICE: Final = "Check the target's log around that time."


def advice_on(error_kinds: list[str]) -> str:
    """Return advice for errors in the order in which they occurred: for the last one that is a root cause."""
    root_causes = [kind for kind in error_kinds if kind in ADVICE and kind not in CONSEQUENCES]
    known = root_causes or [kind for kind in error_kinds if kind in ADVICE]
    return ADVICE[known[-1]] if known else DEFAULT_ADVICE

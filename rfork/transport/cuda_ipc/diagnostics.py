"""Explains why a source's memory cannot be opened, with hints. Runs on the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rfork.errors import NotSameHost, PeerAccessUnavailable, TransportUnavailable, VersionMismatch
from rfork.transport.cuda_ipc import libcuda
from rfork.transport.cuda_ipc.driver import Driver, DriverError, HandleType
from rfork.transport.cuda_ipc.namespaces import differing_namespaces

_PEER_ACCESS_CODES = frozenset({libcuda.PEER_ACCESS_UNSUPPORTED, libcuda.TOO_MANY_PEERS})
_MISMATCH_CODES = frozenset({libcuda.SYSTEM_DRIVER_MISMATCH, libcuda.COMPAT_NOT_SUPPORTED_ON_DEVICE})
_PEER_ACCESS_HINT = (
    "see `nvidia-smi topo -p2p r`: GPUs without NVLink need a common PCIe root without IOMMU or ACS between them, "
    "and MIG devices have no peer access; use another source or another transport"
)
_NAMESPACE_HINT = (
    "share a PID namespace (one pod with shareProcessNamespace, or hostPID; docker: --pid) and the IPC namespace "
    "(hostIPC; --ipc); or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True on the source: such "
    "memory needs neither"
)
_VISIBILITY_HINT = (
    "expose the GPUs of both instances to both containers (NVIDIA_VISIBLE_DEVICES); select with CUDA_VISIBLE_DEVICES"
)


def require_peer_access(driver: Driver, uuids: Sequence[str], devices: Sequence[int]) -> None:
    """Raise PeerAccessUnavailable if a device of the target cannot address one of the source's devices.

    A GPU that is not visible here is not checked: if CUDA_VISIBLE_DEVICES hides it, its memory can still be
    opened; if the container lacks it, opening fails later. Raises DriverError.
    """
    for uuid in uuids:
        peer = driver.device_index(uuid)
        for device in devices if peer is not None else ():
            if peer is not None and not driver.can_access_peer(device, peer):
                raise PeerAccessUnavailable(
                    f"GPU {device} ({driver.uuid(device)}) cannot address the source's GPU {peer} ({uuid})",
                    hint=_PEER_ACCESS_HINT,
                )


def explain_open_error(
    error: DriverError, handle_type: HandleType, uuid: str, driver: Driver, parameters: Mapping[str, str]
) -> TransportUnavailable:
    """Return the most likely reason for the driver's refusal to open the source's memory on the GPU `uuid`."""
    message = f"the source's GPU memory cannot be opened: {error}"
    if error.code in _PEER_ACCESS_CODES:
        return PeerAccessUnavailable(message, hint=_PEER_ACCESS_HINT)
    if error.code in _MISMATCH_CODES:
        return VersionMismatch(message, hint="the container's CUDA compatibility libraries do not match the driver")
    if handle_type == "legacy" and (names := differing_namespaces(parameters)):
        other_namespaces = " and another ".join(f"{name} namespace" for name in names).join(
            f"{name} namespace" for name in names
        )
        return NotSameHost(f"{message}; the source runs in another {other_namespaces}", hint=_NAMESPACE_HINT)
    if not _is_visible(driver, uuid):
        return TransportUnavailable(
            f"{message}; the source's GPU {uuid} is not visible to this process", hint=_VISIBILITY_HINT
        )
    if handle_type == "fabric":
        return TransportUnavailable(
            message, hint="grant the container access to the IMEX channel (/dev/nvidia-caps-imex-channels)"
        )
    return TransportUnavailable(message, hint="both instances need the same driver, and GPUs with unified addressing")


def _is_visible(driver: Driver, uuid: str) -> bool:
    try:
        return driver.device_index(uuid) is not None
    except DriverError:
        return False

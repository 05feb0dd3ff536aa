"""Why a source's memory cannot be opened here, and what to do about it. Runs on the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rfork.errors import NotSameHost, PeerAccessUnavailable, TransportUnavailable, VersionMismatch
from rfork.transport.cuda_ipc import libcuda
from rfork.transport.cuda_ipc.driver import Driver, DriverError, HandleType
from rfork.transport.cuda_ipc.namespaces import differing_namespaces

_NO_PEERS = frozenset({libcuda.PEER_ACCESS_UNSUPPORTED, libcuda.TOO_MANY_PEERS})
_MISMATCHES = frozenset({libcuda.SYSTEM_DRIVER_MISMATCH, libcuda.COMPAT_NOT_SUPPORTED_ON_DEVICE})
_PEERS = (
    "see `nvidia-smi topo -p2p r`: GPUs without NVLink need one PCIe root and no IOMMU or ACS between them, "
    "and MIG parts have none; let the fork take another source, or another transport"
)
_ONE_NAMESPACE = (
    "share a PID namespace (one pod with shareProcessNamespace, or hostPID; docker: --pid), and the IPC one "
    "with it (hostIPC; --ipc); or have PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True on the source: such "
    "memory needs neither"
)
_SEE_ALL = "let each container see the GPUs of both (NVIDIA_VISIBLE_DEVICES), and choose within by CUDA_VISIBLE_DEVICES"


def require_peer_access(driver: Driver, uuids: Sequence[str], devices: Sequence[int]) -> None:
    """Raise PeerAccessUnavailable where a device of this side cannot address one of the source's.

    One that this process does not see says nothing: CUDA_VISIBLE_DEVICES hides it, and still lets its memory
    be opened; a container that was not given it does not. That shows when it is opened. Raises DriverError.
    """
    for uuid in uuids:
        peer = driver.device_index(uuid)
        for device in devices if peer is not None else ():
            if peer is not None and not driver.can_access_peer(device, peer):
                raise PeerAccessUnavailable(
                    f"GPU {device} ({driver.uuid(device)}) cannot address the source's GPU {peer} ({uuid})",
                    hint=_PEERS,
                )


def explain_open_error(
    error: DriverError, handle_type: HandleType, uuid: str, driver: Driver, parameters: Mapping[str, str]
) -> TransportUnavailable:
    """What the driver's refusal to open the source's memory on the GPU `uuid` most likely means."""
    message = f"the source's GPU memory cannot be opened here: {error}"
    if error.code in _NO_PEERS:
        return PeerAccessUnavailable(message, hint=_PEERS)
    if error.code in _MISMATCHES:
        return VersionMismatch(message, hint="the container's CUDA compatibility libraries do not fit the driver")
    if handle_type == "legacy" and (names := differing_namespaces(parameters)):
        other = " and another ".join(f"{name} namespace" for name in names)
        return NotSameHost(f"{message}; the source runs in another {other}", hint=_ONE_NAMESPACE)
    if not _is_visible(driver, uuid):
        return TransportUnavailable(f"{message}; this process does not see the source's GPU {uuid}", hint=_SEE_ALL)
    if handle_type == "fabric":
        return TransportUnavailable(
            message, hint="give the container the IMEX channel (/dev/nvidia-caps-imex-channels)"
        )
    return TransportUnavailable(message, hint="both instances need the same driver, and GPUs with unified addressing")


def _is_visible(driver: Driver, uuid: str) -> bool:
    try:
        return driver.device_index(uuid) is not None
    except DriverError:
        return False

"""Why a source's memory cannot be opened here, and what to do about it. Runs on the target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rfork.errors import NoPeerAccess, NotOneHost, TransportUnusable, VersionMismatch
from rfork.transport.cuda_ipc import libcuda
from rfork.transport.cuda_ipc.driver import Driver, DriverError, Kind
from rfork.transport.cuda_ipc.namespaces import apart

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
_SEE_ALL = (
    "let each container see the GPUs of both (NVIDIA_VISIBLE_DEVICES), "
    "and choose within by CUDA_VISIBLE_DEVICES"
)


def check_peers(driver: Driver, uuids: Sequence[str], devices: Sequence[int]) -> None:
    """Raise NoPeerAccess where a device of this side cannot address one of the source's.

    One that this process does not see says nothing: CUDA_VISIBLE_DEVICES hides it, and still lets its memory
    be opened; a container that was not given it does not. That shows when it is opened. Raises DriverError.
    """
    for uuid in uuids:
        peer = driver.find(uuid)
        for device in devices if peer is not None else ():
            if peer is not None and not driver.reaches(device, peer):
                raise NoPeerAccess(
                    f"GPU {device} ({driver.uuid(device)}) cannot address the source's GPU {peer} ({uuid})",
                    hint=_PEERS,
                )


def refusal(
    error: DriverError, kind: Kind, uuid: str, driver: Driver, parameters: Mapping[str, str]
) -> TransportUnusable:
    """What the driver's refusal to open the source's memory on the GPU `uuid` most likely means."""
    said = f"the source's GPU memory cannot be opened here: {error}"
    if error.code in _NO_PEERS:
        return NoPeerAccess(said, hint=_PEERS)
    if error.code in _MISMATCHES:
        return VersionMismatch(
            said, hint="the container's CUDA compatibility libraries do not fit the driver"
        )
    if kind == "legacy" and (names := apart(parameters)):
        other = " and another ".join(f"{name} namespace" for name in names)
        return NotOneHost(f"{said}; the source runs in another {other}", hint=_ONE_NAMESPACE)
    if not _sees(driver, uuid):
        return TransportUnusable(f"{said}; this process does not see the source's GPU {uuid}", hint=_SEE_ALL)
    if kind == "fabric":
        return TransportUnusable(
            said, hint="give the container the IMEX channel (/dev/nvidia-caps-imex-channels)"
        )
    return TransportUnusable(
        said, hint="both instances need the same driver, and GPUs with unified addressing"
    )


def _sees(driver: Driver, uuid: str) -> bool:
    try:
        return driver.find(uuid) is not None
    except DriverError:
        return False

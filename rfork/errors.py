"""Every error rfork raises, whose fault it is, and what to do about it.

::

    RforkError
    ├── UserError                  fault: user     exit 2   mend the command, the setting or the file named
    │   ├── SettingsError          an option or environment variable has a value that cannot be used
    │   ├── MissingExtra           an optional package is not installed; names the extra that brings it
    │   ├── PortInUse              the address to listen on is taken
    │   ├── CheckpointError        a checkpoint folder is missing, incomplete or does not fit the model
    │   ├── ModelError             a model folder cannot be built into a module
    │   ├── EngineMismatch         the engine is not made as the plug-in knows it
    │   └── UnsupportedTensor      state that cannot be carried (meta, sparse, quantised, packed in a script)
    ├── TargetError                fault: target   exit 3   the side that receives is at fault
    │   ├── LayoutMismatch         target and source do not hold the same tensors; names the first difference
    │   ├── WrongVersion           one server would be made of two versions of the weights
    │   ├── LeaseRejected           a lease token is expired, forged or for another source
    │   └── DeadlineExceeded         the fork's own time is over
    ├── SourceError                fault: source   exit 4   the side that gives is at fault; another is asked
    │   ├── SourceUnavailable             refused, reset or closed the connection: the process died
    │   ├── SourceTimeout          connected, but sent nothing for too long
    │   ├── SourceCorrupt          sent bytes that do not match the manifest, or fewer than it promised
    │   ├── SourceWeightsChanged          its weights have another generation or another weights_id by now
    │   └── SourceBusy             at capacity or draining: gives no new reader a place
    ├── NetworkError               fault: network  exit 5
    │   ├── PlannerUnreachable     the planner did not answer
    │   ├── PlannerRejected         the planner answered with a problem (RFC 9457)
    │   ├── SourceUnreachable      no packet of a source arrives; it may be well, and others may reach it
    │   └── TransportUnavailable      a transport cannot work here, or between these two; the next one is taken
    │       ├── NotSameHost         memory cannot be shared: two hosts, or namespaces that part two containers
    │       ├── PeerAccessUnavailable       a GPU cannot address the other one's memory
    │       ├── GpuDirectUnavailable        the network card cannot reach GPU memory (nvidia-peermem or dma-buf)
    │       ├── DeviceDown         an RDMA device is missing, or its port is down
    │       └── VersionMismatch    the libraries of the two sides, or library and machine, do not fit
    ├── StorageError               fault: storage  exit 6   a disk or an object store failed
    │   ├── StorageNotFound         no such file, folder, object or bucket
    │   ├── StorageAccessDenied          credentials are missing, wrong, or do not reach so far
    │   ├── StorageChanged         what is read was written to, or replaced, meanwhile
    │   ├── StorageCorrupt         the bytes are not what their digest or their format promises
    │   └── StorageFull            no room is left to write
    └── ForkFailed                 fault: that of the last reason   exit 7
        ├── NoSource               nobody holds an image of this layout
        └── AllSourcesFailed            all sources and all fallbacks failed; carries each reason in order

A source is only ever blamed (``fault == "source"``) for what it did itself, so that one bad target
cannot drive every seed of a fleet into quarantine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

Fault = Literal["user", "target", "source", "network", "storage"]


class RforkError(Exception):
    """Base of all rfork errors: one clear line, and what to do in `hint`."""

    fault: Fault = "user"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def kind(self) -> str:
        """The word used for this error in reports, metric labels and on the wire."""
        return type(self).__name__


class UserError(RforkError):
    """The command, a setting or a file that the user named is wrong."""

    exit_code = 2


class SettingsError(UserError):
    """An option or environment variable has a value that cannot be used."""


class MissingExtra(UserError):
    """An optional package is not installed."""

    def __init__(self, what: str, *, extra: str, why: str = "") -> None:
        because = f": {why}" if why else ""
        super().__init__(f"{what} is not available{because}", hint=f"pip install 'rfork[{extra}]'")


class PortInUse(UserError):
    """The address to listen on is taken by another process; of several ports (`last`), each of them is."""

    def __init__(self, host: str, port: int, *, setting: str, last: int | None = None) -> None:
        several = last is not None and last > port
        super().__init__(
            f"cannot listen on {host}:{port}-{last}: all of these ports are in use"
            if several
            else f"cannot listen on {host}:{port}: the address is in use",
            hint=f"stop the process that holds it, or set {setting} to a free port (0 picks one)"
            + (", or RFORK_PORT_RANGE_SIZE to more" if several else ""),
        )


class CheckpointError(UserError):
    """A checkpoint folder is missing, incomplete or does not fit the model."""


class ModelError(UserError):
    """A model folder cannot be built into a module."""


class EngineMismatch(UserError):
    """The engine is not made as the plug-in knows it: it is another version than those tested."""


class UnsupportedTensor(UserError):
    """State of the module that cannot be carried: a tensor without bytes, or what is in no tensor."""

    def __init__(self, name: str, why: str, *, hint: str = "") -> None:
        super().__init__(f"{name!r} cannot be captured: {why}", hint=hint)
        self.name = name


class TargetError(RforkError):
    """The side that receives is at fault."""

    fault = "target"
    exit_code = 3


class LayoutMismatch(TargetError):
    """Target and source do not hold the same tensors."""


class WrongVersion(TargetError):
    """A rank would get weights of another version than its replica has."""


class LeaseRejected(TargetError):
    """A lease token is expired, forged or for another source."""


class DeadlineExceeded(TargetError):
    """The fork's own time is over."""


class SourceError(RforkError):
    """The side that gives is at fault; the fork goes on with another source."""

    fault = "source"
    exit_code = 4


class SourceUnavailable(SourceError):
    """The source refused, reset or closed the connection."""


class SourceTimeout(SourceError):
    """The source is connected but sent nothing for too long."""


class SourceCorrupt(SourceError):
    """The source sent bytes that do not match the manifest, or fewer than it promised."""


class SourceWeightsChanged(SourceError):
    """The source's weights have another generation or another `weights_id` by now."""


class SourceBusy(SourceError):
    """The source is at capacity or draining."""


class NetworkError(RforkError):
    """Something between the two sides failed."""

    fault = "network"
    exit_code = 5


class PlannerUnreachable(NetworkError):
    """The planner did not answer. `silent`: not in time, though it took the request: it may go on with it."""

    def __init__(self, message: str, *, hint: str = "", silent: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.silent = silent


class PlannerRejected(NetworkError):
    """The planner answered with a problem document (RFC 9457).

    `status` is the HTTP status; `problem` is the last part of the problem's type URI.
    """

    def __init__(self, message: str, *, status: int, problem: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.problem = problem


class SourceUnreachable(NetworkError):
    """No packet of a source arrives. It may be well, and others may reach it: it is not to blame."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            hint="a firewall or network policy drops packets between the two, or large packets are lost:"
            " compare the MTU of both ends (`ip link`, `ping -M do -s 1472 HOST`)",
        )


class TransportUnavailable(NetworkError):
    """A transport cannot work here, or between these two sides; the next one is taken."""


class NotSameHost(TransportUnavailable):
    """Memory cannot be shared: the two run on two hosts, or in namespaces that part them."""


class PeerAccessUnavailable(TransportUnavailable):
    """A GPU cannot address the other one's memory."""


class GpuDirectUnavailable(TransportUnavailable):
    """The network card cannot reach GPU memory."""


class DeviceDown(TransportUnavailable):
    """An RDMA device is missing, or its port is down."""


class VersionMismatch(TransportUnavailable):
    """The libraries of the two sides, or a library and the machine, do not fit."""


class StorageError(RforkError):
    """A disk or an object store failed."""

    fault = "storage"
    exit_code = 6


class StorageNotFound(StorageError):
    """There is no such file, folder, object or bucket."""


class StorageAccessDenied(StorageError):
    """Credentials are missing, wrong, or do not reach so far."""


class StorageChanged(StorageError):
    """What is read was written to, or replaced by another, since it was opened."""


class StorageCorrupt(StorageError):
    """The bytes are not what their digest or their format promises."""


class StorageFull(StorageError):
    """No room is left to write."""


class ForkFailed(RforkError):
    """No way to get the weights is left."""

    exit_code = 7


class NoSource(ForkFailed):
    """Nobody holds an image of this layout."""

    fault = "network"


class AllSourcesFailed(ForkFailed):
    """All sources and all fallbacks failed; `reasons` holds each in the order it happened."""

    def __init__(self, message: str, reasons: Sequence[RforkError], *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reasons = tuple(reasons)
        if self.reasons:
            self.fault = self.reasons[-1].fault

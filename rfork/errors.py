"""Error tree of rfork: whose fault each error is, and a hint.

::

    RforkError
    ├── UserError                  fault: user     exit 2   fix the command, the setting or the file
    │   ├── SettingsError          an option or environment variable has an invalid value
    │   ├── MissingExtra           an optional package is not installed; names the extra that contains it
    │   ├── PortInUse              the address to listen on is in use
    │   ├── CheckpointError        a checkpoint folder is missing, incomplete or does not match the model
    │   ├── ModelError             a model folder cannot be built into a module
    │   ├── EngineMismatch         the engine's interface differs from what the plug-in expects
    │   └── UnsupportedTensor      state that cannot be transferred (meta, sparse, quantised, packed in a script)
    ├── TargetError                fault: target   exit 3   the target is at fault
    │   ├── LayoutMismatch         target and source do not have the same tensors; names the first difference
    │   ├── WrongVersion           one server would have two versions of the weights
    │   ├── LeaseRejected          a lease token is expired, forged or for another source
    │   ├── DeadlineExceeded       the fork's deadline has passed
    │   └── ForkCancelled          this process no longer needs the weights
    ├── SourceError                fault: source   exit 4   the source is at fault; another one is used
    │   ├── SourceUnavailable      refused, reset or closed the connection: the process died
    │   ├── SourceTimeout          connected, but sent nothing for too long
    │   ├── SourceCorrupt          sent bytes that do not match the manifest, or fewer than announced
    │   ├── SourceWeightsChanged   its weights have a different generation or weights_id now
    │   └── SourceBusy             at capacity or draining: accepts no new reader
    ├── NetworkError               fault: network  exit 5
    │   ├── PlannerUnreachable     the planner did not respond
    │   ├── PlannerRejected        the planner responded with a problem (RFC 9457)
    │   ├── SourceUnreachable      no packet of a source arrives; it may work for other targets
    │   └── TransportUnavailable   a transport does not work here, or between these two; the next one is used
    │       ├── NotSameHost            memory cannot be shared: different hosts, or separate namespaces
    │       ├── PeerAccessUnavailable  a GPU cannot address the other GPU's memory
    │       ├── GpuDirectUnavailable   the network card cannot access GPU memory (nvidia-peermem or dma-buf)
    │       ├── DeviceDown             an RDMA device is missing, or its port is down
    │       └── VersionMismatch        libraries of the two sides, or library and machine, are incompatible
    ├── StorageError               fault: storage  exit 6   a disk or an object store failed
    │   ├── StorageNotFound        no such file, folder, object or bucket
    │   ├── StorageAccessDenied    credentials are missing, wrong or insufficient
    │   ├── StorageChanged         the object was modified or replaced during the read
    │   ├── StorageCorrupt         the bytes do not match their digest or their format
    │   └── StorageFull            no space is left to write
    └── ForkFailed                 fault: that of the last reason   exit 7
        ├── NoSource               no instance has an image of this layout
        ├── SlowSources            the sources are slower than the target's own storage
        └── AllSourcesFailed       all sources and all fallbacks failed; contains each reason in order

A source is blamed (``fault == "source"``) only for its own faults, so that one bad target cannot quarantine a fleet's
seeds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar, Final, Literal, TypeVar

Fault = Literal["user", "target", "source", "network", "storage"]
ErrorT = TypeVar("ErrorT", bound=BaseException)
ALL_TENSORS: Final = "(all)"
"""Name that an `UnsupportedTensor` has if it concerns the complete model."""
_python_details: Final = re.compile(r"^\[Errno -?\d+\] |( \(_ssl\.c:\d+\))$")
"""Text that Python adds to the messages of the operating system and of OpenSSL."""


def reason_of(error: BaseException) -> str:
    """Return the message of any error on one line, without error numbers; its class name if it has no message."""
    return _python_details.sub("", " ".join(str(error).split())) or type(error).__name__


class RforkError(Exception):
    """Base of all rfork errors: one clear line, and advice in `hint`."""

    fault: Fault = "user"
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def kind(self) -> str:
        """Name of this error in reports, metric labels and on the wire."""
        return type(self).__name__

    def add_party(self, address: str) -> None:
        """Begin the message with the address of the party that it is about, unless it names that host already."""
        if address.rpartition(":")[0] not in str(self):
            self.args = (f"{address}: {self}", *self.args[1:])


class UserError(RforkError):
    """A command, a setting or a file of the user is wrong."""

    exit_code = 2


class SettingsError(UserError):
    """An option or environment variable has an invalid value."""


class MissingExtra(UserError):
    """An optional package is not installed."""

    def __init__(self, what: str, *, extra: str, reason: str = "") -> None:
        detail = f": {reason}" if reason else ""
        super().__init__(f"{what} is not available{detail}", hint=f"pip install 'rfork[{extra}]'")


class PortInUse(UserError):
    """The address to listen on is in use by another process; of several ports (`last`), all of them are."""

    def __init__(self, host: str, port: int, *, setting: str, last: int | None = None) -> None:
        several = last is not None and last > port
        super().__init__(
            f"cannot listen on {host}:{port}-{last}: all of these ports are in use"
            if several
            else f"cannot listen on {host}:{port}: the address is in use",
            hint=f"stop the process that uses it, or set {setting} to a free port (0 picks one)"
            + (", or raise RFORK_PORT_RANGE_SIZE" if several else ""),
        )


class CheckpointError(UserError):
    """A checkpoint folder is missing, incomplete or does not match the model."""


class ModelError(UserError):
    """A module cannot be built from a model folder."""


class EngineMismatch(UserError):
    """The engine's interface differs from what the plug-in expects: it is an untested version."""


class UnsupportedTensor(UserError):
    """State of the module that cannot be transferred: a tensor without bytes, or state outside tensors.

    `name` is the tensor's; `ALL_TENSORS` stands for the complete model.
    """

    def __init__(self, name: str, why: str, *, hint: str = "") -> None:
        subject = "the model" if name == ALL_TENSORS else repr(name)
        super().__init__(f"{subject} cannot be captured: {why}", hint=hint)
        self.name = name


class TargetError(RforkError):
    """The target is at fault."""

    fault = "target"
    exit_code = 3


class LayoutMismatch(TargetError):
    """Target and source do not have the same tensors."""


class WrongVersion(TargetError):
    """A rank would get weights of a version that differs from its replica's."""


class LeaseRejected(TargetError):
    """A lease token is expired, forged or for another source."""


class DeadlineExceeded(TargetError):
    """The fork's deadline has passed."""


class ForkCancelled(TargetError):
    """This process no longer needs the weights."""


class SourceError(RforkError):
    """The source is at fault; the fork continues with another source."""

    fault = "source"
    exit_code = 4


class SourceUnavailable(SourceError):
    """The source refused, reset or closed the connection."""


class SourceTimeout(SourceError):
    """The source is connected but sent nothing for too long."""


class SourceCorrupt(SourceError):
    """The source sent bytes that do not match the manifest, or fewer than announced."""


class SourceWeightsChanged(SourceError):
    """The source's weights have a different generation or `weights_id` now."""


class SourceBusy(SourceError):
    """The source is at capacity or draining."""


class NetworkError(RforkError):
    """The network between the two sides failed."""

    fault = "network"
    exit_code = 5


class PlannerUnreachable(NetworkError):
    """The planner did not respond. `silent`: it accepted the request but did not respond in time, and may
    still process it.
    """

    def __init__(self, message: str, *, hint: str = "", silent: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.silent = silent


class PlannerRejected(NetworkError):
    """The planner returned a problem document (RFC 9457).

    `status` is the HTTP status; `problem` is the last part of the problem's type URI.
    """

    def __init__(self, message: str, *, status: int, problem: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.problem = problem


class SourceUnreachable(NetworkError):
    """No packet of a source arrives. It may work for other targets, so it is not blamed."""

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            hint="a firewall or network policy drops packets between the two hosts, or large packets are lost:"
            " compare the MTU of both ends (`ip link`, `ping -M do -s 1472 HOST`)",
        )


class TransportUnavailable(NetworkError):
    """A transport does not work here, or between these two sides; the next one is used."""


class NotSameHost(TransportUnavailable):
    """Memory cannot be shared: the two are on different hosts, or in separate namespaces."""


class PeerAccessUnavailable(TransportUnavailable):
    """A GPU cannot address the other GPU's memory."""


class GpuDirectUnavailable(TransportUnavailable):
    """The network card cannot access GPU memory."""


class DeviceDown(TransportUnavailable):
    """An RDMA device is missing, or its port is down."""


class VersionMismatch(TransportUnavailable):
    """The libraries of the two sides, or a library and the machine, are incompatible."""


class StorageError(RforkError):
    """A disk or an object store failed."""

    fault = "storage"
    exit_code = 6


class StorageNotFound(StorageError):
    """There is no such file, folder, object or bucket."""


class StorageAccessDenied(StorageError):
    """Credentials are missing, wrong or insufficient."""


class StorageChanged(StorageError):
    """The object was modified or replaced after it was opened."""


class StorageCorrupt(StorageError):
    """The bytes do not match their digest or their format."""


class StorageFull(StorageError):
    """No space is left to write."""


class ForkFailed(RforkError):
    """All sources and fallbacks failed."""

    exit_code = 7


class NoSource(ForkFailed):
    """No instance has an image of this layout."""

    fault = "network"


class SlowSources(ForkFailed):
    """The sources are slower than the target's own storage; no instance is blamed."""

    fault = "network"


class AllSourcesFailed(ForkFailed):
    """All sources and all fallbacks failed; `reasons` lists them in order."""

    def __init__(self, message: str, reasons: Sequence[RforkError], *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reasons = tuple(reasons)
        if self.reasons:
            self.fault = self.reasons[-1].fault


def without_frames(error: ErrorT) -> ErrorT:
    """Remove the tracebacks of an error and of the errors before it; returns the error.

    An error that is kept would otherwise keep the local variables of all callers, with a fork's module.
    """
    left: list[BaseException | None] = [error]
    seen: set[int] = set()  # an error that was raised again may come before itself
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            left += (each.__cause__, each.__context__)
    return error

"""The `mooncake.engine` library: which wheel is there, whether it imports, what it is told.

Three wheels bring the same module, so two of them installed together overwrite one another. Nothing
here opens a port or creates an engine. Runs on both sides.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Literal, Protocol, cast

from rfork.errors import DeviceDown, MissingExtra, TransportUnavailable, VersionMismatch
from rfork.transport.mooncake.gpu_direct import has_open_modules, has_peer_module

WireProtocol = Literal["rdma", "tcp"]
"""What the engine moves bytes over."""

WHEELS = {
    "mooncake-transfer-engine-non-cuda": "mooncake",
    "mooncake-transfer-engine": "mooncake-cuda12",
    "mooncake-transfer-engine-cuda13": "mooncake-cuda13",
}
"""Each wheel that brings `mooncake.engine`, and the extra of rfork that installs it."""

SYSTEM_PACKAGES = {
    "libibverbs.so": "libibverbs1",
    "librdmacm.so": "librdmacm1",
    "libnuma.so": "libnuma1",
    "libcurl.so": "libcurl4",
    "libssl.so": "libssl3",
    "libcrypto.so": "libssl3",
}
"""The Debian package of each system library that the wheels load."""

CUDA_OF = {"mooncake-transfer-engine": "12", "mooncake-transfer-engine-cuda13": "13"}
"""The major version of CUDA that a wheel is made for."""

_ENVIRONMENT = {
    # A stopped peer is noticed in about 2 s instead of 30.
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TRANSFER_TIMEOUT": "5",
    # Past its queue limit the engine fails a transfer at once, without a word.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_LOG_LEVEL": "ERROR",
}
_FORCE_TCP = "MC_FORCE_TCP"

_starting = threading.Lock()


class NativeEngine(Protocol):
    """The methods of `mooncake.engine.TransferEngine` in use; any call before `initialize` crashes."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        """Start the engine and its ports; 0 means done."""
        ...

    def get_rpc_port(self) -> int:
        """The handshake port."""
        ...

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        """Register areas; lists of different length are read past their end. 0 means done."""
        ...

    def batch_unregister_memory(self, addresses: list[int]) -> int:
        """Undo `batch_register_memory`; 0 means done."""
        ...

    def batch_transfer_async_read(self, session: str, local: list[int], remote: list[int], lengths: list[int]) -> int:
        """Start reads; the batch's number, 0 when refused. The first of a session does the handshake."""
        ...

    def transfer_check_status(self, batch: int) -> int:
        """State of a batch's *first* read: 1 done, -1 failed (both free it), -2 late, 0 under way."""
        ...


@dataclass(frozen=True, slots=True)
class LibraryState:
    """What there is of Mooncake on this machine; `error` is empty when it imports."""

    wheels: tuple[str, ...]
    error: str = ""
    hint: str = ""
    cuda: bool = False

    @property
    def extra(self) -> str:
        """The extra of rfork that brings what is (or, when nothing is, what should be) installed."""
        return WHEELS[self.wheels[0]] if self.wheels else "mooncake"


def _configure_environment() -> None:
    """Set the variables the C++ library reads, where the user has not; it takes no other configuration.

    Some are read when the library is imported, others by each new engine.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not has_peer_module() and has_open_modules():
        # It takes the kernel module for granted otherwise, and fails to register GPU memory.
        os.environ.setdefault("WITH_NVIDIA_PEERMEM", "0")


def start_engine(wire: WireProtocol, host: str, devices: str) -> NativeEngine:
    """A native engine that listens at `host`, over RDMA on these devices (comma separated).

    Raises MissingExtra when there is no usable library, DeviceDown (over RDMA) or TransportUnavailable when the
    engine does not start.
    """
    state = library_state()
    if state.error:
        error = MissingExtra("transfer_engine", extra=state.extra, why=state.error)
        error.hint = state.hint or error.hint
        raise error
    create = importlib.import_module("mooncake.engine").TransferEngine
    with _protocol_env(wire == "tcp"):
        native = cast(NativeEngine, create())
        status = native.initialize(host, "P2PHANDSHAKE", wire, devices)
    if status != 0:
        failed = DeviceDown if wire == "rdma" else TransportUnavailable
        raise failed(
            f"transfer_engine could not start over {wire} at {host}" + (devices and f" ({devices})"),
            hint="run with MC_LOG_LEVEL=INFO to see why; check RFORK_ADVERTISE and RFORK_RDMA_DEVICES",
        )
    return native


@contextmanager
def _protocol_env(wanted: bool) -> Iterator[None]:
    """Tell an engine that starts in this block what to run over, and no other.

    It goes by this variable alone: where there is an RDMA device it would take that, whatever it is told.
    The variable is the process's, and engines start on several threads. It is written where it has to be
    only, as C++ code of other libraries may read the environment at this moment.
    """
    with _starting:
        before = os.environ.get(_FORCE_TCP)
        if (before is not None) == wanted:
            yield
            return
        try:
            _set_environment(_FORCE_TCP, "1" if wanted else None)
            yield
        finally:
            _set_environment(_FORCE_TCP, before)


def _set_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def installed_wheels() -> tuple[str, ...]:
    """Those of the three wheels that are installed."""
    return tuple(wheel for wheel in WHEELS if _is_installed(wheel))


def library_state() -> LibraryState:
    """Import the library and say what came of it; never raises."""
    wheels = installed_wheels()
    _configure_environment()
    try:
        engine = importlib.import_module("mooncake.engine")
    except ImportError as error:
        return LibraryState(wheels, str(error), import_hint(str(error), wheels))
    if len(wheels) > 1:
        found = " and ".join(wheels)
        return LibraryState(
            wheels,
            f"{found} are both installed and overwrite one another",
            f"pip uninstall -y {' '.join(wheels)}, then install one of them",
            bool(getattr(engine, "SUPPORT_CUDA", False)),
        )
    return LibraryState(wheels, cuda=bool(getattr(engine, "SUPPORT_CUDA", False)))


def import_hint(error: str, wheels: Iterable[str]) -> str:
    """What to do about an ImportError of `mooncake.engine`."""
    if not tuple(wheels):
        return "pip install 'rfork[mooncake]' (with CUDA: rfork[mooncake-cuda12] or rfork[mooncake-cuda13])"
    if "libcudart" in error or "libcuda.so" in error:
        return (
            "the installed wheel is for another CUDA than this machine has: uninstall it, then "
            "pip install 'rfork[mooncake]' (no CUDA), 'rfork[mooncake-cuda12]' or 'rfork[mooncake-cuda13]'"
        )
    for library, package in SYSTEM_PACKAGES.items():
        if library in error:
            return f"apt-get install {package}"
    return "reinstall the wheel: " + ", ".join(wheels)


def require_cuda(state: LibraryState, torch_cuda: str | None) -> None:
    """See that the wheel takes memory of the CUDA that torch is built for (`torch.version.cuda`).

    Raises VersionMismatch, whose hint names the extra that does.
    """
    major = (torch_cuda or "").partition(".")[0]
    wheel = state.wheels[0] if state.wheels else "this mooncake"
    if not state.cuda:
        raise VersionMismatch(f"{wheel} cannot read GPU memory", hint=reinstall_hint(state, major))
    made_for = CUDA_OF.get(wheel)
    if major and made_for is not None and made_for != major:
        raise VersionMismatch(
            f"{wheel} is for CUDA {made_for}, and torch for CUDA {major}", hint=reinstall_hint(state, major)
        )


def reinstall_hint(state: LibraryState, cuda: str) -> str:
    """How to put the right wheel in the place of what is installed; `cuda` is a major version or empty."""
    with_cuda = [extra for extra in WHEELS.values() if "cuda" in extra]
    fits = [extra for extra in with_cuda if extra.endswith(f"cuda{cuda}")] or with_cuda
    install = " or ".join(f"'rfork[{extra}]'" for extra in fits)
    # Both bring the same module: to install one over the other leaves a mixture.
    remove = f"pip uninstall -y {' '.join(state.wheels)}, then " if state.wheels else ""
    return f"{remove}pip install {install}"


def _is_installed(wheel: str) -> bool:
    try:
        metadata.distribution(wheel)
    except metadata.PackageNotFoundError:
        return False
    return True

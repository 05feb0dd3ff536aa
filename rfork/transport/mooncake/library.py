"""The `mooncake.engine` library: installed wheels, import errors and configuration.

Three wheels contain the same module, so installing two of them mixes their files. This module opens no port,
and creates an engine only in `start_engine`. Runs on both sides.
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
from rfork.transport.mooncake.topology import has_open_modules, has_peer_module

WireProtocol = Literal["rdma", "tcp"]
"""Protocol that the engine uses on the network."""

WHEELS = {
    "mooncake-transfer-engine-non-cuda": "mooncake",
    "mooncake-transfer-engine": "mooncake-cuda12",
    "mooncake-transfer-engine-cuda13": "mooncake-cuda13",
}
"""Each wheel that contains `mooncake.engine`, and the extra of rfork that installs it."""

SYSTEM_PACKAGES = {
    "libibverbs.so": "libibverbs1",
    "librdmacm.so": "librdmacm1",
    "libnuma.so": "libnuma1",
    "libcurl.so": "libcurl4",
    "libssl.so": "libssl3",
    "libcrypto.so": "libssl3",
}
"""Debian package of each system library that the wheels load."""

CUDA_OF = {"mooncake-transfer-engine": "12", "mooncake-transfer-engine-cuda13": "13"}
"""Major CUDA version that a wheel is built for."""

_ENVIRONMENT = {
    # Detect an unresponsive peer in about 2 s instead of 30 s.
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TRANSFER_TIMEOUT": "5",
    # Beyond its queue limit the engine fails transfers immediately, without an error message.
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_LOG_LEVEL": "ERROR",
}
_FORCE_TCP = "MC_FORCE_TCP"

_environment_lock = threading.Lock()


class NativeEngine(Protocol):
    """The methods of `mooncake.engine.TransferEngine` in use; any call before `initialize` crashes."""

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        """Start the engine and open its ports; 0 on success."""
        ...

    def get_rpc_port(self) -> int:
        """Return the handshake port."""
        ...

    def batch_register_memory(self, addresses: list[int], lengths: list[int]) -> int:
        """Register areas; 0 on success. Reads out of bounds if the lists differ in length."""
        ...

    def batch_unregister_memory(self, addresses: list[int]) -> int:
        """Undo `batch_register_memory`; 0 on success."""
        ...

    def batch_transfer_async_read(self, session: str, local: list[int], remote: list[int], lengths: list[int]) -> int:
        """Start reads and return the batch's number, 0 if rejected. The first batch of a session does the
        handshake.
        """
        ...

    def transfer_check_status(self, batch: int) -> int:
        """State of a batch's *first* read: 1 done, -1 failed (both free it), -2 late, 0 running."""
        ...


@dataclass(frozen=True, slots=True)
class LibraryState:
    """State of Mooncake on this machine; `error` is empty if it can be imported."""

    wheels: tuple[str, ...]
    error: str = ""
    hint: str = ""
    cuda: bool = False

    @property
    def extra(self) -> str:
        """Extra of rfork that installs the present wheel, or the default wheel if none is installed."""
        return WHEELS[self.wheels[0]] if self.wheels else "mooncake"


def _configure_environment() -> None:
    """Set the environment variables of the C++ library, unless the user has; it has no other configuration.

    Some are read when the library is imported, others by each new engine.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not has_peer_module() and has_open_modules():
        # Otherwise it assumes that the kernel module is loaded, and fails to register GPU memory.
        os.environ.setdefault("WITH_NVIDIA_PEERMEM", "0")


def start_engine(wire: WireProtocol, host: str, devices: str) -> NativeEngine:
    """Return a native engine that listens at `host`, over RDMA on these devices (comma separated).

    Raises MissingExtra if the library is unusable, DeviceDown (over RDMA) or TransportUnavailable if the
    engine does not start.
    """
    state = library_state()
    if state.error:
        error = MissingExtra("transfer_engine", extra=state.extra, reason=state.error)
        error.hint = state.hint or error.hint
        raise error
    create = importlib.import_module("mooncake.engine").TransferEngine
    with _protocol_env(wire == "tcp"):
        native = cast(NativeEngine, create())
        status = native.initialize(host, "P2PHANDSHAKE", wire, devices)
    if status != 0:
        error_type = DeviceDown if wire == "rdma" else TransportUnavailable
        raise error_type(
            f"transfer_engine could not start over {wire} at {host}" + (devices and f" ({devices})"),
            hint="run with MC_LOG_LEVEL=INFO for details; check RFORK_ADVERTISE and RFORK_RDMA_DEVICES",
        )
    return native


@contextmanager
def _protocol_env(force_tcp: bool) -> Iterator[None]:
    """Force engines that start in this context to use TCP, or not to.

    Only this variable selects the protocol: otherwise the engine uses any RDMA device it finds, regardless of
    its arguments. The variable is global, and engines start on several threads. It is written only if needed,
    because C++ code of other libraries may read the environment concurrently.
    """
    with _environment_lock:
        before = os.environ.get(_FORCE_TCP)
        if (before is not None) == force_tcp:
            yield
            return
        try:
            _set_environment(_FORCE_TCP, "1" if force_tcp else None)
            yield
        finally:
            _set_environment(_FORCE_TCP, before)


def _set_environment(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def has_wheel() -> bool:
    """Return whether a wheel of the library is installed. Does not import it."""
    return any(map(_is_installed, WHEELS))


def library_state() -> LibraryState:
    """Import the library and return the result; never raises."""
    wheels = tuple(filter(_is_installed, WHEELS))
    _configure_environment()
    try:
        engine = importlib.import_module("mooncake.engine")
    except ImportError as error:
        is_absent = isinstance(error, ModuleNotFoundError) and not wheels
        problem = "is not installed" if is_absent else f"cannot be imported: {error}"
        return LibraryState(wheels, f"the Mooncake library {problem}", import_hint(str(error), wheels))
    if len(wheels) > 1:
        names = " and ".join(wheels)
        return LibraryState(
            wheels,
            f"{names} are both installed and overwrite each other's files",
            f"pip uninstall -y {' '.join(wheels)}, then install one of them",
            bool(getattr(engine, "SUPPORT_CUDA", False)),
        )
    return LibraryState(wheels, cuda=bool(getattr(engine, "SUPPORT_CUDA", False)))


def import_hint(error: str, wheels: Iterable[str]) -> str:
    """Return a hint for an ImportError of `mooncake.engine`."""
    if not tuple(wheels):
        return "pip install 'rfork[mooncake]' (with CUDA: rfork[mooncake-cuda12] or rfork[mooncake-cuda13])"
    if "libcudart" in error or "libcuda.so" in error:
        return (
            "the installed wheel is for a different CUDA version: uninstall it, then "
            "pip install 'rfork[mooncake]' (no CUDA), 'rfork[mooncake-cuda12]' or 'rfork[mooncake-cuda13]'"
        )
    for library, package in SYSTEM_PACKAGES.items():
        if library in error:
            return f"apt-get install {package}"
    return "reinstall the wheel: " + ", ".join(wheels)


def require_cuda(state: LibraryState, torch_cuda: str | None) -> None:
    """Check that the wheel supports the CUDA version of torch (`torch.version.cuda`).

    Raises VersionMismatch with a hint that names the right extra.
    """
    major = (torch_cuda or "").partition(".")[0]
    wheel = state.wheels[0] if state.wheels else "this mooncake"
    if not state.cuda:
        raise VersionMismatch(f"{wheel} cannot read GPU memory", hint=reinstall_hint(state, major))
    wheel_cuda = CUDA_OF.get(wheel)
    if major and wheel_cuda is not None and wheel_cuda != major:
        raise VersionMismatch(
            f"{wheel} is built for CUDA {wheel_cuda}, but torch for CUDA {major}", hint=reinstall_hint(state, major)
        )


def reinstall_hint(state: LibraryState, cuda: str) -> str:
    """Return the commands that replace the installed wheels; `cuda` is a major version or empty."""
    with_cuda = [extra for extra in WHEELS.values() if "cuda" in extra]
    matching = [extra for extra in with_cuda if extra.endswith(f"cuda{cuda}")] or with_cuda
    install = " or ".join(f"'rfork[{extra}]'" for extra in matching)
    # The wheels contain the same module: installing one over another mixes their files.
    uninstall = f"pip uninstall -y {' '.join(state.wheels)}, then " if state.wheels else ""
    return f"{uninstall}pip install {install}"


def _is_installed(wheel: str) -> bool:
    try:
        metadata.distribution(wheel)
    except metadata.PackageNotFoundError:
        return False
    return True

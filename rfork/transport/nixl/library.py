"""The `nixl` library: installed wheels, import errors, and the environment of UCX. Runs on both sides.

NIXL's own agent class polls its sockets without a pause, which costs a serving process a fifth of a core for
each agent. So rfork uses the extension module below it, where the interval is a parameter.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final, Protocol, cast

from rfork.errors import MissingExtra, TransportUnavailable, VersionMismatch

MODULES: Final[Mapping[str, str]] = {"nixl": "nixl", "nixl_cu13": "nixl-cu13", "nixl_cu12": "nixl-cu12"}
"""Each module that contains the extension, and its wheel: the first one chooses among the others by CUDA."""
PROGRESS_INTERVAL_US: Final = 10_000
"""Interval of the progress thread without events. With 0, NIXL's default, an idle agent uses 20% of a core."""

_LIBRARY_ENVIRONMENT: Final[Mapping[str, str | None]] = {
    # UCX would replace the process's handlers of SIGSEGV and others.
    "UCX_HANDLE_ERRORS": "none",
    "UCX_ERROR_SIGNALS": "",
    # … and that of SIGHUP, to start a debugger.
    "UCX_DEBUG_SIGNO": "0",
    # A peer that disappears is not an error of this process.
    "UCX_LOG_LEVEL": "fatal",
    "NIXL_LOG_LEVEL": "FATAL",
}
_ATTRIBUTES: Final = ("nixlAgent", "nixlAgentConfig", "nixlRegDList", "nixlXferDList", "NIXL_THREAD_SYNC_STRICT")

_environment_lock = threading.Lock()

Descriptor = tuple[int, int, int]
"""Address, length in bytes, and device index (0 in host memory)."""


class NativeAgent(Protocol):
    """The methods of `nixl._bindings.nixlAgent` in use. Each raises an error named nixl…Error."""

    def createBackend(self, name: str, options: Mapping[str, str]) -> int:
        """Start a backend and return its handle."""
        ...

    def registerMem(self, regions: object, backends: Sequence[int]) -> object:
        """Register memory with these backends."""
        ...

    def getLocalMD(self) -> bytes:
        """Return the agent's addresses and the keys of its registered memory."""
        ...

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        """Load the metadata of another agent and return its name. Malformed metadata may end the process."""
        ...

    def createXferReq(
        self, operation: object, local: object, remote: object, agent: str, message: bytes, backends: Sequence[int]
    ) -> int:
        """Return the handle of a transfer that has not started."""
        ...

    def postXferReq(self, handle: int, message: bytes) -> object:
        """Start a transfer; within one host it is often done on return."""
        ...

    def getXferStatus(self, handle: int) -> object:
        """Return the state of a transfer."""
        ...

    def releaseXferReq(self, handle: int) -> object:
        """Free a transfer. One that is still running is not stopped."""
        ...


@dataclass(frozen=True, slots=True)
class NixlLibrary:
    """State of NIXL on this machine; `error` is empty if it can be imported."""

    version: str = ""
    wheels: tuple[str, ...] = ()
    error: str = ""
    hint: str = ""


def library_state() -> NixlLibrary:
    """Import the library and return the result; never raises."""
    versions = {wheel: version for wheel in MODULES.values() if (version := _installed_version(wheel))}
    try:
        bindings()
    except MissingExtra as error:
        return NixlLibrary(next(iter(versions.values()), ""), tuple(versions), str(error), error.hint)
    return NixlLibrary(next(iter(versions.values()), ""), tuple(versions))


def bindings() -> ModuleType:
    """Return the extension module. Raises MissingExtra if it cannot be used."""
    name = next((name for name in MODULES if find_spec(name) is not None), None)
    if name is None:
        raise MissingExtra("nixl", extra="nixl", reason="the NIXL library is not installed")
    try:
        with environment(_LIBRARY_ENVIRONMENT):
            module = importlib.import_module(name)
            # `nixl` puts the extension that fits torch's CUDA under this name.
            extension = importlib.import_module(f"{name}._bindings")
    except ImportError as error:
        missing = MissingExtra("nixl", extra="nixl", reason=f"the NIXL library cannot be imported: {error}")
        missing.hint = f"reinstall the wheel: {MODULES[name]}"
        raise missing from error
    if absent := [attribute for attribute in _ATTRIBUTES if not hasattr(extension, attribute)]:
        raise MissingExtra("nixl", extra="nixl", reason=f"{module.__name__} lacks {', '.join(absent)}")
    return extension


def start_agent(
    name: str, backend: str, options: Mapping[str, str], variables: Mapping[str, str | None]
) -> NativeAgent:
    """Return a native agent with one backend. `variables` are the environment in which the backend starts.

    Raises MissingExtra if the library is unusable, TransportUnavailable if the backend does not start.
    """
    module: Any = bindings()
    config = module.nixlAgentConfig()
    config.useProgThread, config.useListenThread, config.captureTelemetry = True, False, False
    config.syncMode = module.NIXL_THREAD_SYNC_STRICT
    config.pthrDelay = PROGRESS_INTERVAL_US
    try:
        # UCX is loaded with the first backend.
        with environment({**_LIBRARY_ENVIRONMENT, **variables}):
            native = cast(NativeAgent, module.nixlAgent(name, config))
            native.createBackend(backend, options)
    except Exception as error:
        raise TransportUnavailable(
            f"nixl cannot start its backend {backend}: {error}",
            hint="see `rfork doctor`; UCX_LOG_LEVEL=info and NIXL_LOG_LEVEL=DEBUG print details",
        ) from error
    return native


@contextmanager
def environment(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables within the context, or unset them (None).

    UCX has no other configuration, and another library of this process may use UCX too, with the user's
    variables. Logging variables that the user has set are kept.
    """
    with _environment_lock:
        before = {name: os.environ.get(name) for name in variables}
        try:
            for name, value in variables.items():
                if before[name] is None or not name.endswith("LOG_LEVEL"):
                    _set(name, value)
            yield
        finally:
            for name, value in before.items():
                _set(name, value)


def compatible(one: str, other: str) -> bool:
    """Return True if two versions of NIXL can exchange metadata: they have the same major and minor number."""
    return bool(one) and one.split(".")[:2] == other.split(".")[:2]


def require_compatible(source_version: str) -> None:
    """Check the version of the source. Raises VersionMismatch."""
    version = library_state().version
    if not compatible(source_version, version):
        raise VersionMismatch(
            f"nixl: the source has version {source_version[:40] or 'none'}, here {version or 'unknown'}",
            hint="install the same release of nixl on both sides, or use another transport between them",
        )


def _installed_version(wheel: str) -> str:
    try:
        return metadata.version(wheel)
    except metadata.PackageNotFoundError:
        return ""


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value

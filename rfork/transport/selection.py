"""Selects the transports of an instance, best first, and explains the choice. The only table of all
transports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

from rfork.errors import SettingsError
from rfork.schema import OPT_IN_TRANSPORTS
from rfork.settings import InstanceSettings
from rfork.transport.base import Availability, Transport

CreateTransport = Callable[[InstanceSettings], Transport]
TransportRegistry = Mapping[str, CreateTransport]


def _imported(module: str, name: str) -> CreateTransport:
    """Return a function that imports a transport's package when it creates one: few instances use all of them."""

    def create(settings: InstanceSettings) -> Transport:
        transport: Transport = getattr(import_module(f"rfork.transport.{module}"), name)(settings)
        return transport

    return create


TRANSPORTS: TransportRegistry = {
    "cuda_ipc": _imported("cuda_ipc", "CudaIpcTransport"),
    "shared_memory": _imported("shared_memory", "SharedMemoryTransport"),
    "transfer_engine": _imported("mooncake", "TransferEngineTransport"),
    "http": _imported("http", "HttpTransport"),
    "nixl": _imported("nixl", "NixlTransport"),
    "nccl": _imported("collective", "nccl_transport"),
    "gloo": _imported("collective", "gloo_transport"),
}
"""All transports by their names in settings, best first."""


@dataclass(frozen=True, slots=True)
class TransportStatus:
    """One row of the `rfork doctor` output: a transport, its use, and the reason."""

    name: str
    used: bool
    rank: int | None
    reason: str
    hint: str = ""


def select_transports(settings: InstanceSettings, table: TransportRegistry = TRANSPORTS) -> list[Transport]:
    """Return the transports to offer and to accept, best first.

    With `settings.transports`: exactly those, in that order. Otherwise all of `table` that can run on this
    machine, without the opt-in transports.

    Raises SettingsError if a requested transport is unknown, duplicated or unavailable, or if no transport is
    available.
    """
    if settings.transports is not None:
        return _requested(settings.transports, settings, table)
    usable = [
        transport
        for transport in (make(settings) for name, make in table.items() if name not in OPT_IN_TRANSPORTS)
        if transport.availability().usable
    ]
    if not usable:
        raise SettingsError("no transport is available on this machine", hint="run `rfork doctor` for the reasons")
    return usable


def explain_selection(settings: InstanceSettings, table: TransportRegistry = TRANSPORTS) -> list[TransportStatus]:
    """Explain the result of `select_transports` row by row, transports in use first; never raises."""
    unnamed: tuple[str, ...] = tuple(name for name in table if name not in OPT_IN_TRANSPORTS)
    names: tuple[str, ...] = settings.transports if settings.transports is not None else unnamed
    rows = [_row(name, settings, table) for name in dict.fromkeys(names)]
    rank = 0
    chosen: list[TransportStatus] = []
    for name, available in rows:
        if available.usable:
            rank += 1
        chosen.append(
            TransportStatus(
                name,
                available.usable,
                rank if available.usable else None,
                available.reason,
                available.hint,
            )
        )
    chosen.sort(key=lambda choice: choice.rank or len(rows) + 1)
    return chosen + [
        TransportStatus(name, False, None, "not listed in RFORK_TRANSPORTS") for name in table if name not in names
    ]


def _requested(names: tuple[str, ...], settings: InstanceSettings, table: TransportRegistry) -> list[Transport]:
    if not names:
        raise SettingsError("RFORK_TRANSPORTS: names no transport", hint=f"known: {', '.join(table)}")
    if len(set(names)) < len(names):
        raise SettingsError(f"RFORK_TRANSPORTS: duplicate transport (got {', '.join(names)})")
    chosen: list[Transport] = []
    for name in names:
        if name not in table:
            raise SettingsError(f"RFORK_TRANSPORTS: unknown transport {name!r}", hint=f"known: {', '.join(table)}")
        transport = table[name](settings)
        available = transport.availability()
        if not available.usable:
            raise SettingsError(
                f"RFORK_TRANSPORTS: {name} is not available on this machine: {available.reason}", hint=available.hint
            )
        chosen.append(transport)
    return chosen


def _row(name: str, settings: InstanceSettings, table: TransportRegistry) -> tuple[str, Availability]:
    if name not in table:
        return name, Availability(False, "unknown", f"known: {', '.join(table)}")
    return name, table[name](settings).availability()

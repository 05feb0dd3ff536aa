"""Transports between two instances, and their cost.

A same-host transport uses no network link and works only within a host. One that runs kernels on the source's
GPU competes with serving: it is used only if no other transport reaches the source.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from planner.policy.types import Source
from rfork.schema import GPU_KERNEL_TRANSPORTS, SAME_HOST_TRANSPORTS

TransportCost = tuple[bool, bool]
"""Two flags: only GPU kernels reach the source; the bytes leave the host."""
PAIRS: Final = 4096
"""Number of cached lists of transports, and pairs of them: a fleet has few."""


def shared_transports(source: Source, target: Source) -> tuple[str, ...]:
    """Return the transports that work between the two, in the target's order of preference.

    Same-host transports only if both run on one host; transports that run kernels on the source come last.
    """
    return _shared(source.transports, target.transports, source.location.host == target.location.host)


def is_same_host_read(source: Source, target: Source) -> bool:
    """Return True if the target reads from the source over a same-host transport, without a network link."""
    return source.location.host == target.location.host and is_same_host_route(shared_transports(source, target))


def transport_cost(source: Source, target: Source) -> TransportCost:
    """Return the cost of reading from the source; the lowest is best."""
    return _cost(source.transports, target.transports, source.location.host == target.location.host)


def is_same_host_route(transports: tuple[str, ...]) -> bool:
    """Return True if the first transport of a route stays within the host."""
    return bool(transports) and transports[0] in SAME_HOST_TRANSPORTS


def uses_gpu_kernels(transports: tuple[str, ...]) -> bool:
    """Return True if the first transport of a route runs kernels on the source's GPU."""
    return bool(transports) and transports[0] in GPU_KERNEL_TRANSPORTS


@lru_cache(PAIRS)
def has_only_same_host(transports: tuple[str, ...]) -> bool:
    """Return True if none of an instance's transports reaches another host."""
    return bool(transports) and SAME_HOST_TRANSPORTS.issuperset(transports)


@lru_cache(PAIRS)
def has_only_gpu_kernels(transports: tuple[str, ...]) -> bool:
    """Return True if all of an instance's transports that reach another host run kernels."""
    far = [name for name in transports if name not in SAME_HOST_TRANSPORTS]
    return bool(far) and GPU_KERNEL_TRANSPORTS.issuperset(far)


def no_transport_reason(source: Source, target: Source) -> str:
    """Return why the two share no transport; empty if they do."""
    if shared_transports(source, target):
        return ""
    if source.location.host != target.location.host and (local := _shared(source.transports, target.transports, True)):
        return (
            f"shares only {', '.join(local)}, which works within one host: "
            f"it runs on {source.location.host}, the target on {target.location.host}"
        )
    return f"offers only {', '.join(source.transports) or 'no transport'}"


@lru_cache(PAIRS)
def _cost(source: tuple[str, ...], target: tuple[str, ...], one_host: bool) -> TransportCost:
    shared = _shared(source, target, one_host)
    return uses_gpu_kernels(shared), not (one_host and is_same_host_route(shared))


@lru_cache(PAIRS)
def _shared(source: tuple[str, ...], target: tuple[str, ...], one_host: bool) -> tuple[str, ...]:
    both = (name for name in target if name in source and (one_host or name not in SAME_HOST_TRANSPORTS))
    return tuple(sorted(both, key=GPU_KERNEL_TRANSPORTS.__contains__))

"""How one instance's memory is reached from another: which transports both have, and what these cost.

A transport of one host takes nothing of a network link, and works nowhere else. One that runs kernels on
the source's GPU takes something of what it serves with: it is used where nothing else reaches the source.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from planner.policy_types import Source
from rfork.schema.types import GPU_KERNEL_TRANSPORTS, SAME_HOST_TRANSPORTS

TransportCost = tuple[bool, bool]
"""Whether kernels run on the source's GPU, as nothing else reaches it; whether the bytes leave the host."""
PAIRS: Final = 4096
"""Pairs of lists of transports whose answer is kept: a fleet has few."""


def shared_transports(source: Source, target: Source) -> tuple[str, ...]:
    """The transports that work between the two, the target's best first.

    Those of one host only where both run on it; those that run kernels on the source last.
    """
    return _shared(source.transports, target.transports, source.location.host == target.location.host)


def is_same_host_read(source: Source, target: Source) -> bool:
    """Whether the target reads from the source over a transport of one host: no network link sees it."""
    return source.location.host == target.location.host and is_same_host_route(shared_transports(source, target))


def transport_cost(source: Source, target: Source) -> TransportCost:
    """What reading from the source costs the two: the least is best."""
    return uses_gpu_kernels(shared_transports(source, target)), not is_same_host_read(source, target)


def is_same_host_route(transports: tuple[str, ...]) -> bool:
    """Whether the first of the transports of a route stays within the host."""
    return bool(transports) and transports[0] in SAME_HOST_TRANSPORTS


def uses_gpu_kernels(transports: tuple[str, ...]) -> bool:
    """Whether the first of the transports of a route runs kernels on the source's GPU."""
    return bool(transports) and transports[0] in GPU_KERNEL_TRANSPORTS


def has_only_same_host(transports: tuple[str, ...]) -> bool:
    """Whether none of an instance's transports leads to another host."""
    return bool(transports) and SAME_HOST_TRANSPORTS.issuperset(transports)


def has_only_gpu_kernels(transports: tuple[str, ...]) -> bool:
    """Whether all of an instance's transports that lead to another host run kernels."""
    far = [name for name in transports if name not in SAME_HOST_TRANSPORTS]
    return bool(far) and GPU_KERNEL_TRANSPORTS.issuperset(far)


def no_transport_reason(source: Source, target: Source) -> str:
    """Why there is no transport between the two; empty where there is one."""
    if shared_transports(source, target):
        return ""
    if source.location.host != target.location.host and (local := _shared(source.transports, target.transports, True)):
        return (
            f"shares only {', '.join(local)}, for two instances of one host: "
            f"it runs on {source.location.host}, the target on {target.location.host}"
        )
    return f"offers only {', '.join(source.transports) or 'no transport'}"


@lru_cache(PAIRS)
def _shared(source: tuple[str, ...], target: tuple[str, ...], one_host: bool) -> tuple[str, ...]:
    both = (name for name in target if name in source and (one_host or name not in SAME_HOST_TRANSPORTS))
    return tuple(sorted(both, key=GPU_KERNEL_TRANSPORTS.__contains__))

"""How one instance's memory is reached from another: which transports both have, and what these cost.

A transport of one host takes nothing of a network link, and works nowhere else. One that runs kernels on
the source's GPU takes something of what it serves with: it is used where nothing else reaches the source.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from planner.fleet import Source
from rfork.fields import ON_KERNELS, ONE_HOST

Way = tuple[bool, bool]
"""Whether kernels run on the source's GPU, as nothing else reaches it; whether the bytes leave the host."""
PAIRS: Final = 4096
"""Pairs of lists of transports whose answer is kept: a fleet has few."""


def shared_transports(source: Source, target: Source) -> tuple[str, ...]:
    """The transports that work between the two, the target's best first.

    Those of one host only where both run on it; those that run kernels on the source last.
    """
    return _shared(source.transports, target.transports, source.place.host == target.place.host)


def within_host(source: Source, target: Source) -> bool:
    """Whether the target reads from the source over a transport of one host: no network link sees it."""
    return source.place.host == target.place.host and takes_one_host(shared_transports(source, target))


def way(source: Source, target: Source) -> Way:
    """What reading from the source costs the two: the least is best."""
    return runs_kernels(shared_transports(source, target)), not within_host(source, target)


def takes_one_host(transports: tuple[str, ...]) -> bool:
    """Whether the first of the transports of a route stays within the host."""
    return bool(transports) and transports[0] in ONE_HOST


def runs_kernels(transports: tuple[str, ...]) -> bool:
    """Whether the first of the transports of a route runs kernels on the source's GPU."""
    return bool(transports) and transports[0] in ON_KERNELS


def only_one_host(transports: tuple[str, ...]) -> bool:
    """Whether none of an instance's transports leads to another host."""
    return bool(transports) and ONE_HOST.issuperset(transports)


def only_on_kernels(transports: tuple[str, ...]) -> bool:
    """Whether all of an instance's transports that lead to another host run kernels."""
    far = [name for name in transports if name not in ONE_HOST]
    return bool(far) and ON_KERNELS.issuperset(far)


def apart(source: Source, target: Source) -> str:
    """Why there is no transport between the two; empty where there is one."""
    if shared_transports(source, target):
        return ""
    if source.place.host != target.place.host and (
        local := _shared(source.transports, target.transports, True)
    ):
        return (
            f"shares only {', '.join(local)}, for two instances of one host: "
            f"it runs on {source.place.host}, the target on {target.place.host}"
        )
    return f"offers only {', '.join(source.transports) or 'no transport'}"


@lru_cache(PAIRS)
def _shared(source: tuple[str, ...], target: tuple[str, ...], one_host: bool) -> tuple[str, ...]:
    both = (name for name in target if name in source and (one_host or name not in ONE_HOST))
    return tuple(sorted(both, key=ON_KERNELS.__contains__))

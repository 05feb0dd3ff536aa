"""The leaves of a plan for host memory, read step by step as the kernels do."""

from __future__ import annotations

from collections.abc import Iterator

from rfork.image.host_memory import host_view
from rfork.image.leaf_plan import LeafLaunch, LeafPlan


def planned_leaves(plan: LeafPlan) -> list[bytes]:
    """Return the bytes of each leaf. Raises AssertionError if a leaf's copy of its last bytes differs from them."""
    leaves = [leaf for launch in plan.launches for leaf in _launched(plan, launch)]
    gathered_bytes = int(plan.range_begins[-1])
    short = _gather(plan, gathered_bytes - plan.short_bytes, gathered_bytes)
    return [*leaves, *([short] if short else [])]


def _launched(plan: LeafPlan, launch: LeafLaunch) -> Iterator[bytes]:
    scratch = _gather(plan, launch.gather_begin, launch.gather_end)
    gathered = set(plan.gathered.tolist())
    for index in range(launch.first, launch.first + launch.leaves):
        address = int(plan.addresses[index])
        last = address + launch.last_stripe
        if index in gathered:
            leaf, last_bytes = scratch[address : address + launch.leaf_bytes], scratch[last : last + 64]
        else:
            leaf, last_bytes = bytes(host_view(address, launch.leaf_bytes)), bytes(host_view(last, 64))
        assert launch.leaf_bytes == len(leaf)
        assert leaf.endswith(last_bytes)
        yield leaf


def _gather(plan: LeafPlan, begin: int, end: int) -> bytes:
    found = b""
    begins = plan.range_begins.tolist()
    for base, low, high in zip(plan.range_bases.tolist(), begins[:-1], begins[1:], strict=True):
        low, high = max(low, begin), min(high, end)
        if low < high:
            found += bytes(host_view(base + low, high - low))
    assert end - begin == len(found)
    return found

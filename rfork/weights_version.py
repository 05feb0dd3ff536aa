"""Versions: names for the weights of one model, equal if the weights are equal.

A version names the weights of all ranks of a replica together. In order of precedence, it is stated by the
user; the commit of a hub id (``commit:…``); or a fingerprint of the files that an instance would load
(``files:…``, see `rfork.storage.versions.fingerprint`). Weights without any of these are named after their
content (``weights:…``), after the update that produced them (``update:…``), or have a unique name
(``unnamed:…``).

Imports no torch: the planner uses it too.
"""

from __future__ import annotations

import re
from typing import Final

from rfork.schema import Rank

_GENERATED: Final = re.compile(r"(commit|files|weights|update|unnamed):([A-Za-z0-9._:-]+)")
SHORT: Final = 8
"""Characters of a generated identifier in displays."""
FIRST: Final = "first of version"
"""Phrase in a plan's reason: other versions of the model are served, but not this one."""
ADOPTS_VERSION: Final = "adopts version"
"""Phrase in a plan's reason: the target has no version and gets the served one."""
UNSTATED: Final = "this target states none"
"""Phrase in a plan's reason: several versions are served, and the target names none."""
STATE_VERSION_HINT: Final = (
    "state the version that the target should get, one of those served: RFORK_VERSION, --rfork-version or version="
)
"""Hint for a target whose plan is `UNSTATED`."""


def of_weights(weights_id: str) -> str:
    """Return the version of a single-rank replica's weights, derived from the digest of all their bytes."""
    return f"weights:{weights_id}"


def of_update(replica: str, count: int) -> str:
    """Return the version of a replica's weights after `count` updates in place; the same on each rank."""
    return f"update:{replica[-64:]}:{count}"


def unnamed(replica: str) -> str:
    """Return a version that no other replica's weights have, for weights of unknown origin."""
    return f"unnamed:{replica[-100:]}"


def is_first(reason: str) -> bool:
    """Return True if a plan's or fork's reason states that its instance was the first of its version."""
    return FIRST in reason and UNSTATED not in reason


def is_shareable(version: str) -> bool:
    """Return True if several replicas can have this version: no replica's name is part of it."""
    return bool(version) and not version.startswith(("update:", "unnamed:"))


def is_unnamed(version: str) -> bool:
    """Return True if a version only distinguishes a replica's weights from all others."""
    return version.startswith("unnamed:")


def is_comparable(version: str) -> bool:
    """Return True if different versions of this form mean different weights."""
    return not version.startswith(("unnamed:", "update:"))


def is_single(rank: Rank) -> bool:
    """Return True if the rank has a complete model."""
    return rank.tp_size * rank.pp_size * rank.ep_size == 1


def short(version: str | None) -> str:
    """Return a version for display: a generated one is abbreviated."""
    if not version:
        return "(none)"
    if (generated := _GENERATED.fullmatch(version)) is None:
        return version
    scheme, identifier = generated.groups()
    if scheme == "update":
        replica, _, count = identifier.rpartition(":")
        return f"update:{replica[:SHORT]}:{count}"
    return f"{scheme}:{identifier[:SHORT]}"

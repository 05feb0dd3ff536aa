"""Name of the replica that a process belongs to, shared by all ranks of a server. Runs on the target.

The planner assigns one version of the weights to all ranks of a replica. The name changes at each start, so
that a restarted server is not taken for its predecessor.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Final
from uuid import uuid4

import torch.distributed

from rfork.logs import logger
from rfork.schema import Rank
from rfork.settings import InstanceSettings
from rfork.weights_version import is_single

log = logger(__name__)

STORE_KEY: Final = "rfork/replica"


def replica_of(settings: InstanceSettings, rank: Rank) -> str | None:
    """Return the name of the replica that this process belongs to, or None if its ranks cannot agree on one.

    Ranks agree through the store of torch.distributed's default group, else by the setting `replica`. A model
    replicated on every rank (a speculative draft) belongs to the same replica as the main model of its
    process.
    """
    process = os.getpid()
    own = f"{settings.replica or 'replica'}-{_process_name(process)}"
    if is_single(rank):
        return _agreed_names.get(process, own)
    agreed = _agreed(own)
    if agreed is not None:
        _agreed_names[process] = agreed
    return agreed or settings.replica


_agreed_names: Final[dict[int, str]] = {}
"""Names by process id: a forked child does not belong to its parent's replica."""


def _agreed(own: str) -> str | None:
    """Return the name that the first rank proposed; None without a process group. Never waits for other ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    try:
        store = torch.distributed.distributed_c10d._get_default_store()
        return str(store.compare_set(STORE_KEY, "", own).decode())
    except Exception as error:  # a custom store may lack the operation
        log.warning(
            "the ranks of this replica cannot agree on a name", reason=str(error), hint="set RFORK_REPLICA on all ranks"
        )
        return None


@lru_cache
def _process_name(pid: int) -> str:
    """Return a random name for this process. A forked child gets another one."""
    return uuid4().hex[:12]

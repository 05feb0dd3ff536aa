"""Background forks: a holder's prefetch must not delay a fork that an engine waits for.

A background fork reads over the network only from sources that serve no engine's fork, and leaves each source a free
slot. As soon as an engine's fork reads from one of its sources, or an engine on its own host reads over the network, it
pauses: its plan is empty until they have ended. It counts as an engine's fork itself while an engine reads from its
target, also through other background forks. Reads within a host use no network and are not limited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

ForksOf = Callable[[str], Iterable[str]]
"""Returns the forks that read from an instance."""


def is_waited_for(instance_id: str, readers: ForksOf, background: Mapping[str, str]) -> bool:
    """Return True if an engine's fork reads from the instance, or from a background fork's target that reads from it.

    `background`: the targets of background forks, by fork_id.
    """
    pending, visited = [instance_id], {instance_id}
    while pending:
        for fork_id in readers(pending.pop()):
            target = background.get(fork_id)
            if target is None:
                return True
            if target not in visited:
                visited.add(target)
                pending.append(target)
    return False


def serves_engines(
    source_id: str, own_fork_id: str, network_readers: ForksOf, readers: ForksOf, background: Mapping[str, str]
) -> bool:
    """Return True if an engine's fork reads from the source over the network, or one that an engine waits for."""
    for fork_id in network_readers(source_id):
        if fork_id == own_fork_id:
            continue
        target = background.get(fork_id)
        if target is None or is_waited_for(target, readers, background):
            return True
    return False

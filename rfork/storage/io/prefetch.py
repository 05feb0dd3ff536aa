"""Reads groups of items, one group ahead of the consumer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import NoReturn, TypeVar

Group = TypeVar("Group")
Item = TypeVar("Item")
Result = TypeVar("Result")

POLL_INTERVAL_S = 1.0
"""Maximum delay in seconds until a signal is handled."""


def group_by_size(names: Sequence[str], sizes: Sequence[int], max_bytes: int) -> list[list[str]]:
    """Split names, in order, into groups of at most `max_bytes` bytes, or one tensor."""
    groups: list[list[str]] = []
    group_bytes = 0
    for name, size in zip(names, sizes, strict=True):
        if not groups or group_bytes + size > max_bytes:
            groups.append([])
            group_bytes = 0
        groups[-1].append(name)
        group_bytes += size
    return groups


def read_ahead(groups: Sequence[Group], read: Callable[[Group], Sequence[Item]]) -> Generator[Item, None, None]:
    """Iterate over the items of each group, in order; the next group is read while one is consumed.

    At most two groups are in memory. Closing the iterator does not wait for the read in progress, which may
    hang.
    """
    following = [start_thread(partial(read, group)) for group in groups[:1]]
    for index in range(len(groups)):
        items = list(reversed(following.pop()()))
        following += [start_thread(partial(read, group)) for group in groups[index + 1 : index + 2]]
        while items:
            yield items.pop()


def start_thread(work: Callable[[], Result]) -> Callable[[], Result]:
    """Start `work` on a daemon thread; call the returned function to wait for its result.

    That function raises the error of `work`, and can be interrupted by a signal at any time.
    """
    ended: queue.SimpleQueue[Callable[[], Result]] = queue.SimpleQueue()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # re-raised by wait()
            ended.put(partial(_raise, error))
        else:
            ended.put(lambda: result)

    threading.Thread(target=run, name="rfork-ahead", daemon=True).start()

    def wait() -> Result:
        # A signal that arrives just before an unbounded wait would not be handled.
        while True:
            with suppress(queue.Empty):
                return ended.get(timeout=POLL_INTERVAL_S)()

    return wait


def _raise(error: BaseException) -> NoReturn:
    raise error

"""Reading in groups, one group ahead of whoever takes them."""

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
"""Seconds after which a signal is heard, at most."""


def group_by_size(names: Sequence[str], sizes: Sequence[int], max_bytes: int) -> list[list[str]]:
    """The names in order, cut so that each group has at most `max_bytes` bytes, or one tensor."""
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
    """What `read` gives for each group, in order; it reads the next group while one is taken.

    Two groups are held at once, at most. An iterator that is given up does not wait for the read under way,
    which may hang.
    """
    following = [start_thread(partial(read, group)) for group in groups[:1]]
    for index in range(len(groups)):
        items = list(reversed(following.pop()()))
        following += [start_thread(partial(read, group)) for group in groups[index + 1 : index + 2]]
        while items:
            yield items.pop()


def start_thread(work: Callable[[], Result]) -> Callable[[], Result]:
    """Begin `work` on a thread that does not hold up the end of the process; call what this gives to wait.

    That raises what `work` raised, and can be interrupted by a signal at any time.
    """
    ended: queue.SimpleQueue[Callable[[], Result]] = queue.SimpleQueue()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised where the result is waited for
            ended.put(partial(_raise, error))
        else:
            ended.put(lambda: result)

    threading.Thread(target=run, name="rfork-ahead", daemon=True).start()

    def wait() -> Result:
        # A signal that comes just before an untimed wait would be heard only after it.
        while True:
            with suppress(queue.Empty):
                return ended.get(timeout=POLL_INTERVAL_S)()

    return wait


def _raise(error: BaseException) -> NoReturn:
    raise error

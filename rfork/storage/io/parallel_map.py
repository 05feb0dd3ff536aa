"""Parallel map for small requests that each cost a round trip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from rfork.storage.abandonable_call import AbandonableCall

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


def parallel_map(name: str, work: Callable[[ItemT], ResultT], items: Sequence[ItemT], threads: int) -> list[ResultT]:
    """Return the results of `work` for all items, in order, using at most `threads` threads.

    Raises the error of the first failed item, after all calls have ended. If storage hangs, the threads do
    not prevent the process from exiting. `name` is used in errors.
    """
    if len(items) <= 1 or threads <= 1:
        return [work(item) for item in items]
    turns = min(threads, len(items))
    attempts = [
        AbandonableCall(name, partial(_run_worker, work, items[turn::turns]), lambda results: None)
        for turn in range(turns)
    ]
    results: list[list[ResultT]] = []
    failed: list[Exception] = []
    for attempt in attempts:
        try:
            results.append(attempt.result())
        except Exception as error:  # raised below, when the other calls have ended
            failed.append(error)
    if failed:
        raise failed[0]
    return [results[index % turns][index // turns] for index in range(len(items))]


def _run_worker(work: Callable[[ItemT], ResultT], items: Sequence[ItemT]) -> list[ResultT]:
    return [work(item) for item in items]

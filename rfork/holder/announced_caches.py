"""JIT caches of models whose replicas will start on a holder's host: pulled with the weights, if they are enabled.

They arrive in the cache directories of the holder's environment, so they serve engines that share it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor

from rfork.prefetch_process import CACHE_TYPES_VARIABLE, pull_caches


class AnnouncedCaches:
    """Pulls the caches of each model once for each announcement, one model after the other."""

    def __init__(
        self,
        environment: Mapping[str, str],
        pull: Callable[[str, Mapping[str, str], threading.Event], None] = pull_caches,
    ) -> None:
        """`environment`: the holder's; nothing is pulled unless it names types of caches."""
        self._environment = environment
        self._pull = pull
        self._is_enabled = bool(environment.get(CACHE_TYPES_VARIABLE))
        self._announced: frozenset[str] = frozenset()
        self._stopped = threading.Event()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="rfork-caches")

    def announce(self, models: Collection[str]) -> None:
        """Pull the caches of those models that were not announced before. `models`: all that are announced now."""
        if self._is_enabled:
            for model in sorted(set(models) - self._announced):
                self._worker.submit(self._pull, model, self._environment, self._stopped)
        self._announced = frozenset(models)

    def stop(self) -> None:
        """End a pull that runs soon, and start no other."""
        self._stopped.set()
        self._worker.shutdown(wait=False, cancel_futures=True)

"""Connections of one store's blobs to web servers, and statistics of the servers' speed."""

from __future__ import annotations

import os
import ssl
from functools import cache
from typing import Final

from rfork.net.pool import HttpConnectionPool
from rfork.net.tls import verifying_context
from rfork.settings import StorageSettings
from rfork.storage.http.hedging import HedgePolicy

MIN_HEDGE_BYTES: Final = 16 << 20
"""Minimum memory for second requests: one block of the largest size."""


class HttpSession:
    """Shared by all blobs of one store. Thread-safe. The session and each of its blobs are users of the pool."""

    def __init__(self, settings: StorageSettings) -> None:
        self.settings = settings

        @cache
        def tls_context() -> ssl.SSLContext:
            return verifying_context(settings.ca, "SSL_CERT_FILE")

        self.pool = HttpConnectionPool(tls_context, settings.concurrency)
        self._process = -1  # of the policy
        self._hedges: HedgePolicy

    @property
    def hedges(self) -> HedgePolicy:
        """Response times of the servers and second requests of this process; a forked child starts without any."""
        if self._process != os.getpid():
            max_bytes = max(self.settings.staging_bytes // 4, MIN_HEDGE_BYTES)
            self._hedges = HedgePolicy(self.settings.hedge_ratio, max_bytes)
            self._process = os.getpid()
        return self._hedges

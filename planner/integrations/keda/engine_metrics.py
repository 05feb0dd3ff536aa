"""HTTP client for the engines' /metrics, with limits on time, size and concurrency."""

from __future__ import annotations

import asyncio
import re
from typing import Final

import httpx

from planner.integrations.keda.signals import MetricPage, parse_metrics
from rfork.addresses import host_port
from rfork.asyncio_timeout import timeout
from rfork.errors import reason_of
from rfork.net.tls import client_context
from rfork.settings import TlsSettings

ENGINE_TIMEOUT_S: Final = 2.0
"""Timeout of one engine's /metrics."""
MAX_BYTES: Final = 8 << 20
"""Maximum size of one page. A busy vLLM with many engines sends less than 1 MiB."""
MAX_CONCURRENT: Final = 512
"""Maximum number of concurrent requests, over all models."""
HOST: Final = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")
"""Hosts come from the instances themselves, so characters that would change the URL are rejected."""


class EngineUnreachable(Exception):
    """An engine does not return its metrics. The text completes a sentence that begins with the host name."""


class EngineMetricsClient:
    """Reads the metrics of engines, each within `timeout_s`. Runs in the scaler's process."""

    def __init__(self, timeout_s: float, tls: TlsSettings, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` replaces the network in tests."""
        self._timeout_s = timeout_s
        self._request_slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._client = httpx.AsyncClient(
            verify=client_context(tls),
            transport=transport,
            trust_env=False,
            follow_redirects=False,
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=MAX_CONCURRENT),
            # A small compressed response could expand to a very large page.
            headers={"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"},
        )

    async def read(self, host: str, *, scheme: str, port: int, path: str) -> MetricPage:
        """Return the metrics of the engine at `host`. Raises EngineUnreachable."""
        if not HOST.fullmatch(host):
            raise EngineUnreachable("is not a valid host name")
        url = f"{scheme}://{host_port(host, port)}{path}"
        async with self._request_slots:
            try:
                async with timeout(self._timeout_s):
                    return parse_metrics(await self._body_with_retry(url))
            except TimeoutError:
                raise EngineUnreachable(f"did not respond at {url} within {self._timeout_s:g} s") from None
            except httpx.TimeoutException:
                raise EngineUnreachable(f"did not respond at {url} within {self._timeout_s:g} s") from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise EngineUnreachable(f"did not respond at {url}: {reason_of(error)}") from None
            except ValueError as error:
                raise EngineUnreachable(f"did not return Prometheus metrics at {url}: {error}"[:300]) from None

    async def _body_with_retry(self, url: str) -> bytes:
        """Retries once if a pooled connection was closed: engines close connections that were idle for 5 s."""
        try:
            return await self._body(url)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError, httpx.CloseError):
            return await self._body(url)

    async def _body(self, url: str) -> bytes:
        body = bytearray()
        async with self._client.stream("GET", url) as response:
            if response.status_code != httpx.codes.OK:
                raise EngineUnreachable(f"returned HTTP {response.status_code} at {url}")
            async for part in response.aiter_raw():
                body += part
                if len(body) > MAX_BYTES:
                    raise EngineUnreachable(f"returned more than {MAX_BYTES >> 20} MiB at {url}")
        return bytes(body)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

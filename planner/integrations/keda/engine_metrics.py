"""What engines tell at /metrics, asked over HTTP with bounds on time, size and number."""

from __future__ import annotations

import asyncio
import re
import ssl
from typing import Final

import httpx

from planner.integrations.keda.signals import MetricPage, parse_metrics
from planner.integrations.planner_client import DEAD_CONNECTION
from rfork.errors import SettingsError
from rfork.grpc_credentials import CANNOT, PEM
from rfork.settings import TlsSettings, host_port

MAX_BYTES: Final = 8 << 20
"""Of one page; a busy vLLM with many engines tells less than one MiB."""
MAX_CONCURRENT: Final = 512
"""Engines that are asked at one time, of all models."""
HOST: Final = re.compile(r"[A-Za-z0-9._-]+|[0-9A-Fa-f:.]+")
"""Nothing that would make another URL of it: instances say themselves where they are."""


class EngineUnreachable(Exception):
    """An engine does not say what it does; the text follows its host's name in a sentence."""


class EngineMetricsClient:
    """Asks engines, each within `timeout_s`. Runs in the scaler's process."""

    def __init__(self, timeout_s: float, tls: TlsSettings, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`transport` replaces the sockets, for tests."""
        self._timeout_s = timeout_s
        self._request_slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._client = httpx.AsyncClient(
            verify=_context(tls),
            transport=transport,
            trust_env=False,
            follow_redirects=False,
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=MAX_CONCURRENT),
            # Compressed, a small answer could be a large page.
            headers={"Accept": "text/plain;version=0.0.4", "Accept-Encoding": "identity"},
        )

    async def read(self, host: str, *, scheme: str, port: int, path: str) -> MetricPage:
        """What the engine at `host` tells. Raises EngineUnreachable."""
        if not HOST.fullmatch(host):
            raise EngineUnreachable("is no name of a host")
        url = f"{scheme}://{host_port(host, port)}{path}"
        async with self._request_slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return parse_metrics(await self._body_with_timeout(url))
            except TimeoutError:
                raise EngineUnreachable(f"did not answer {url} within {self._timeout_s:g} s") from None
            except httpx.TimeoutException:
                raise EngineUnreachable(f"did not answer {url} within {self._timeout_s:g} s") from None
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise EngineUnreachable(f"did not answer {url}: {error or type(error).__name__}") from None
            except ValueError as error:
                raise EngineUnreachable(f"answers {url} with no Prometheus metrics: {error}"[:300]) from None

    async def _body_with_timeout(self, url: str) -> bytes:
        """Asked once more if the pooled connection was dead: engines close those that nobody used for 5 s."""
        try:
            return await self._body(url)
        except DEAD_CONNECTION:
            return await self._body(url)

    async def _body(self, url: str) -> bytes:
        body = bytearray()
        async with self._client.stream("GET", url) as response:
            if response.status_code != httpx.codes.OK:
                raise EngineUnreachable(f"answers {url} with HTTP {response.status_code}")
            async for part in response.aiter_raw():
                body += part
                if len(body) > MAX_BYTES:
                    raise EngineUnreachable(f"answers {url} with more than {MAX_BYTES >> 20} MiB")
        return bytes(body)

    async def close(self) -> None:
        """Let go of connections."""
        await self._client.aclose()


def _context(tls: TlsSettings) -> ssl.SSLContext:
    """For engines behind https: trusts ``RFORK_TLS_CA`` where it is set, else the system's authorities."""
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.certificate is not None:
            context.load_cert_chain(tls.certificate, tls.key)
    except OSError as error:  # ssl.SSLError is one
        raise SettingsError(f"{CANNOT}: {error}", hint=PEM) from error
    return context

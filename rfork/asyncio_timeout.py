"""`asyncio.timeout`, also for Python 3.10."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from asyncio import timeout as timeout
else:
    import asyncio
    from collections.abc import AsyncIterator
    from contextlib import asynccontextmanager

    import async_timeout

    @asynccontextmanager
    async def timeout(delay: float | None) -> AsyncIterator[None]:
        """Cancel the block after `delay` seconds and raise TimeoutError; None is no limit."""
        try:
            async with async_timeout.timeout(delay):
                yield
        except asyncio.TimeoutError as error:
            raise TimeoutError from error

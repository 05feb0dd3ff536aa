"""Client side of the planner: REST client, heartbeat and lease tokens."""

from __future__ import annotations

import sys
from importlib import import_module

_COMMAND = "httpx._main"
"""httpx's own command. httpx imports it with rich, click and pygments, which takes three quarters of its 85 ms, or
works without it where these are not installed."""


def _import_httpx() -> None:
    """Import httpx without its command."""
    if "httpx" in sys.modules:
        return
    blocked = _COMMAND not in sys.modules
    if blocked:
        sys.modules[_COMMAND] = None  # type: ignore[assignment]  # the documented way to make an import fail
    try:
        import_module("httpx")
    finally:
        if blocked:
            del sys.modules[_COMMAND]


_import_httpx()

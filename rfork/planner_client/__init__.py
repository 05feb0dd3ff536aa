"""Client side of the planner: REST client, heartbeat and lease tokens."""

import sys

CLI_MODULE = "httpx._main"
"""httpx's command line, an optional part of it, which imports click, rich and pygments."""


def _import_httpx_without_cli() -> None:
    """Import httpx as if its command line were not installed: half of the import's time, in each process that forks."""
    if "httpx" in sys.modules:
        return
    sys.modules[CLI_MODULE] = None  # type: ignore[assignment]  # the import system's marker of a missing module
    try:
        import httpx  # noqa: F401
    finally:
        del sys.modules[CLI_MODULE]


_import_httpx_without_cli()

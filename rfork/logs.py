"""How rfork's commands and the planner log: text on a terminal, JSON lines for machines.

Library code only asks for a logger (``structlog.get_logger(__name__)``) and logs an event word with fields.
Nothing here runs on import: a process that embeds rfork keeps the logging it has, and gets rfork's events
through structlog's own defaults unless it calls `configure`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import TextIO

import structlog
from structlog.typing import Processor

# What the servers rfork runs on say of each request or of their own start: rfork logs those itself.
CHATTY = ("uvicorn", "httpx", "httpcore", "grpc", "asyncio")


def configure(json: bool, level: str, *, stream: TextIO | None = None) -> None:
    """Log to `stream` (default: standard error) what is at least `level` (``debug`` … ``error``).

    `json`: one object a line with ``timestamp`` (ISO 8601, UTC), ``level``, ``event`` and the fields;
    otherwise aligned text, coloured if `stream` is a terminal. Records of the standard library's logging
    take the same road. Calling again replaces what was configured before.
    """
    stream = stream or sys.stderr
    severity = logging.getLevelNamesMapping()[level.upper()]
    shared: Sequence[Processor] = (
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso" if json else "%H:%M:%S", utc=json),
    )
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(severity),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=_renderers(json, stream))
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(severity)
    for name in CHATTY:
        logging.getLogger(name).setLevel(max(severity, logging.WARNING))


def _renderers(json: bool, stream: TextIO) -> list[Processor]:
    """The last processors: from an event's fields to one line."""
    clean = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if json:
        return [clean, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    # Plain tracebacks: the rich ones show local variables, and those hold tokens.
    plain = structlog.dev.plain_traceback
    return [
        clean,
        structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=0, exception_formatter=plain),
    ]

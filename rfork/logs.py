"""Logging of rfork and the planner: events with fields, through the standard library's logging.

A process that embeds rfork keeps its logging: rfork's events are ordinary records of loggers ``rfork.*`` and
``planner.*``, with the fields in the message and as attributes of the record. rfork's own commands call
`configure`, which formats them as text for terminals or as JSON lines.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.stdlib import BoundLogger
from structlog.typing import EventDict, Processor, WrappedLogger

# Loggers of libraries that report each request or their start, which rfork logs itself; botocore's contain
# signatures.
NOISY_LOGGERS = (
    "uvicorn", "httpx", "httpx2", "httpcore", "httpcore2", "grpc", "asyncio",
    "botocore", "boto3", "s3transfer", "urllib3",
)  # fmt: skip
FIELDS = "rfork_fields"


def logger(name: str) -> BoundLogger:
    """Return the logger of one module: ``log.info("planned", routes=2)``."""
    bound: BoundLogger = structlog.wrap_logger(
        logging.getLogger(name),
        wrapper_class=BoundLogger,
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.contextvars.merge_contextvars,
            _as_record,
        ],
    )
    return bound


def configure(json: bool, level: str, *, stream: TextIO | None = None) -> None:
    """Log records of at least `level` (``debug`` … ``error``) to `stream` (default: standard error).

    `json`: one object per line with ``timestamp`` (ISO 8601, UTC), ``level``, ``event`` and the fields;
    otherwise aligned text, coloured if `stream` is a terminal. Applies to records of other libraries too. A
    later call replaces the configuration.
    """
    stream = stream or sys.stderr
    severity = logging.getLevelName(level.upper())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                _with_fields,
                structlog.stdlib.add_log_level,
                structlog.processors.TimeStamper(fmt="iso" if json else "%H:%M:%S", utc=json),
            ],
            processors=_renderers(json, stream),
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(severity)
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(max(severity, logging.WARNING))


def _as_record(_: WrappedLogger, __: str, event: EventDict) -> tuple[tuple[str, str], dict[str, object]]:
    """Return an event as the arguments of the standard library's logging methods."""
    word = str(event.pop("event"))
    keywords = {name: event.pop(name) for name in ("exc_info", "stack_info") if name in event}
    line = " ".join([word, *(f"{name}={value}" for name, value in event.items())])
    return ("%s", line), {**keywords, "extra": {FIELDS: {"event": word, **event}}}


def _with_fields(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Return event and fields of a record of `logger`; other records keep their message."""
    fields = getattr(event["_record"], FIELDS, None)
    return {**event, **fields} if fields is not None else event


def _renderers(json: bool, stream: TextIO) -> list[Processor]:
    """Return the last processors: from an event's fields to one line."""
    clean = structlog.stdlib.ProcessorFormatter.remove_processors_meta
    if json:
        return [clean, structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    # Plain tracebacks: the rich ones show local variables, which may contain tokens.
    plain = structlog.dev.plain_traceback
    return [
        clean,
        structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=0, exception_formatter=plain),
    ]

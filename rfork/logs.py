"""How rfork and the planner log: an event word with fields, through the standard library's logging.

A process that embeds rfork keeps the logging it has: rfork's events are ordinary records under the
names ``rfork.*`` and ``planner.*``, with the fields in the message and as the record's attributes.
rfork's own commands call `configure`, which makes them text on a terminal or JSON lines for machines.
"""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog
from structlog.stdlib import BoundLogger
from structlog.typing import EventDict, Processor, WrappedLogger

# What libraries say of each request or of their own start: rfork logs that itself; botocore's has signatures.
NOISY_LOGGERS = (
    "uvicorn", "httpx", "httpx2", "httpcore", "httpcore2", "grpc", "asyncio",
    "botocore", "boto3", "s3transfer", "urllib3",
)  # fmt: skip
FIELDS = "rfork_fields"


def logger(name: str) -> BoundLogger:
    """The logger of one module: ``log.info("planned", routes=2)``."""
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
    """Log to `stream` (default: standard error) what is at least `level` (``debug`` … ``error``).

    `json`: one object a line with ``timestamp`` (ISO 8601, UTC), ``level``, ``event`` and the fields;
    otherwise aligned text, coloured if `stream` is a terminal. Records of other libraries take the
    same road. Calling again replaces what was configured before.
    """
    stream = stream or sys.stderr
    severity = logging.getLevelNamesMapping()[level.upper()]
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
    """An event as the arguments of the standard library's `Logger.info` and its like."""
    word = str(event.pop("event"))
    keywords = {name: event.pop(name) for name in ("exc_info", "stack_info") if name in event}
    line = " ".join([word, *(f"{name}={value}" for name, value in event.items())])
    return ("%s", line), {**keywords, "extra": {FIELDS: {"event": word, **event}}}


def _with_fields(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """The event word and fields of a record that `logger` made; others keep their message."""
    fields = getattr(event["_record"], FIELDS, None)
    return {**event, **fields} if fields is not None else event


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

"""Logging of rfork and the planner: events with fields, through the standard library's logging.

A process that embeds rfork keeps its logging: rfork's events are ordinary records of loggers ``rfork.*`` and
``planner.*``, with the fields in the message and as attributes of the record. rfork's own commands call
`configure`, which formats them as text for terminals or as JSON lines.

Written on `logging` alone, because importing structlog takes 90 ms (it imports rich and attrs): an eighth of the
first fork of a process.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from json import JSONEncoder
from typing import TextIO

# Loggers of libraries that report each request or their start, which rfork logs itself; botocore's contain
# signatures.
NOISY_LOGGERS = (
    "uvicorn", "httpx", "httpx2", "httpcore", "httpcore2", "grpc", "asyncio",
    "botocore", "boto3", "s3transfer", "urllib3",
)  # fmt: skip
FIELDS = "rfork_fields"
"""Attribute of a record with its event and fields."""
QUOTED_CHARACTERS = frozenset(" \t\r\n='\"")
"""A text with one of these is quoted in text lines."""
RESET, DIM, BOLD = "\x1b[0m", "\x1b[2m", "\x1b[1m"
RED, GREEN, YELLOW, MAGENTA, CYAN = (f"\x1b[{code}m" for code in (31, 32, 33, 35, 36))
LEVEL_COLOURS = {"debug": GREEN, "info": GREEN, "warning": YELLOW, "error": RED, "critical": RED}

_encode_json = JSONEncoder(default=repr).encode
_context_fields: ContextVar[Mapping[str, object]] = ContextVar("rfork_log_fields")


class Logger:
    """Logger of one module. A field named `exc_info` adds an exception, as in the standard library."""

    def __init__(self, name: str, **fields: object) -> None:
        """`fields` are those of each event."""
        self._logger = logging.getLogger(name)
        self._fields = fields

    def bind(self, **fields: object) -> Logger:
        """Return a logger that adds these fields to each event."""
        return Logger(self._logger.name, **{**self._fields, **fields})

    def is_enabled_for(self, level: int) -> bool:
        """Return True if events of a level of the standard library are logged, so that fields need not be computed."""
        return self._logger.isEnabledFor(level)

    def debug(self, event: str, /, **fields: object) -> None:
        """Log details for developers."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """Log a normal event."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        """Log a problem that rfork handles."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        """Log a problem that rfork does not handle."""
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: object) -> None:
        """Log an error with the traceback of the exception that is being handled."""
        self._write(logging.ERROR, event, {"exc_info": True, **fields})

    def log(self, level: int, event: str, /, **fields: object) -> None:
        """Log an event at a level of the standard library."""
        self._write(level, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if not self._logger.isEnabledFor(level):
            return
        exc_info = fields.pop("exc_info", None)
        fields = {**_context_fields.get({}), **self._fields, **fields}
        # 3: the caller of `info`, so that the record names its file and line.
        self._logger.log(
            level,
            _Message(event, fields),
            exc_info=exc_info,  # type: ignore[arg-type]  # whatever the standard library accepts
            extra={FIELDS: {"event": event, **fields}},
            stacklevel=3,
        )


class _Message:
    """Message of a record, for handlers that are not rfork's: formatted only where one shows it."""

    def __init__(self, event: str, fields: Mapping[str, object]) -> None:
        self._event = event
        self._fields = fields

    def __str__(self) -> str:
        return " ".join([self._event, *(f"{name}={value}" for name, value in self._fields.items())])


def logger(name: str) -> Logger:
    """Return the logger of one module: ``log.info("planned", routes=2)``."""
    return Logger(name)


@contextmanager
def with_fields(**fields: object) -> Iterator[None]:
    """Add fields to all events of this thread or task inside the block."""
    token = _context_fields.set({**_context_fields.get({}), **fields})
    try:
        yield
    finally:
        _context_fields.reset(token)


def configure(json: bool, level: str, *, stream: TextIO | None = None) -> None:
    """Log records of at least `level` (``debug`` … ``error``) to `stream` (default: standard error).

    `json`: one object per line with ``timestamp`` (ISO 8601, UTC), ``level``, ``event`` and the fields;
    otherwise aligned text, coloured if `stream` is a terminal. Applies to records of other libraries too. A
    later call replaces the configuration.
    """
    stream = stream or sys.stderr
    severity = logging.getLevelName(level.upper())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if json else TextFormatter(is_coloured=stream.isatty()))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(severity)
    for name in NOISY_LOGGERS:
        logging.getLogger(name).setLevel(max(severity, logging.WARNING))


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        time = datetime.fromtimestamp(record.created, timezone.utc)
        head = {
            "timestamp": time.isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
        }
        entry: dict[str, object] = {**head, **_event_and_fields(record), **head}
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return _encode_json(entry)


class TextFormatter(logging.Formatter):
    """One line of text per record: time, level, event, fields; then the traceback of an exception.

    Tracebacks do not show local variables, which may contain tokens.
    """

    def __init__(self, *, is_coloured: bool) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._is_coloured = is_coloured

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines of a record."""
        fields = dict(_event_and_fields(record))
        level = record.levelname.lower()
        event = str(fields.pop("event"))
        parts = [
            self._paint(self.formatTime(record, self.datefmt), DIM),
            f"[{self._paint(level.ljust(9), LEVEL_COLOURS.get(level, RESET))}]",
            self._paint(event, BOLD),
            *(f"{self._paint(name, CYAN)}={self._paint(_text(value), MAGENTA)}" for name, value in fields.items()),
        ]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line

    def _paint(self, text: str, colour: str) -> str:
        return f"{colour}{text}{RESET}" if self._is_coloured else text


def _event_and_fields(record: logging.LogRecord) -> Mapping[str, object]:
    """Return the event and fields of a record of `Logger`; of another record, its message."""
    found: Mapping[str, object] | None = getattr(record, FIELDS, None)
    return {"event": record.getMessage()} if found is None else found


def _text(value: object) -> str:
    if not isinstance(value, str):
        return repr(value)
    return value if QUOTED_CHARACTERS.isdisjoint(value) else repr(value)

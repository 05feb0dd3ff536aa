"""Log lines as text and as JSON."""

from __future__ import annotations

import io
import json
import logging

import pytest

from rfork.logs import TextFormatter, configure, logger, with_fields


def logged(*, as_json: bool, level: str) -> list[str]:
    """Return the lines of a debug event, an info event and a record of the standard library."""
    stream = io.StringIO()
    configure(as_json, level, stream=stream)
    log = logger("rfork.test")
    log.debug("chunk.read", chunk=3)
    log.info("fork.finished", seconds=1.5)
    logging.getLogger("elsewhere").warning("disk %s", "full")
    return stream.getvalue().splitlines()


def test_json_lines_carry_level_event_and_fields() -> None:
    """With JSON each event is one object, whichever logger wrote it, and events below the level are omitted."""
    objects = [json.loads(line) for line in logged(as_json=True, level="info")]
    assert {True} == {one.pop("timestamp").endswith("Z") for one in objects}
    assert [
        {"level": "info", "event": "fork.finished", "seconds": 1.5},
        {"level": "warning", "event": "disk full"},
    ] == objects


def test_text_lines_carry_level_event_and_fields() -> None:
    """As text each event is one line, without colour codes if there is no terminal."""
    lines = [line.split(maxsplit=1)[1] for line in logged(as_json=False, level="debug")]
    assert [
        "[debug    ] chunk.read chunk=3",
        "[info     ] fork.finished seconds=1.5",
        "[warning  ] disk full",
    ] == lines


@pytest.mark.parametrize("as_json", [True, False])
def test_tracebacks_do_not_show_local_variables(as_json: bool) -> None:
    """A logged exception has its traceback without local values such as tokens."""
    stream = io.StringIO()
    configure(as_json, "info", stream=stream)
    token = "".join(("se", "cret"))
    try:
        raise ValueError(f"a token of {len(token)} characters")
    except ValueError:
        logger("rfork.test").exception("lease.refused")
    assert "a token of 6 characters" in stream.getvalue()
    assert "secret" not in stream.getvalue()


def test_libraries_log_warnings_only() -> None:
    """Requests that uvicorn and httpx log are omitted; their warnings are not."""
    stream = io.StringIO()
    configure(True, "info", stream=stream)
    logging.getLogger("httpx").info("GET /v1/models")
    logging.getLogger("uvicorn").error("no")
    assert ["no"] == [json.loads(line)["event"] for line in stream.getvalue().splitlines()]


def test_bound_and_context_fields_are_added(caplog: pytest.LogCaptureFixture) -> None:
    """Fields of the context come first, then those of the logger, then those of the event, which replace them."""
    log = logger("rfork.test").bind(port=1, tries=1)
    with with_fields(trace="a"):
        log.warning("retried", tries=2)
    log.warning("closed")
    assert ["retried trace=a port=1 tries=2", "closed port=1 tries=1"] == caplog.messages


def test_a_record_names_its_caller(caplog: pytest.LogCaptureFixture) -> None:
    """The file of a record is that of the caller, not that of the logger."""
    logger("rfork.test").warning("here")
    assert __file__ == caplog.records[0].pathname


def test_a_logger_reports_the_levels_that_it_logs(caplog: pytest.LogCaptureFixture) -> None:
    """Callers need not compute the fields of the others."""
    caplog.set_level(logging.INFO, "rfork.test")
    log = logger("rfork.test")
    assert log.is_enabled_for(logging.INFO)
    assert not log.is_enabled_for(logging.DEBUG)


def test_text_with_spaces_is_quoted() -> None:
    """The end of a value is visible, except in messages of the standard library's loggers."""
    stream = io.StringIO()
    configure(False, "info", stream=stream)
    logger("rfork.test").info("planner lost", reason="no response", url="http://p", port=None)
    assert "planner lost reason='no response' url=http://p port=None" in stream.getvalue()


def test_terminals_get_colours() -> None:
    """The level has a colour of its own."""
    record = logging.makeLogRecord({"levelname": "WARNING", "msg": "disk full"})
    assert "[\x1b[33mwarning  \x1b[0m] \x1b[1mdisk full\x1b[0m" in TextFormatter(is_coloured=True).format(record)

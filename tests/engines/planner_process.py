"""A real planner process for engine tests."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from types import TracebackType

from typing_extensions import Self

from tests.processes import RforkProcess

READY = r'^.*"event": ?"ready".*$'


class PlannerProcess:
    """Context manager for ``rfork planner`` on the loopback interface; ready when it is entered.

    `port` 0 selects a free one; a test that starts the planner after its clients names one. The planner
    removes instances that a test killed within three seconds, unless `environment` changes that
    (``RFORK_PLANNER_*``).
    """

    def __init__(self, *, port: int = 0, environment: Mapping[str, str] | None = None) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RFORK_")}
        quick = {"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "0.5", "RFORK_PLANNER_INSTANCE_TTL_S": "3"}
        self.environment = {**inherited, "PYTHONUNBUFFERED": "1", **quick, **(environment or {})}
        self.port = port
        self.url = ""
        """Set once it is ready."""
        self._process: RforkProcess | None = None

    @property
    def process(self) -> RforkProcess:
        """The process, which a test may stop with SIGSTOP or kill."""
        if self._process is None:
            raise RuntimeError("the planner was not started")
        return self._process

    def start(self) -> None:
        """Start it and wait until it is ready; otherwise TimeoutError with all its output."""
        self._process = RforkProcess(("planner", "--port", str(self.port), "--json"), self.environment)
        ready = json.loads(self._process.wait_for(READY).group())
        self.url = ready["url"]

    def stop(self) -> None:
        """End it. Idempotent."""
        if self._process is not None:
            self._process.stop()

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        if error_type is not None:
            print(self.process.transcript())

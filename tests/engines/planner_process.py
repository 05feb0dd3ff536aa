"""A real planner process for tests of engines, with what the planner itself says of its fleet."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from tests.processes import RforkProcess

READY = r'^.*"event": ?"ready".*$'


class PlannerProcess:
    """``rfork planner`` on the loopback interface: a context manager that returns once it is ready.

    `port` 0 takes any free one; a test that starts it after its clients names one. What a test kills is
    forgotten within three seconds, unless `environment` says otherwise (``RFORK_PLANNER_*``).
    """

    def __init__(self, *, port: int = 0, environment: Mapping[str, str] | None = None) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("RFORK_")}
        quick = {"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "0.5", "RFORK_PLANNER_INSTANCE_TTL_S": "3"}
        self.environment = {**inherited, "PYTHONUNBUFFERED": "1", **quick, **(environment or {})}
        self.port = port
        self.url = ""
        """Known once it is ready."""
        self._process: RforkProcess | None = None

    @property
    def process(self) -> RforkProcess:
        """The process, to be stopped with SIGSTOP or killed."""
        if self._process is None:
            raise RuntimeError("the planner was not started")
        return self._process

    def start(self) -> None:
        """Start it and wait until it is ready; TimeoutError with all it wrote if it does not get there."""
        self._process = RforkProcess(("planner", "--port", str(self.port), "--json"), self.environment)
        ready = json.loads(self._process.wait_for(READY).group())
        self.url = ready["url"]

    def stop(self) -> None:
        """End it. Doing so again is harmless."""
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

"""Worker processes of `benchmarks.disturb`: their cores, and how they receive commands."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from types import TracebackType
from typing import Generic, TypeVar

from torch import nn
from typing_extensions import Self

from rfork import logs, settings
from rfork._api import fork_with_fallbacks
from rfork.errors import RforkError
from rfork.receiver.planner_requests import OnProgress
from rfork.receiver.report import ForkReport
from rfork.settings import InstanceSettings, PlannerSettings

LOOPBACK = "127.0.0.1"
MODEL = "disturb"
REPLY_TIMEOUT_S = 180.0

OrderT = TypeVar("OrderT")
ReplyT = TypeVar("ReplyT")


def seed_cores() -> set[int]:
    """Return the one core of the seed process, shared by inference and exporters."""
    return {min(os.sched_getaffinity(0))}


def other_cores() -> set[int]:
    """Return the cores of the readers, the planner and this benchmark's own process."""
    return os.sched_getaffinity(0) - seed_cores() or seed_cores()


def settings_for(planner: str, transport: str, *, governed: bool) -> InstanceSettings:
    """Return the product's defaults over one transport; without `governed`, the governor is off."""
    return settings.load(
        InstanceSettings,
        planner=planner,
        transports=(transport,),
        bind=LOOPBACK,
        allow_unauthenticated_tcp=True,
        drain_timeout_s=0.0,
        max_latency_ratio=None if governed else 0.0,
    )


def fork_without_serving(module: nn.Module, chosen: InstanceSettings, on_progress: OnProgress) -> ForkReport:
    """Fill the module with `MODEL`. Nothing reads from this instance meanwhile: all readers read from the seed.

    `rfork.fork` rejects an instance without reader slots, so this is the function below it.
    """
    return fork_with_fallbacks(
        module,
        model=MODEL,
        rank=None,
        snapshot=None,
        later_fallbacks=(),
        files=None,
        exclude=(),
        settings=chosen.model_copy(update={"max_readers": 0}),
        on_progress=on_progress,
    )


class BenchWorker(Generic[OrderT, ReplyT]):
    """A spawned process that executes commands, pinned to `cores`, and always ended.

    `main(orders, *arguments)` makes the function that executes one command. The shared `counter` can be read
    while a command runs.
    """

    def __init__(self, name: str, cores: set[int], main: Callable[..., Callable[[OrderT], ReplyT]], *arguments: str):
        context = multiprocessing.get_context("spawn")
        self.name = name
        self.counter: Synchronized[int] = context.Value("Q", 0)
        self._pipe, child_pipe = context.Pipe()
        self._process = context.Process(
            target=_worker_main,
            args=(child_pipe, cores, main, self.counter, arguments),
            name=name,
            daemon=True,
        )
        self._process.start()
        child_pipe.close()  # so that its death ends our read

    def send(self, order: OrderT) -> None:
        """Send a command; `reply` returns its result."""
        self._pipe.send(order)

    def reply(self) -> ReplyT:
        """Return the result of the oldest command; raises RforkError if it failed or no reply arrived."""
        try:
            if not self._pipe.poll(REPLY_TIMEOUT_S):
                raise RforkError(f"{self.name} did not reply for {REPLY_TIMEOUT_S:g} s")
            reply_value, error = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise RforkError(f"{self.name} ended") from None
        if error:
            raise RforkError(f"{self.name}: {error}")
        reply: ReplyT = reply_value
        return reply

    def request(self, order: OrderT) -> ReplyT:
        """`send` and `reply`."""
        self.send(order)
        return self.reply()

    def __enter__(self) -> Self:
        self.reply()  # it is ready
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe.close()  # the process ends itself when it waits for a command
        self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _worker_main(
    orders: Connection,
    cores: set[int],
    main: Callable[..., Callable[[OrderT], ReplyT]],
    counter: Synchronized[int],
    arguments: tuple[str, ...],
) -> None:
    os.sched_setaffinity(0, cores)
    logs.configure(json=False, level="error")
    handle = main(counter, *arguments)
    orders.send((None, ""))
    while True:
        try:
            order: OrderT = orders.recv()
        except EOFError:
            return
        try:
            orders.send((handle(order), ""))
        except Exception as error:  # whatever the error, the other side waits for a reply
            orders.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


def planner_process(url: Connection, cores: set[int]) -> None:
    """Run the planner: sends its URL once it serves."""
    from planner.server import serve

    os.sched_setaffinity(0, cores)
    logs.configure(json=False, level="error")
    serve(settings.load(PlannerSettings, bind=LOOPBACK, port=0), url.send)

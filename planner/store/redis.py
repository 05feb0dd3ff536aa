"""Store that several planner replicas share through Redis.

Each replica keeps all records in memory and follows one stream of changes. Changes are numbered, and every
replica applies them in that order: a commit returns the preceding changes of other replicas, so that after
it, or after a CommitConflict, `state` equals the contents of Redis. If the contents do not follow from what
was read (Redis was emptied, or restarted with older data, or the stream does not reach back far enough),
everything is loaded again, as after every outage.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from planner.clock import Clock
from planner.core.records import GroupKey, StoreChange
from planner.store.base import CommitConflict, StoreUnavailable
from planner.store.messages import (
    CONFLICT_VERDICT,
    READ_COUNT,
    UNKNOWN_VERDICT,
    ChangeMessage,
    LogEntry,
    ReplicaOutdated,
    body_of,
)
from planner.store.replica import Replica
from rfork.errors import MissingExtra
from rfork.logs import logger

if TYPE_CHECKING:
    from planner.store.redis_client import RedisClient

BATCH: Final = 256
"""Maximum number of changes per batch; while one batch is in flight the next one fills."""
BATCH_WINDOW_S: Final = 0.005
"""Time for which the follower lets changes accumulate: commits return the changes they depend on anyway."""
BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 2.0
CANCEL_RETRY_S: Final = 0.1
TIMEOUT_FACTOR: Final = 3
"""Multiples of the follower's wait without a response from Redis after which this replica's clock stops."""


@dataclass(frozen=True)
class PendingCommit:
    """A change in flight (None: only a check for other changes), and the future of its verdict."""

    body: ChangeMessage | None
    verdict: asyncio.Future[int]


class RedisStore:
    """Store of one of several planner replicas."""

    def __init__(
        self, url: str, clock: Clock, *, max_finished_forks: int, timeout_s: float, prefix: str = "rfork"
    ) -> None:
        """Does not connect yet. Raises SettingsError for an invalid URL, MissingExtra without `redis`."""
        self._client = _create_client(url, timeout_s=timeout_s, max_finished_forks=max_finished_forks, prefix=prefix)
        self._replica = Replica(
            clock, max_finished_forks=max_finished_forks, max_staleness_s=TIMEOUT_FACTOR * self._client.block_s
        )
        self.state = self._replica.state
        self._timeout_s = timeout_s
        self._pending_commits: deque[PendingCommit] = deque()
        self._sent: list[PendingCommit] = []  # without a response yet
        self._work_available = asyncio.Event()
        self._failure: str | None = "the store has not been started"
        self._task: asyncio.Task[None] | None = None
        self._log = logger("planner.store.redis")

    async def start(self) -> None:
        """Connect and load; raises StoreUnavailable, and keeps retrying until `stop`."""
        try:
            await self._load()
        except StoreUnavailable as error:
            self._failure = str(error)
            raise
        finally:
            self._task = asyncio.create_task(self._run(loaded=self.ready), name="rfork-store")

    async def stop(self) -> None:
        """Stop the task, fail pending commits, and close the connections."""
        if self._task is not None:
            await _end(self._task, cancel_retry_s=10 * CANCEL_RETRY_S)
            self._task = None
        self._fail_all("the store was stopped")
        await self._client.close()

    async def commit(self, change: StoreChange) -> None:
        """Apply the change to Redis and to `state`.

        Raises CommitConflict if another replica changed the group; StoreUnavailable within the timeout, in
        which case a response may have been lost: whether Redis applied the change is known once everything is
        loaded again.
        """
        if change.group is not None and change.version != self.version(change.group):
            raise CommitConflict
        instances = [self.state.instance(each.report.instance_id) for each in change.instances]
        forks = [self.state.fork(each.fork_id) for each in change.forks]
        emptied = self._replica.groups_emptied_by(change.removed) if change.removed else []
        body = body_of(
            change,
            {each.report.instance_id: each for each in instances if each is not None},
            {each.fork_id: each for each in forks if each is not None},
            emptied,
        )
        if body == ChangeMessage():
            return
        verdict = await self._submit(body)
        if verdict == UNKNOWN_VERDICT:
            verdict = await self._submit(body_of(change, {}, {}, emptied))
        if verdict == CONFLICT_VERDICT:
            raise CommitConflict

    def version(self, group: GroupKey) -> int:
        """Return the group's version as known to this replica (`planner.store.replica.Replica.version`)."""
        return self._replica.version(group)

    def now(self) -> float:
        """Return the clock that all replicas share (`planner.store.replica.Replica`)."""
        return self._replica.now()

    @property
    def ready(self) -> bool:
        """True if Redis responds, and all its contents are loaded."""
        return self._failure is None

    # -- one replica's session with Redis ---------------------------------------------------------

    async def _run(self, loaded: bool) -> None:
        """Load everything and serve until something fails; repeat until the store is stopped."""
        wait_s = BACKOFF_S
        while True:
            try:
                if not loaded:
                    if self._failure is not None:
                        # Spread the replicas' reconnects.
                        await asyncio.sleep(random.uniform(wait_s / 2, wait_s))
                        wait_s = min(2 * wait_s, MAX_BACKOFF_S)
                    await self._load()
                loaded, wait_s = False, BACKOFF_S
                await self._serve()
            except ReplicaOutdated as reason:
                self._log.warning(
                    "reloading all records from the store", reason=str(reason), store=self._client.address
                )
                # Redis may have applied these: a retry will see the result.
                _fail(self._sent, f"reloading the store at {self._client.address}: {reason}")
                self._sent = []
            except StoreUnavailable as error:
                await self._fail(str(error))
            except Exception as error:
                # After an unexpected error the replica must not stop following: reload everything.
                self._log.error("store replication failed, reloading all records", exc_info=error)
                await self._fail(f"store replication failed: {type(error).__name__}")

    async def _serve(self) -> None:
        """Write and follow; exits by raising ReplicaOutdated or StoreUnavailable."""
        tasks = [asyncio.create_task(work) for work in (self._write(), self._follow())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(*tasks, cancel_retry_s=CANCEL_RETRY_S)
        for task in done:
            task.result()

    async def _load(self) -> None:
        contents = await self._client.load()
        if self._replica.epoch not in ("", contents.epoch):
            self._log.warning("store was emptied, waiting for heartbeats", store=self._client.address)
        self._replica.fill(contents)
        if self._failure is not None:
            self._failure = None
            self._log.info("store ready", store=self._client.address, instances=len(contents.instances))

    async def _fail(self, reason: str) -> None:
        if self._failure is None:
            self._log.error("store unavailable", reason=reason)
        self._fail_all(reason)
        await self._client.close()

    # -- changes ----------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Apply the changes of other replicas as they arrive."""
        while True:
            entries = await self._client.read_changes(self._replica.applied)
            for entry in entries:
                self._replica.apply(entry)
            if not entries:
                await self._submit(None)  # nothing happened, or the stream was deleted: the script finds out
                continue
            if len(entries) < READ_COUNT:
                self._replica.mark_synced()
            await asyncio.sleep(BATCH_WINDOW_S)

    async def _write(self) -> None:
        """Write pending commits to Redis, one batch at a time."""
        while True:
            await self._work_available.wait()
            batch = [self._pending_commits.popleft() for _ in range(min(BATCH, len(self._pending_commits)))]
            if not self._pending_commits:
                self._work_available.clear()
            self._sent = [pending for pending in batch if not pending.verdict.done()]
            await self._write_batch(self._sent)
            self._sent = []

    async def _write_batch(self, batch: list[PendingCommit]) -> None:
        bodies = [pending.body for pending in batch if pending.body is not None]
        replica = self._replica
        try:
            outcome = await self._client.commit(replica.epoch, replica.applied, replica.now(), bodies)
        except ReplicaOutdated:
            # Redis processed none of them: they are sent again once everything is loaded.
            self._pending_commits.extendleft(reversed(batch))
            self._work_available.set()
            self._sent = []
            raise
        # From here on Redis has responded: on an error everything is loaded again, and none is sent twice.
        for entry in outcome.entries_since:
            replica.apply(entry)
        for body, verdict in zip(bodies, outcome.verdicts, strict=True):
            if verdict not in (CONFLICT_VERDICT, UNKNOWN_VERDICT):
                replica.apply(LogEntry(verdict, body))
        replica.mark_synced(outcome.time)
        verdicts = iter(outcome.verdicts)
        for pending in batch:
            verdict = CONFLICT_VERDICT if pending.body is None else next(verdicts)
            if not pending.verdict.done():
                pending.verdict.set_result(verdict)

    async def _submit(self, body: ChangeMessage | None) -> int:
        """Queue a commit for the writer; return the script's verdict."""
        if self._failure is not None:
            raise StoreUnavailable(self._failure)
        pending = PendingCommit(body, asyncio.get_running_loop().create_future())
        self._pending_commits.append(pending)
        self._work_available.set()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await pending.verdict
        except TimeoutError:
            reason = f"no response within {self._timeout_s:g} s"
            raise StoreUnavailable(f"the store at {self._client.address} is unavailable: {reason}") from None

    def _fail_all(self, reason: str) -> None:
        self._failure = reason
        _fail((*self._sent, *self._pending_commits), reason)
        self._sent = []
        self._pending_commits.clear()
        self._work_available.clear()


async def _end(*tasks: asyncio.Task[None], cancel_retry_s: float) -> None:
    """Cancel the tasks until they end: redis-py may swallow a cancellation."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=cancel_retry_s)
    await asyncio.gather(*tasks, return_exceptions=True)  # retrieve their exceptions


def _fail(commits: Iterable[PendingCommit], reason: str) -> None:
    for pending in commits:
        if not pending.verdict.done():
            pending.verdict.set_exception(StoreUnavailable(reason))


def _create_client(url: str, *, timeout_s: float, max_finished_forks: int, prefix: str) -> RedisClient:
    try:
        from planner.store.redis_client import RedisClient
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "redis":
            raise
        raise MissingExtra("the redis package", extra="redis") from None
    return RedisClient(url, timeout_s=timeout_s, max_finished_forks=max_finished_forks, prefix=prefix)

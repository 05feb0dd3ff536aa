"""Store that several planner replicas share through Redis.

Each replica keeps all records in memory and follows one stream of changes. Changes are numbered, and every
replica applies them in that order: a commit returns the preceding changes of other replicas, so that after
it, or after a CommitConflict, `state` equals the contents of Redis. If the contents do not follow from what
was read (Redis was emptied, or restarted with older data, or the stream does not reach back far enough),
everything is loaded again, as after every outage.

A script writes the changes, because with WATCH and MULTI most batches of five replicas had to be repeated
(606 of 834, with 20 changes each; 1,500 instead of 3,500 changes a second). The client does not retry, since a
change whose response was lost may have been applied. The script also keeps the records in hashes: otherwise a
planner would have to write a snapshot for every 20,000 changes, and that of 10,000 instances takes it 0.5 s.

Keys::

    meta        epoch, number of changes, furthest clock of any replica, `floor`; for the stream, the change
                at which its newer half begins and the bytes of that half
    changes     stream of the last changes, each with the shared time; the id of the n-th is n-0, so that
                a gap is detected
    instances   `ID PART` -> JSON text (planner.store.messages)
    forks       the same
    versions    group -> number of the last change of its forks; those of empty groups are removed, and
                then count as `floor`, the number of the change that removed the last one
    ended       finished forks, in order
    scaleups    id -> JSON text
    holders     the same

All keys expire when no planner has written for a day. Only this module imports the `redis` package.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from planner.clock import Clock
from planner.core.records import GroupKey, StoreChange
from planner.store.base import CommitConflict, StoreUnavailable
from planner.store.messages import (
    CHANGE_ADAPTER,
    CONFLICT_VERDICT,
    FORKS,
    HOLDER_ADAPTER,
    INSTANCES,
    SCALEUP_ADAPTER,
    UNKNOWN_VERDICT,
    ChangeMessage,
    Codec,
    CommitResult,
    LogEntry,
    Record,
    ReplicaOutdated,
    StoreSnapshot,
    body_of,
    group_from,
)
from planner.store.replica import Replica
from rfork.addresses import host_port
from rfork.asyncio_timeout import timeout
from rfork.errors import SettingsError
from rfork.logs import logger

BATCH: Final = 256
"""Maximum number of changes per batch; while one batch is in flight the next one fills."""
READ_COUNT: Final = 1000
"""Maximum number of changes that the follower reads at a time."""
BATCH_WINDOW_S: Final = 0.005
"""Time for which the follower lets changes accumulate: commits return the changes they depend on anyway."""
BACKOFF_S: Final = 0.05
MAX_BACKOFF_S: Final = 2.0
CANCEL_RETRY_S: Final = 0.1
TIMEOUT_FACTOR: Final = 3
"""Multiples of the follower's wait without a response from Redis after which this replica's clock stops."""
FORMAT: Final = 8
"""Format of keys and records: planners of different formats do not see one another."""
KEYS: Final = ("meta", "changes", "instances", "forks", "versions", "ended", "scaleups", "holders")
KEEP_CHANGES: Final = 20_000
"""Stream length. A replica further behind reloads everything: ten seconds of 10,000 instances' heartbeats."""
KEEP_BYTES: Final = 64 << 20
"""Stream size. A heartbeat has 130 to 300 bytes, a fork's progress 900, its plan 2,100, so that the length is
usually reached first; but the largest report has 590,000, and 20,000 of those would be 12 GB.
"""
KEEP_S: Final = 24 * 3600
LOAD_TIMEOUTS: Final = 10
"""Loading everything may take this many times as long as one call: the response has tens of MB."""


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
        """Does not connect yet. Raises SettingsError for an invalid URL."""
        self._client = RedisClient(url, timeout_s=timeout_s, max_finished_forks=max_finished_forks, prefix=prefix)
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
            async with timeout(self._timeout_s):
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


class RedisClient:
    """One replica's connections. Every method raises StoreUnavailable within `timeout_s`."""

    def __init__(self, url: str, *, timeout_s: float, max_finished_forks: int, prefix: str) -> None:
        """Does not connect yet. Raises SettingsError for an invalid URL."""
        self.block_s = min(1.0, timeout_s / 2)
        self._timeout_s = timeout_s
        self._max_finished_forks = max_finished_forks
        # The braces keep all keys in one slot of a Redis cluster.
        self._keys = {name: f"{{{prefix}}}:{FORMAT}:{name}" for name in KEYS}
        try:
            self.address = _address(url)
            self._redis: Redis = Redis.from_url(
                url,
                protocol=2,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),
            )
        except ValueError:
            # Never the URL itself: it may contain a password.
            raise SettingsError(
                "RFORK_PLANNER_STORE is not a Redis URL", hint="write redis://[USER:PASSWORD@]HOST:PORT/DB"
            ) from None

    async def load(self) -> StoreSnapshot:
        """Load everything, in one step; an empty Redis gets a new epoch."""
        async with self._with_timeout(LOAD_TIMEOUTS):
            await self._call("SCRIPT LOAD", COMMIT)
            async with self._redis.pipeline(transaction=True) as steps:
                steps.execute_command("EVAL", OPEN, len(KEYS), *self._keys.values(), uuid.uuid4().hex, KEEP_S * 1000)
                for name in ("instances", "forks", "versions", "scaleups", "holders"):
                    steps.execute_command("HGETALL", self._keys[name])
                steps.execute_command("ZRANGE", self._keys["ended"], 0, -1)
                header, instances, forks, versions, scaleups, holders, ended = await steps.execute()
                epoch, number, at, floor = header
            return StoreSnapshot(
                epoch=epoch.decode(),
                number=int(number),
                time=float(at),
                instances=_records(INSTANCES, instances),
                forks=_records(FORKS, forks),
                versions={group_from(group.decode()): int(version) for group, version in versions.items()},
                floor=int(floor or 0),
                ended=tuple(name.decode() for name in ended),
                scaleups={name.decode(): SCALEUP_ADAPTER.validate_json(text) for name, text in scaleups.items()},
                holders={name.decode(): HOLDER_ADAPTER.validate_json(text) for name, text in holders.items()},
            )

    async def commit(self, epoch: str, since: int, at: float, bodies: Sequence[ChangeMessage]) -> CommitResult:
        """Send changes from a replica that has read `since` changes. Each is applied atomically or not at all.

        Raises ReplicaOutdated if the replica must load everything again.
        """
        async with self._with_timeout():
            reply = await self._call(
                "EVALSHA", COMMIT_SHA1, len(KEYS), *self._keys.values(),
                epoch, since, f"{at:.6f}", self._max_finished_forks, KEEP_CHANGES, KEEP_BYTES // 2,
                KEEP_S * 1000,
                INSTANCES.head, " ".join(INSTANCES.part_names), FORKS.head, " ".join(FORKS.part_names),
                *(CHANGE_ADAPTER.dump_json(body) for body in bodies),
            )  # fmt: skip
            if reply is None:
                raise ReplicaOutdated("the epoch changed, or the stream does not reach back far enough")
            missed, verdicts, shared_time = reply
            entries = tuple(_entry(stream_id, _fields(flat)) for stream_id, flat in missed)
            return CommitResult(entries, tuple(verdicts), float(shared_time))

    async def read_changes(self, since: int) -> tuple[LogEntry, ...]:
        """Return the changes after `since`, at most READ_COUNT; waits up to `block_s` for one."""
        async with self._with_timeout():
            reply = await self._call(
                "XREAD", "COUNT", READ_COUNT, "BLOCK", int(self.block_s * 1000),
                "STREAMS", self._keys["changes"], f"{since}-0",
            )  # fmt: skip
            return tuple(_entry(stream_id, fields) for stream_id, fields in reply[0][1]) if reply else ()

    async def close(self) -> None:
        """Close all connections; the next call opens new ones."""
        with contextlib.suppress(RedisError, OSError):
            await self._redis.aclose()

    async def _call(self, *arguments: str | bytes | int) -> Any:
        return await self._redis.execute_command(*arguments)  # type: ignore[no-untyped-call]

    @contextlib.asynccontextmanager
    async def _with_timeout(self, timeout_factor: int = 1) -> AsyncIterator[None]:
        try:
            async with timeout(self._timeout_s * timeout_factor):
                yield
        except NoScriptError:
            raise ReplicaOutdated("Redis was restarted") from None
        except TimeoutError:
            raise self._unavailable(f"no response within {self._timeout_s * timeout_factor:g} s") from None
        except (RedisError, OSError) as error:
            raise self._unavailable(str(error) or type(error).__name__) from None
        except ValueError as error:
            first_line = str(error).partition("\n")[0]
            raise self._unavailable(f"unreadable contents (written by another version?): {first_line}") from None

    def _unavailable(self, reason: str) -> StoreUnavailable:
        return StoreUnavailable(f"the store at {self.address} is unavailable: {reason}")


def _address(url: str) -> str:
    """Return host and port, or the socket's path: never the user or the password. Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path
    return host_port(parts.hostname or "localhost", parts.port or 6379)


def _entry(stream_id: bytes, fields: Mapping[bytes, bytes]) -> LogEntry:
    number = int(stream_id.partition(b"-")[0])
    return LogEntry(number, CHANGE_ADAPTER.validate_json(fields[b"body"]), float(fields[b"at"]))


def _fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """Return the fields of a stream entry from a script, which lists names and values alternately."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _records(codec: Codec[Record], raw_records: Mapping[bytes, bytes]) -> dict[str, Record]:
    """Return the records whose parts are `ID PART` -> text."""
    patches: dict[str, dict[str, str]] = {}
    for key, text in raw_records.items():
        record_id, _, part = key.decode().partition(" ")
        patches.setdefault(record_id, {})[part] = text.decode()
    return {record_id: codec.apply(None, patch) for record_id, patch in patches.items()}


# Scripts that Redis runs atomically. Both receive the keys of `KEYS`, in that order.

OPEN: Final = """
-- Arguments: a new epoch, TTL of the keys in milliseconds. Returns {epoch, number of changes, shared time, floor}.
if redis.call('HEXISTS', KEYS[1], 'epoch') == 0 then
    redis.call('DEL', unpack(KEYS))
    redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'number', '0', 'at', redis.call('TIME')[1])
end
-- A write, so that a Redis that accepts none (full, or a read-only replica) is detected here.
redis.call('HSET', KEYS[1], 'opened', ARGV[1])
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ARGV[2]) end
return redis.call('HMGET', KEYS[1], 'epoch', 'number', 'at', 'floor')
"""

COMMIT: Final = """
-- Arguments: the replica's epoch, number of changes it has read and its time; maximum number of finished forks,
-- length of the stream and bytes of half of it, TTL of the keys in milliseconds; head part and all parts of an
-- instance, then of a fork; bodies.
-- Returns {changes it has not read, a verdict for each body, shared time}, or nil if it must load everything.
local meta, changes, instances, forks, versions, ended, scaleups, holders = unpack(KEYS)
local epoch, since, at, max_finished_forks, max_changes, half_bytes, ttl_ms = unpack(ARGV, 1, 7)
local instance_head, instance_parts, fork_head, fork_parts = unpack(ARGV, 8, 11)
local CONFLICT, UNKNOWN, FIRST_BODY = 0, -1, 12
since = tonumber(since)

local known = redis.call('HMGET', meta, 'epoch', 'number', 'at', 'floor', 'half', 'half_bytes')
if known[1] ~= epoch then return false end
if tonumber(at) < tonumber(known[3]) then at = known[3] end
local number = tonumber(known[2])
local floor = tonumber(known[4] or '0')
local half, bytes = tonumber(known[5] or '1'), tonumber(known[6] or '0')
local missed = {}
if number ~= since then
    missed = redis.call('XRANGE', changes, '(' .. since .. '-0', '+')
    if #missed ~= number - since then return false end
end

local function complete(hash, head, patches)
    for _, patch in ipairs(patches) do
        local has_head = patch[2][head] or redis.call('HEXISTS', hash, patch[1] .. ' ' .. head) == 1
        if not has_head then return false end
    end
    return true
end

local function write(hash, patches)
    for _, patch in ipairs(patches) do
        local fields = {}
        for part, text in pairs(patch[2]) do
            table.insert(fields, patch[1] .. ' ' .. part)
            table.insert(fields, text)
        end
        redis.call('HSET', hash, unpack(fields))
    end
end

local function remove(hash, parts, id)
    local fields = {}
    for part in string.gmatch(parts, '%S+') do table.insert(fields, id .. ' ' .. part) end
    redis.call('HDEL', hash, unpack(fields))
end

-- The stream has two halves, so that a limit on its bytes needs only two numbers: once the newer half is full, the
-- older one is dropped.
local function append_change(text)
    bytes = bytes + #text
    if bytes > tonumber(half_bytes) then
        redis.call('XTRIM', changes, 'MINID', '=', half .. '-0')
        half, bytes = number, #text
    end
    redis.call('XADD', changes, 'MAXLEN', '~', max_changes, number .. '-0', 'body', text, 'at', at)
end

local function commit(text)
    local body = cjson.decode(text)
    if body.group ~= '' then
        local version = tonumber(redis.call('HGET', versions, body.group) or floor)
        if version ~= body.version then return CONFLICT end
    end
    if not complete(instances, instance_head, body.instances) then return UNKNOWN end
    if not complete(forks, fork_head, body.forks) then return UNKNOWN end
    write(instances, body.instances)
    write(forks, body.forks)
    for _, id in ipairs(body.removed) do remove(instances, instance_parts, id) end
    for _, each in ipairs(body.scaleups) do redis.call('HSET', scaleups, each[1], each[2]) end
    for _, id in ipairs(body.withdrawn) do redis.call('HDEL', scaleups, id) end
    for _, each in ipairs(body.holders) do redis.call('HSET', holders, each[1], each[2]) end
    for _, id in ipairs(body.removed_holders) do redis.call('HDEL', holders, id) end
    number = redis.call('HINCRBY', meta, 'number', 1)
    if body.group ~= '' then redis.call('HSET', versions, body.group, number) end
    for _, group in ipairs(body.emptied) do
        redis.call('HDEL', versions, group)
        floor = number
    end
    for _, patch in ipairs(body.forks) do
        local finish = patch[2]['finish']
        if finish == 'null' then
            redis.call('ZREM', ended, patch[1])
        elseif finish then
            redis.call('ZADD', ended, 'NX', number, patch[1])
        end
    end
    append_change(text)
    return number
end

local verdicts = {}
for index = FIRST_BODY, #ARGV do table.insert(verdicts, commit(ARGV[index])) end

local excess = redis.call('ZCARD', ended) - tonumber(max_finished_forks)
if excess > 0 then
    local oldest = redis.call('ZPOPMIN', ended, excess)
    for index = 1, #oldest, 2 do remove(forks, fork_parts, oldest[index]) end
end
redis.call('HSET', meta, 'at', at, 'floor', floor, 'half', half, 'half_bytes', bytes)
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl_ms) end
return {missed, verdicts, at}
"""

COMMIT_SHA1: Final = hashlib.sha1(COMMIT.encode()).hexdigest()
"""Name of the script in Redis."""

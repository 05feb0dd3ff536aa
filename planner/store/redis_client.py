"""Redis keys that planner replicas share, and the operations on them.

::

    meta        epoch, number of changes, furthest clock of any replica, `floor`; for the stream, the change
                at which its newer half begins and the bytes of that half
    changes     stream of the last changes, each with the shared time; the id of the n-th is n-0, so that
                a gap is detected
    instances   `ID PART` -> JSON text (planner.store.codec)
    forks       the same
    versions    group -> number of the last change of its forks; those of empty groups are removed, and
                then count as `floor`, the number of the change that removed the last one
    ended       finished forks, in order
    scaleups    id -> JSON text

All keys expire when no planner has written for a day. Only this module imports the `redis` package.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from planner.store.base import StoreUnavailable
from planner.store.codec import FORKS, INSTANCES, Codec, Record
from planner.store.messages import (
    CHANGE_ADAPTER,
    READ_COUNT,
    SCALEUP_ADAPTER,
    ChangeMessage,
    CommitResult,
    LogEntry,
    ReplicaOutdated,
    StoreSnapshot,
    group_from,
)
from planner.store.scripts import COMMIT, OPEN
from rfork.addresses import host_port
from rfork.errors import SettingsError

FORMAT: Final = 7
"""Format of keys and records: planners of different formats do not see one another."""
KEYS: Final = ("meta", "changes", "instances", "forks", "versions", "ended", "scaleups")
KEEP_CHANGES: Final = 20_000
"""Stream length. A replica further behind reloads everything: ten seconds of 10,000 instances' heartbeats."""
KEEP_BYTES: Final = 64 << 20
"""Stream size. A heartbeat has 130 to 300 bytes, a fork's progress 900, its plan 2,100, so that the length is
usually reached first; but the largest report has 590,000, and 20,000 of those would be 12 GB.
"""
KEEP_S: Final = 24 * 3600
LOAD_TIMEOUTS: Final = 10
"""Loading everything may take this many times as long as one call: the response has tens of MB."""
COMMIT_SHA1: Final = hashlib.sha1(COMMIT.encode()).hexdigest()
"""Name of the script in Redis."""


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
                for name in ("instances", "forks", "versions", "scaleups"):
                    steps.execute_command("HGETALL", self._keys[name])
                steps.execute_command("ZRANGE", self._keys["ended"], 0, -1)
                header, instances, forks, versions, scaleups, ended = await steps.execute()
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
            async with asyncio.timeout(self._timeout_s * timeout_factor):
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

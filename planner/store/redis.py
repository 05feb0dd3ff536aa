"""Records that several replicas of the planner share through Redis.

Each replica holds all records in memory and follows one stream of changes. All changes are numbered, and
every replica applies them in that order: a commit brings the changes of others that came before it along,
so that after it, or after a Conflict, `state` is what Redis holds. Whatever does not follow from what was
read (Redis was emptied, or restarted with less, or the stream does not go back far enough) ends in reading
everything anew, and so does every outage.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from planner.leases import Clock
from planner.store.base import Change, Conflict, StoreUnavailable
from planner.store.exchange import CONFLICT, READ_COUNT, UNKNOWN, Behind, Body, Entry, body_of
from planner.store.mirror import Mirror
from planner.store.records import GroupKey
from rfork.errors import MissingExtra
from rfork.logs import logger

if TYPE_CHECKING:
    from planner.store.keyspace import Keyspace

BATCH: Final = 256
"""Most changes that travel together; while one batch is under way the next one gathers."""
GATHER_S: Final = 0.005
"""The follower lets changes gather for this long: a commit brings what it needs to know along anyway."""
BACKOFF_S: Final = 0.05
MOST_BACKOFF_S: Final = 2.0
CANCEL_AGAIN_S: Final = 0.1
PATIENCE: Final = 3
"""After this many of the follower's waits without a word from Redis, this replica's clock stands still."""


@dataclass(frozen=True)
class Offer:
    """A change on its way (none: a mere look at what others changed), and where its verdict goes."""

    body: Body | None
    verdict: asyncio.Future[int]


class RedisStore:
    """The store of a planner that is one of several replicas."""

    def __init__(
        self, url: str, clock: Clock, *, keep_forks: int, timeout_s: float, prefix: str = "rfork"
    ) -> None:
        """Connects to nothing yet. Raises SettingsError for the URL, MissingExtra without `redis`."""
        self._keys = _keyspace(url, timeout_s=timeout_s, keep_forks=keep_forks, prefix=prefix)
        self._mirror = Mirror(clock, keep_forks=keep_forks, patience_s=PATIENCE * self._keys.block_s)
        self.state = self._mirror.state
        self._timeout_s = timeout_s
        self._offers: deque[Offer] = deque()
        self._sent: list[Offer] = []  # without an answer yet
        self._wanted = asyncio.Event()
        self._failure: str | None = "the store was not started"
        self._task: asyncio.Task[None] | None = None
        self._log = logger("planner.store.redis")

    async def start(self) -> None:
        """Connect and load; raises StoreUnavailable, and goes on trying until `stop`."""
        try:
            await self._load()
        except StoreUnavailable as error:
            self._failure = str(error)
            raise
        finally:
            self._task = asyncio.create_task(self._run(loaded=self.ready), name="rfork-store")

    async def stop(self) -> None:
        """End the task, refuse what is still under way, and close the connections."""
        if self._task is not None:
            await _end(self._task, again_s=10 * CANCEL_AGAIN_S)
            self._task = None
        self._refuse_all("the store was stopped")
        await self._keys.close()

    async def commit(self, change: Change) -> None:
        """Apply the change to Redis and to `state`.

        Raises Conflict where another replica changed the group; StoreUnavailable within the timeout, and then
        an answer may have been lost: what Redis made of the change shows once everything is loaded again.
        """
        if change.group is not None and change.version != self.version(change.group):
            raise Conflict
        instances = [self.state.instance(each.report.instance_id) for each in change.instances]
        forks = [self.state.fork(each.fork_id) for each in change.forks]
        emptied = self._mirror.emptied_by(change.gone) if change.gone else []
        body = body_of(
            change,
            {each.report.instance_id: each for each in instances if each is not None},
            {each.fork_id: each for each in forks if each is not None},
            emptied,
        )
        if body == Body():
            return
        verdict = await self._offer(body)
        if verdict == UNKNOWN:
            verdict = await self._offer(body_of(change, {}, {}, emptied))
        if verdict == CONFLICT:
            raise Conflict

    def version(self, group: GroupKey) -> int:
        """Of the group's forks, as far as this replica knows (`planner.store.mirror.Mirror.version`)."""
        return self._mirror.version(group)

    def now(self) -> float:
        """The clock that all replicas share (`planner.store.mirror.Mirror`)."""
        return self._mirror.now()

    @property
    def ready(self) -> bool:
        """Whether Redis answers, and all it holds is loaded."""
        return self._failure is None

    # -- one replica's session with Redis ---------------------------------------------------------

    async def _run(self, loaded: bool) -> None:
        """Load everything and serve until something fails, again and again for as long as the store lives."""
        wait_s = BACKOFF_S
        while True:
            try:
                if not loaded:
                    if self._failure is not None:
                        # Not all replicas at once.
                        await asyncio.sleep(random.uniform(wait_s / 2, wait_s))
                        wait_s = min(2 * wait_s, MOST_BACKOFF_S)
                    await self._load()
                loaded, wait_s = False, BACKOFF_S
                await self._serve()
            except Behind as why:
                self._log.warning("store is loaded again", why=str(why), store=self._keys.where)
                # Redis may have taken these: who asks again meets what it made of them.
                _refuse(self._sent, f"the store at {self._keys.where} is loaded again: {why}")
                self._sent = []
            except StoreUnavailable as error:
                await self._fail(str(error))
            except Exception as error:
                # A defect of the planner's own must not leave it deaf: what it holds is made anew.
                self._log.error("store failed", exc_info=error)
                await self._fail(f"the planner failed to keep up with the store: {type(error).__name__}")

    async def _serve(self) -> None:
        """Write and follow; returns by raising Behind or StoreUnavailable."""
        tasks = [asyncio.create_task(work) for work in (self._write(), self._follow())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(*tasks, again_s=CANCEL_AGAIN_S)
        for task in done:
            task.result()

    async def _load(self) -> None:
        contents = await self._keys.load()
        if self._mirror.epoch not in ("", contents.epoch):
            self._log.warning("store was emptied: heartbeats fill it again", store=self._keys.where)
        self._mirror.fill(contents)
        if self._failure is not None:
            self._failure = None
            self._log.info("store is ready", store=self._keys.where, instances=len(contents.instances))

    async def _fail(self, why: str) -> None:
        if self._failure is None:
            self._log.error("store cannot be used", why=why)
        self._refuse_all(why)
        await self._keys.close()

    # -- changes ----------------------------------------------------------------------------------

    async def _follow(self) -> None:
        """Apply what others change, as it comes."""
        while True:
            entries = await self._keys.follow(self._mirror.applied)
            for entry in entries:
                self._mirror.apply(entry)
            if not entries:
                await self._offer(None)  # nothing happened, or the stream is no more: the script tells
                continue
            if len(entries) < READ_COUNT:
                self._mirror.synced()
            await asyncio.sleep(GATHER_S)

    async def _write(self) -> None:
        """Take offers to Redis, one batch at a time."""
        while True:
            await self._wanted.wait()
            taken = [self._offers.popleft() for _ in range(min(BATCH, len(self._offers)))]
            if not self._offers:
                self._wanted.clear()
            self._sent = [offer for offer in taken if not offer.verdict.done()]
            await self._write_batch(self._sent)
            self._sent = []

    async def _write_batch(self, batch: list[Offer]) -> None:
        bodies = [offer.body for offer in batch if offer.body is not None]
        mirror = self._mirror
        try:
            outcome = await self._keys.commit(mirror.epoch, mirror.applied, mirror.now(), bodies)
        except Behind:
            # Redis looked at none of them: they are offered again once everything is loaded.
            self._offers.extendleft(reversed(batch))
            self._wanted.set()
            self._sent = []
            raise
        # From here on Redis has answered: whoever cannot follow it loads everything, and offers none twice.
        for entry in outcome.missed:
            mirror.apply(entry)
        for body, verdict in zip(bodies, outcome.verdicts, strict=True):
            if verdict not in (CONFLICT, UNKNOWN):
                mirror.apply(Entry(verdict, body))
        mirror.synced(outcome.at)
        verdicts = iter(outcome.verdicts)
        for offer in batch:
            verdict = CONFLICT if offer.body is None else next(verdicts)
            if not offer.verdict.done():
                offer.verdict.set_result(verdict)

    async def _offer(self, body: Body | None) -> int:
        """Have the writer take it to Redis; the script's verdict."""
        if self._failure is not None:
            raise StoreUnavailable(self._failure)
        offer = Offer(body, asyncio.get_running_loop().create_future())
        self._offers.append(offer)
        self._wanted.set()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await offer.verdict
        except TimeoutError:
            why = f"no answer within {self._timeout_s:g} s"
            raise StoreUnavailable(f"the store at {self._keys.where} cannot be used: {why}") from None

    def _refuse_all(self, why: str) -> None:
        self._failure = why
        _refuse((*self._sent, *self._offers), why)
        self._sent = []
        self._offers.clear()
        self._wanted.clear()


async def _end(*tasks: asyncio.Task[None], again_s: float) -> None:
    """Cancel until they end: a cancellation that meets redis-py at work may be lost."""
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=again_s)
    await asyncio.gather(*tasks, return_exceptions=True)  # nobody else asks how they ended


def _refuse(offers: Iterable[Offer], why: str) -> None:
    for offer in offers:
        if not offer.verdict.done():
            offer.verdict.set_exception(StoreUnavailable(why))


def _keyspace(url: str, *, timeout_s: float, keep_forks: int, prefix: str) -> Keyspace:
    try:
        from planner.store.keyspace import Keyspace
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "redis":
            raise
        raise MissingExtra("the redis package", extra="redis") from None
    return Keyspace(url, timeout_s=timeout_s, keep_forks=keep_forks, prefix=prefix)

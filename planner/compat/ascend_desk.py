"""What vLLM-Ascend's clients ask for, in the registry's words: a seed is an instance, a lease is a fork."""

from __future__ import annotations

import hashlib
import math
import secrets
from dataclasses import replace
from typing import Final

from fastapi import Response

from planner.asking import finish_of
from planner.compat.ascend_headers import PREFIX, Seed, answer
from planner.registry import Registry
from planner.store.base import Change, Conflict
from planner.store.records import ForkRecord, InstanceRecord
from rfork.fields import InstanceState, Outcome
from rfork.logs import logger
from rfork.settings import host_port
from rfork.wire import ForkProgress, ForkRequest, InstanceReport, Placement

TRANSPORT: Final = "ascend"
SILENT_S: Final = 75.0
"""Seconds without a heartbeat after which a seed is forgotten: the clients send one each 30 s."""
STRANGERS: Final = 16
"""Most readers that a seed's `SEED_REFCNT` is taken to mean."""
ATTEMPTS: Final = 20
"""How often a seed's removal is tried because another replica changed its leases meanwhile."""
IDLE: Final = ForkProgress(verified=(), bytes_read=0, bytes_per_s=0.0)
"""What a lease that is renewed tells of its read."""


class Desk:
    """Says in the registry's words what the protocol asks for."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._log = logger("planner.compat.ascend")

    async def add(self, key: str, seed: Seed, references: int) -> None:
        """Register the seed, or take its heartbeat; it stays draining while its removal waits for leases."""
        await self._registry.sweep()
        known = self._registry.state.instance(seed.instance_id)
        leases = len(self._leases(known)) if known is not None else 0
        state: InstanceState = "draining" if leases and known and _leaving(known) else "serving"
        readers = min(max(0, references - leases), STRANGERS)
        strangers = tuple(f"{seed.instance_id}:reader-{which}" for which in range(readers))
        await self._registry.report(_seed_report(key, seed, state, strangers))
        await self._silent_for(seed.instance_id, at_least_s=SILENT_S)

    async def lease(self, key: str, host: str) -> Response:
        """200 with a lease, or 404."""
        lease_id = secrets.token_hex(16)
        target = _target_report(key, lease_id, host)
        plan = await self._registry.ask(ForkRequest(fork_id=lease_id, instance=target))
        seed = Seed.named(plan.routes[0].source_id) if plan.routes else None
        if seed is None:
            await self._end(self._registry.fork(lease_id), "fallback", f"NoSource: {plan.reason}")
            return answer(404)
        ttl_s = plan.routes[0].lease.expires_in_s
        # Only renewals are heard of it: it is forgotten when its lease lapses, and not before.
        await self._silent_for(target.instance_id, at_least_s=ttl_s, at_most_s=ttl_s)
        return answer(
            200, SEED_IP=seed.ip, SEED_PORT=str(seed.port), SEED_RANK=str(seed.rank), USER_ID=lease_id,
            LEASE_TTL_SEC=f"{ttl_s:g}",
        )  # fmt: skip

    async def renew(self, seed: Seed, lease_id: str) -> bool:
        """Whether the lease lives on; one whose seed is gone ends."""
        fork = await self._leased(seed, lease_id)
        if fork is None:
            return False
        renewed = await self._registry.progress(lease_id, IDLE)
        if seed.instance_id in renewed.leases:
            return True
        await self._end(fork, "interrupted", "SourceGone: the seed fell silent or was removed")
        return False

    async def release(self, seed: Seed, lease_id: str) -> bool:
        """Whether there was such a lease to end. A seed that waits to be removed leaves with the last one."""
        fork = await self._leased(seed, lease_id)
        if fork is None:
            return False
        await self._end(fork, "forked", "the lease was given back; how the read went is not told")
        known = self._registry.state.instance(seed.instance_id)
        if known is not None and _leaving(known):
            await self._forget(known)
        return True

    async def remove(self, key: str, seed: Seed) -> int:
        """200, 404, or 409 while it is leased: then it gets no new reader."""
        await self._registry.sweep()
        known = self._registry.state.instance(seed.instance_id)
        if known is None or known.report.model != PREFIX + key:
            return 404
        if await self._forget(known):
            return 200
        await self._registry.report(known.report.model_copy(update={"state": "draining"}))
        return 409

    async def _forget(self, known: InstanceRecord) -> bool:
        """Forget the seed unless it is leased; whether that was so."""
        store, instance_id = self._registry.store, known.report.instance_id
        for _ in range(ATTEMPTS):
            version = store.version(known.group)
            if self._leases(known):
                return False
            try:
                await store.commit(Change(gone=(instance_id,), group=known.group, version=version))
            except Conflict:
                continue
            self._log.info("instance removed", instance_id=instance_id)
            return True
        return False

    async def _leased(self, seed: Seed, lease_id: str) -> ForkRecord | None:
        """The lease, if it lives and is on this seed."""
        await self._registry.sweep()
        fork = self._registry.state.fork(lease_id)
        if fork is None or not fork.live or seed.instance_id not in [read.source_id for read in fork.reads]:
            return None
        return fork

    def _leases(self, known: InstanceRecord) -> list[str]:
        """Leases on the seed that this planner gave."""
        state = self._registry.state
        readers = state.group(known.group).readers.get(known.report.instance_id, {})
        return [name for name in readers if state.fork(name) is not None]

    async def _end(self, fork: ForkRecord, outcome: Outcome, reason: str) -> None:
        finish = finish_of(fork, outcome, reason, self._registry.now())
        await self._registry.finish(fork.fork_id, finish)
        await self._registry.remove(fork.instance_id)

    async def _silent_for(self, instance_id: str, *, at_least_s: float, at_most_s: float = math.inf) -> None:
        """Forget the instance after so many seconds of silence, rather than after what the settings say."""
        record = self._registry.state.instance(instance_id)
        if record is None:
            return
        forget_s = min(max(record.forget_s, at_least_s), at_most_s)
        if forget_s != record.forget_s:
            await self._registry.store.commit(Change(instances=(replace(record, forget_s=forget_s),)))


def _seed_report(key: str, seed: Seed, state: InstanceState, readers: tuple[str, ...]) -> InstanceReport:
    return InstanceReport(
        instance_id=seed.instance_id,
        model=PREFIX + key,
        version=_version(key),
        layout_id=_derived("layout", key),
        weights_id=_derived("weights", key),
        image_bytes=0,
        chunk_count=1,
        state=state,
        verified=((0, 1),),
        address=host_port(seed.ip, seed.port),
        transports=(TRANSPORT,),
        placement=Placement(host=seed.ip),
        max_readers=1,
        readers=readers,
    )


def _target_report(key: str, lease_id: str, host: str) -> InstanceReport:
    return InstanceReport(
        instance_id=f"{PREFIX}user-{lease_id}",
        model=PREFIX + key,
        version=_version(key),
        layout_id=_derived("layout", key),
        image_bytes=0,
        chunk_count=1,
        state="loading",
        address=host,
        transports=(TRANSPORT,),
        placement=Placement(host=host),
        max_readers=0,
    )


def _version(key: str) -> str:
    """Return the version that a seed key stands for: it covers all that has to be equal."""
    return f"seed-key:{_derived('version', key)}"


def _derived(what: str, key: str) -> str:
    return hashlib.sha256(f"rfork/compat/ascend/{what}:{key}".encode()).hexdigest()[:32]


def _leaving(known: InstanceRecord) -> bool:
    """Whether it is to be removed; an operator's drain is not told here."""
    return known.report.state == "draining"

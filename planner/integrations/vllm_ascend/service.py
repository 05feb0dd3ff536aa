"""Maps vLLM-Ascend's protocol to the planner: a seed is an instance, a lease is a fork."""

from __future__ import annotations

import hashlib
import math
import secrets
from dataclasses import replace
from typing import Final

from fastapi import Response

from planner.core.records import ForkRecord, InstanceRecord, StoreChange, build_fork_result
from planner.integrations.vllm_ascend.headers import NAME_PREFIX, AscendSeed, response
from planner.plan_service import PlanService
from planner.store.base import CommitConflict
from rfork.addresses import host_port
from rfork.logs import logger
from rfork.schema import ForkProgress, ForkRequest, InstanceReport, InstanceState, Outcome, Placement

TRANSPORT: Final = "ascend"
SEED_TTL_S: Final = 75.0
"""Seconds without a heartbeat after which a seed is removed. Clients send one every 30 s."""
MAX_UNPLANNED_READERS: Final = 16
"""Maximum number of readers derived from a seed's `SEED_REFCNT`."""
ATTEMPTS: Final = 20
"""Maximum attempts to remove a seed while another replica changes its leases."""
NO_PROGRESS: Final = ForkProgress(verified=(), bytes_read=0, bytes_per_s=0.0)
"""Progress of a fork whose lease is renewed: the protocol reports none."""


class AscendLeaseService:
    """Implements the operations of the protocol on the planner's service."""

    def __init__(self, service: PlanService) -> None:
        self._service = service
        self._log = logger("planner.integrations.vllm_ascend.router")

    async def add(self, key: str, seed: AscendSeed, references: int) -> None:
        """Register a seed, or record its heartbeat. A seed that waits for its removal stays draining."""
        await self._service.sweep()
        record = self._service.state.instance(seed.instance_id)
        leases = len(self._active_leases(record)) if record is not None else 0
        state: InstanceState = "draining" if leases and record and _is_draining(record) else "serving"
        readers = min(max(0, references - leases), MAX_UNPLANNED_READERS)
        unplanned_readers = tuple(f"{seed.instance_id}:reader-{index}" for index in range(readers))
        await self._service.report(_seed_report(key, seed, state, unplanned_readers))
        await self._remove_if_silent(seed.instance_id, min_silence_s=SEED_TTL_S)

    async def lease(self, key: str, host: str) -> Response:
        """Return 200 with a lease, or 404."""
        lease_id = secrets.token_hex(16)
        target = _target_report(key, lease_id, host)
        plan = await self._service.plan(ForkRequest(fork_id=lease_id, instance=target))
        seed = AscendSeed.from_instance_id(plan.routes[0].source_id) if plan.routes else None
        if seed is None:
            await self._end(self._service.fork(lease_id), "fallback", f"NoSource: {plan.reason}")
            return response(404)
        ttl_s = plan.routes[0].lease.expires_in_s
        # It sends renewals only, so its time to live is that of the lease.
        await self._remove_if_silent(target.instance_id, min_silence_s=ttl_s, max_silence_s=ttl_s)
        return response(
            200, SEED_IP=seed.ip, SEED_PORT=str(seed.port), SEED_RANK=str(seed.rank), USER_ID=lease_id,
            LEASE_TTL_SEC=f"{ttl_s:g}",
        )  # fmt: skip

    async def renew(self, seed: AscendSeed, lease_id: str) -> bool:
        """Renew a lease. Returns False if it does not exist; ends it if its seed was removed."""
        fork = await self._check_lease(seed, lease_id)
        if fork is None:
            return False
        renewed = await self._service.progress(lease_id, NO_PROGRESS)
        if seed.instance_id in renewed.leases:
            return True
        await self._end(fork, "interrupted", "SourceUnavailable: the seed stopped sending heartbeats or was removed")
        return False

    async def release(self, seed: AscendSeed, lease_id: str) -> bool:
        """End a lease; False if unknown. A seed that waits for its removal is removed with its last lease."""
        fork = await self._check_lease(seed, lease_id)
        if fork is None:
            return False
        await self._end(fork, "forked", "the lease was released; the client does not report the result")
        record = self._service.state.instance(seed.instance_id)
        if record is not None and _is_draining(record):
            await self._forget(record)
        return True

    async def remove(self, key: str, seed: AscendSeed) -> int:
        """Remove a seed. Returns 200, 404, or 409 while it is leased; then it gets no new reader."""
        await self._service.sweep()
        record = self._service.state.instance(seed.instance_id)
        if record is None or record.report.model != NAME_PREFIX + key:
            return 404
        if await self._forget(record):
            return 200
        await self._service.report(record.report.model_copy(update={"state": "draining"}))
        return 409

    async def _forget(self, record: InstanceRecord) -> bool:
        """Remove a seed unless it is leased. Returns True if it was removed."""
        store, instance_id = self._service.store, record.report.instance_id
        for _ in range(ATTEMPTS):
            version = store.version(record.group)
            if self._active_leases(record):
                return False
            try:
                await store.commit(StoreChange(removed=(instance_id,), group=record.group, version=version))
            except CommitConflict:
                continue
            self._log.info("instance removed", instance_id=instance_id)
            return True
        return False

    async def _check_lease(self, seed: AscendSeed, lease_id: str) -> ForkRecord | None:
        """Return the lease if it is active and on this seed."""
        await self._service.sweep()
        fork = self._service.state.fork(lease_id)
        if fork is None or not fork.live or seed.instance_id not in [read.source_id for read in fork.reads]:
            return None
        return fork

    def _active_leases(self, record: InstanceRecord) -> list[str]:
        """Return the leases on the seed that this planner issued."""
        state = self._service.state
        readers = state.group(record.group).readers.get(record.report.instance_id, {})
        return [name for name in readers if state.fork(name) is not None]

    async def _end(self, fork: ForkRecord, outcome: Outcome, reason: str) -> None:
        finish = build_fork_result(fork, outcome, reason, self._service.now())
        await self._service.finish(fork.fork_id, finish)
        await self._service.remove(fork.instance_id)

    async def _remove_if_silent(
        self, instance_id: str, *, min_silence_s: float, max_silence_s: float = math.inf
    ) -> None:
        """Limit the instance's time to live, instead of the value from the settings."""
        record = self._service.state.instance(instance_id)
        if record is None:
            return
        ttl_s = min(max(record.ttl_s, min_silence_s), max_silence_s)
        if ttl_s != record.ttl_s:
            await self._service.store.commit(StoreChange(instances=(replace(record, ttl_s=ttl_s),)))


def _seed_report(key: str, seed: AscendSeed, state: InstanceState, readers: tuple[str, ...]) -> InstanceReport:
    return InstanceReport(
        instance_id=seed.instance_id,
        model=NAME_PREFIX + key,
        version=_version(key),
        layout_id=_derive_id("layout", key),
        weights_id=_derive_id("weights", key),
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
        instance_id=f"{NAME_PREFIX}user-{lease_id}",
        model=NAME_PREFIX + key,
        version=_version(key),
        layout_id=_derive_id("layout", key),
        image_bytes=0,
        chunk_count=1,
        state="loading",
        address=host,
        transports=(TRANSPORT,),
        placement=Placement(host=host),
        max_readers=0,
    )


def _version(key: str) -> str:
    """Return the version derived from a seed key, which covers everything that must be equal."""
    return f"seed-key:{_derive_id('version', key)}"


def _derive_id(what: str, key: str) -> str:
    return hashlib.sha256(f"rfork/compat/ascend/{what}:{key}".encode()).hexdigest()[:32]


def _is_draining(record: InstanceRecord) -> bool:
    """Return True if the seed waits for its removal. An operator's drain is not visible here."""
    return record.report.state == "draining"

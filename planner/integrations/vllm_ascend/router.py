"""vLLM-Ascend's RFork planner protocol (`--load-format rfork` there), on the planner's own service.

All data is in headers of requests and responses; bodies are empty. Only `SEED_KEY` is matched: the client
puts model, deployment, topology and its ranks into it, so `SEED_RANK` only distinguishes seeds of one
address. The protocol has no weights version: operators put it into the model's name, which is part of the
key. A seed is an instance and a lease is a fork, so that lists, metrics, drain, expiry and the store work for
both:

* the instance has one chunk, the transport `ascend`, and ids derived from the key. So rfork's own forks never
  get these seeds as sources, nor the reverse. It accepts one reader;
* the fork's id is the `USER_ID`. The policy plans it, it expires unless renewed, and its target, which serves
  no readers, is removed with it.

Not covered: the bytes themselves (these clients transfer them directly, unverified, and do not report the
result: a released lease counts as `forked`); relays, striping, storage and quarantine. Clients without lease
renewal block a seed for one time to live. A planner without a shared store forgets leases when it restarts;
then only a `SEED_REFCNT` above 0 prevents a second reader of a seed.

These clients send no token. If the planner requires one, put a proxy in front of it that adds the header and
passes underscores in header names (nginx: ``underscores_in_headers on``), or run a separate planner for this
fleet without a token, behind a NetworkPolicy.
"""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response

from planner.api.openapi import REQUEST_ID, RETRY_AFTER, Responses, problems
from planner.integrations.vllm_ascend.headers import (
    REASON_HEADER,
    SEED_HEADERS,
    AscendSeed,
    HeaderRoute,
    header_int,
    request_header_docs,
    response,
    response_header_docs,
    seed_key,
    user_id,
)
from planner.integrations.vllm_ascend.service import AscendLeaseService
from planner.plan_service import PlanService

REJECTED_RESPONSES: Final[Responses] = problems(401, 403, 429) | {
    400: {
        "description": "a header is missing or invalid",
        "headers": REQUEST_ID
        | {REASON_HEADER: {"description": "the header and the problem", "schema": {"type": "string"}}},
    },
    503: {"description": "the store is unavailable, or too many concurrent changes", "headers": RETRY_AFTER},
}
SUCCESS_RESPONSES: Final[Responses] = {200: {"description": "done", "headers": REQUEST_ID}}
RELEASED_RESPONSES: Final[Responses] = SUCCESS_RESPONSES | {
    404: {"description": "unknown or already removed", "headers": REQUEST_ID}
}
SEED_RESPONSES: Final[Responses] = {
    200: {
        "description": "a lease on a seed",
        "headers": REQUEST_ID | response_header_docs(*SEED_HEADERS, "USER_ID", "LEASE_TTL_SEC"),
    },
    404: {"description": "no seed of this key has a free slot", "headers": REQUEST_ID},
}
LEASE_RESPONSES: Final[Responses] = {
    409: {
        "description": "still leased: the seed gets no new readers and is removed with its last lease",
        "headers": REQUEST_ID,
    }
}


def ascend_router(service: PlanService) -> APIRouter:
    """Return the router with the five routes of the protocol, over the seeds and leases of `service`."""
    lease_service = AscendLeaseService(service)
    router = APIRouter(
        tags=["vllm-ascend"],
        route_class=HeaderRoute,
        default_response_class=Response,
        responses=REJECTED_RESPONSES,
    )

    @router.post(
        "/add_seed",
        responses=SUCCESS_RESPONSES,
        openapi_extra=request_header_docs("SEED_KEY", *SEED_HEADERS, "SEED_REFCNT"),
    )
    async def add_seed(request: Request) -> Response:
        """Register a seed, or send its heartbeat."""
        await lease_service.add(seed_key(request), AscendSeed.from_request(request), header_int(request, "SEED_REFCNT"))
        return response(200)

    @router.get("/get_seed", responses=SEED_RESPONSES, openapi_extra=request_header_docs("SEED_KEY"))
    async def get_seed(request: Request) -> Response:
        """Lease a seed: the least loaded one that is neither draining nor full."""
        return await lease_service.lease(seed_key(request), request.client.host if request.client else "unknown")

    @router.post(
        "/renew_seed_lease", responses=RELEASED_RESPONSES, openapi_extra=request_header_docs(*SEED_HEADERS, "USER_ID")
    )
    async def renew_seed_lease(request: Request) -> Response:
        """Renew a lease, every third of its time to live."""
        return response(200 if await lease_service.renew(AscendSeed.from_request(request), user_id(request)) else 404)

    @router.post("/put_seed", responses=RELEASED_RESPONSES, openapi_extra=request_header_docs(*SEED_HEADERS, "USER_ID"))
    async def put_seed(request: Request) -> Response:
        """Release a lease."""
        return response(200 if await lease_service.release(AscendSeed.from_request(request), user_id(request)) else 404)

    @router.post(
        "/remove_seed",
        responses=RELEASED_RESPONSES | LEASE_RESPONSES,
        openapi_extra=request_header_docs("SEED_KEY", *SEED_HEADERS),
    )
    async def remove_seed(request: Request) -> Response:
        """Remove a seed."""
        return response(await lease_service.remove(seed_key(request), AscendSeed.from_request(request)))

    return router

"""vLLM-Ascend's RFork planner protocol (`--load-format rfork` there), on the planner's own registry.

All data is in headers, in the requests and in the answers; bodies are empty. `SEED_KEY` alone is what is
matched: the client puts model, deployment, topology and its ranks into it, so `SEED_RANK` only tells
seeds of one address apart. The protocol has no version of the weights: operators put it into the model's
name, which is part of the key. A seed is an instance and a lease is a fork, so that lists, metrics, drain,
expiry and the store work for both:

* the instance has one chunk, the transport `ascend` and ids derived from the key: no fork of rfork's own
  ever gets such a seed, nor the other way round. It takes one reader;
* the fork's id is the `USER_ID`. The policy plans it, it lapses unless renewed, and its target, which
  serves nobody, leaves with it.

Not covered: the bytes themselves (these clients move them between one another, unverified, and do not say
how that went: a lease given back counts as `forked`); no relays, striping, storage or quarantine. Clients
before lease renewal hold a seed for one time to live. A planner without a shared store that restarts
forgets leases; only a `SEED_REFCNT` above 0 then keeps a seed from getting a second reader.

These clients send no token. Where the planner asks for one, put a proxy before it that adds the header (one
that lets underscores in header names pass; nginx: ``underscores_in_headers on``), or give such a fleet a
planner of its own without a token, behind a NetworkPolicy.
"""

from __future__ import annotations

from typing import Final

from fastapi import APIRouter, Request, Response

from planner.api.openapi import REQUEST_ID, RETRY_AFTER, Responses, problems
from planner.integrations.vllm_ascend.headers import (
    REASON,
    SEED,
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
from planner.registry import Registry

REJECTED_RESPONSES: Final[Responses] = problems(401, 403, 429) | {
    400: {
        "description": "a header is missing or cannot be used",
        "headers": REQUEST_ID | {REASON: {"description": "which, and why", "schema": {"type": "string"}}},
    },
    503: {"description": "the store is away, or others change it all the time", "headers": RETRY_AFTER},
}
SUCCESS_RESPONSES: Final[Responses] = {200: {"description": "done", "headers": REQUEST_ID}}
RELEASED_RESPONSES: Final[Responses] = SUCCESS_RESPONSES | {
    404: {"description": "not known, or gone already", "headers": REQUEST_ID}
}
SEED_RESPONSES: Final[Responses] = {
    200: {
        "description": "a lease on a seed",
        "headers": REQUEST_ID | response_header_docs(*SEED, "USER_ID", "LEASE_TTL_SEC"),
    },
    404: {"description": "no seed of this key has a free slot", "headers": REQUEST_ID},
}
LEASE_RESPONSES: Final[Responses] = {
    409: {"description": "leased: it gets no new reader, and goes with the last lease", "headers": REQUEST_ID}
}


def ascend_router(registry: Registry) -> APIRouter:
    """The five routes of the protocol, over the seeds and leases of `registry`."""
    lease_service = AscendLeaseService(registry)
    router = APIRouter(
        tags=["vllm-ascend"],
        route_class=HeaderRoute,
        default_response_class=Response,
        responses=REJECTED_RESPONSES,
    )

    @router.post(
        "/add_seed",
        responses=SUCCESS_RESPONSES,
        openapi_extra=request_header_docs("SEED_KEY", *SEED, "SEED_REFCNT"),
    )
    async def add_seed(request: Request) -> Response:
        """Register a seed, or send its heartbeat."""
        await lease_service.add(seed_key(request), AscendSeed.from_request(request), header_int(request, "SEED_REFCNT"))
        return response(200)

    @router.get("/get_seed", responses=SEED_RESPONSES, openapi_extra=request_header_docs("SEED_KEY"))
    async def get_seed(request: Request) -> Response:
        """Lease a seed: the least loaded that is neither draining nor full."""
        return await lease_service.lease(seed_key(request), request.client.host if request.client else "unknown")

    @router.post("/renew_seed_lease", responses=RELEASED_RESPONSES, openapi_extra=request_header_docs(*SEED, "USER_ID"))
    async def renew_seed_lease(request: Request) -> Response:
        """Renew a lease, each third of its time to live."""
        return response(200 if await lease_service.renew(AscendSeed.from_request(request), user_id(request)) else 404)

    @router.post("/put_seed", responses=RELEASED_RESPONSES, openapi_extra=request_header_docs(*SEED, "USER_ID"))
    async def put_seed(request: Request) -> Response:
        """Give a lease back."""
        return response(200 if await lease_service.release(AscendSeed.from_request(request), user_id(request)) else 404)

    @router.post(
        "/remove_seed",
        responses=RELEASED_RESPONSES | LEASE_RESPONSES,
        openapi_extra=request_header_docs("SEED_KEY", *SEED),
    )
    async def remove_seed(request: Request) -> Response:
        """Forget a seed."""
        return response(await lease_service.remove(seed_key(request), AscendSeed.from_request(request)))

    return router

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

from planner.api.documents import REQUEST_ID, RETRY_AFTER, Responses, problems
from planner.compat.ascend_desk import Desk
from planner.compat.ascend_headers import (
    REASON,
    SEED,
    HeaderRoute,
    Seed,
    answer,
    number,
    seed_key,
    takes,
    tells,
    user_id,
)
from planner.registry import Registry

REFUSED: Final[Responses] = problems(401, 403, 429) | {
    400: {
        "description": "a header is missing or cannot be used",
        "headers": REQUEST_ID | {REASON: {"description": "which, and why", "schema": {"type": "string"}}},
    },
    503: {"description": "the store is away, or others change it all the time", "headers": RETRY_AFTER},
}
DONE: Final[Responses] = {200: {"description": "done", "headers": REQUEST_ID}}
GONE: Final[Responses] = DONE | {404: {"description": "not known, or gone already", "headers": REQUEST_ID}}
GIVEN: Final[Responses] = {
    200: {
        "description": "a lease on a seed",
        "headers": REQUEST_ID | tells(*SEED, "USER_ID", "LEASE_TTL_SEC"),
    },
    404: {"description": "no seed of this key has a free slot", "headers": REQUEST_ID},
}
LEASED: Final[Responses] = {
    409: {"description": "leased: it gets no new reader, and goes with the last lease", "headers": REQUEST_ID}
}


def ascend_router(registry: Registry) -> APIRouter:
    """The five routes of the protocol, over the seeds and leases of `registry`."""
    desk = Desk(registry)
    router = APIRouter(
        tags=["vllm-ascend"], route_class=HeaderRoute, default_response_class=Response, responses=REFUSED
    )

    @router.post("/add_seed", responses=DONE, openapi_extra=takes("SEED_KEY", *SEED, "SEED_REFCNT"))
    async def add_seed(request: Request) -> Response:
        """Register a seed, or send its heartbeat."""
        await desk.add(seed_key(request), Seed.of(request), number(request, "SEED_REFCNT"))
        return answer(200)

    @router.get("/get_seed", responses=GIVEN, openapi_extra=takes("SEED_KEY"))
    async def get_seed(request: Request) -> Response:
        """Lease a seed: the least loaded that is neither draining nor full."""
        return await desk.lease(seed_key(request), request.client.host if request.client else "unknown")

    @router.post("/renew_seed_lease", responses=GONE, openapi_extra=takes(*SEED, "USER_ID"))
    async def renew_seed_lease(request: Request) -> Response:
        """Renew a lease, each third of its time to live."""
        return answer(200 if await desk.renew(Seed.of(request), user_id(request)) else 404)

    @router.post("/put_seed", responses=GONE, openapi_extra=takes(*SEED, "USER_ID"))
    async def put_seed(request: Request) -> Response:
        """Give a lease back."""
        return answer(200 if await desk.release(Seed.of(request), user_id(request)) else 404)

    @router.post("/remove_seed", responses=GONE | LEASED, openapi_extra=takes("SEED_KEY", *SEED))
    async def remove_seed(request: Request) -> Response:
        """Forget a seed."""
        return answer(await desk.remove(seed_key(request), Seed.of(request)))

    return router

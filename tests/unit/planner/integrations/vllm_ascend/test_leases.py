"""Leases of seeds for clients of vLLM-Ascend's RFork."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
from fastapi import FastAPI

from tests.unit.planner.builders import FakeTime
from tests.unit.planner.integrations.vllm_ascend.seed_client import (
    ADD,
    KEY,
    OTHER,
    SEED,
    acquire_lease,
    add_seed,
    get_seed,
    put_seed,
    renew_lease,
)


def test_a_seed_has_at_most_one_lease(web: httpx.Client) -> None:
    """The slot is free again after the release."""
    add_seed(web)
    add_seed(web, OTHER)
    leased = [acquire_lease(web), acquire_lease(web)]
    full = get_seed(web).status_code
    put_seed(web, leased[0])
    assert {"10.0.0.7", "10.0.0.8"} == {each["SEED_IP"] for each in leased}
    assert 404 == full
    assert leased[0]["SEED_IP"] == acquire_lease(web)["SEED_IP"]


async def test_of_many_concurrent_requests_one_gets_the_seed(app: FastAPI) -> None:
    """The others get a 404 without waiting."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(base_url="http://planner", transport=transport) as client:
        await client.post("/add_seed", headers=ADD)
        requests = [client.get("/get_seed", headers={"SEED_KEY": KEY}) for _ in range(16)]
        assert Counter({404: 15, 200: 1}) == Counter(
            response.status_code for response in await asyncio.gather(*requests)
        )


def test_keys_must_be_equal(web: httpx.Client) -> None:
    """Rank and address do not matter, but every character of the key does."""
    add_seed(web)
    assert [404, 404, 200] == [get_seed(web, key).status_code for key in (KEY + "$draft", KEY.lower()[:-1], KEY)]


def test_a_seed_on_the_clients_own_host_comes_first(web: httpx.Client) -> None:
    """The bytes then stay on the host."""
    add_seed(web)
    add_seed(web, {**SEED, "SEED_IP": "127.0.0.1"})
    add_seed(web, OTHER)
    assert "127.0.0.1" == acquire_lease(web)["SEED_IP"]


def test_an_ipv6_address_is_returned_unchanged(web: httpx.Client) -> None:
    """The client connects to it and sends it back."""
    add_seed(web, {**SEED, "SEED_IP": "fd00::7"})
    leased = acquire_lease(web)
    assert "fd00::7" == leased["SEED_IP"]
    assert 200 == put_seed(web, leased)


def test_a_lease_is_bound_to_its_seed(web: httpx.Client) -> None:
    """The right user id with another seed's address ends and renews nothing."""
    add_seed(web)
    add_seed(web, OTHER)
    leased = acquire_lease(web)
    other = OTHER if leased["SEED_IP"] == SEED["SEED_IP"] else SEED
    wrong = {**other, "USER_ID": leased["USER_ID"]}
    assert 404 == put_seed(web, wrong)
    assert 404 == renew_lease(web, wrong)
    assert 200 == renew_lease(web, leased)


def test_a_lease_expires_unless_renewed(web: httpx.Client, time: FakeTime) -> None:
    """Renewed every third of its duration it stays valid; otherwise its slot is free after the full duration."""
    add_seed(web)
    leased = acquire_lease(web)
    renewed = []
    for _ in range(9):
        time.now += 10
        add_seed(web)
        renewed.append(renew_lease(web, leased))
    time.now += 29
    before_expiry = get_seed(web).status_code
    time.now += 2
    assert [200] * 9 == renewed
    assert 404 == before_expiry
    assert 404 == renew_lease(web, leased)
    assert 200 == get_seed(web).status_code


def test_a_lease_lasts_its_reported_duration(web: httpx.Client, time: FakeTime) -> None:
    """Even if longer than the time to live of rfork's instances: these clients send nothing else meanwhile."""
    add_seed(web)
    leased = acquire_lease(web)
    add_seed(web)
    time.now += 29
    assert 200 == renew_lease(web, leased)


def test_an_expired_lease_cannot_be_released(web: httpx.Client, time: FakeTime) -> None:
    """The new holder of the slot keeps it."""
    add_seed(web)
    leased = acquire_lease(web)
    time.now += 31
    new_lease = acquire_lease(web)
    assert 404 == put_seed(web, leased)
    assert 200 == renew_lease(web, new_lease)


def test_a_lease_ends_with_its_seed(web: httpx.Client, time: FakeTime) -> None:
    """The reader's renewals do not keep a silent seed alive."""
    add_seed(web)
    leased = acquire_lease(web)
    renewed = []
    for _ in range(8):
        time.now += 10
        renewed.append(renew_lease(web, leased))
    assert [200] * 7 + [404] == renewed
    assert 404 == put_seed(web, leased)

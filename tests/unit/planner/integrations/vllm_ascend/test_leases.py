"""Leases of seeds, as clients of vLLM-Ascend's RFork take them."""

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


def test_two_clients_never_hold_one_seed(web: httpx.Client) -> None:
    """Each seed takes one reader; the slot is free again once it is given back."""
    add_seed(web)
    add_seed(web, OTHER)
    leased = [acquire_lease(web), acquire_lease(web)]
    full = get_seed(web).status_code
    put_seed(web, leased[0])
    assert ({"10.0.0.7", "10.0.0.8"}, 404, leased[0]["SEED_IP"]) == (
        {each["SEED_IP"] for each in leased}, full, acquire_lease(web)["SEED_IP"],
    )  # fmt: skip


async def test_of_many_that_ask_at_once_one_gets_the_seed(app: FastAPI) -> None:
    """The others are told that there is none, without waiting for it."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(base_url="http://planner", transport=transport) as client:
        await client.post("/add_seed", headers=ADD)
        requests = [client.get("/get_seed", headers={"SEED_KEY": KEY}) for _ in range(16)]
        assert Counter({404: 15, 200: 1}) == Counter(
            response.status_code for response in await asyncio.gather(*requests)
        )


def test_a_key_is_matched_whole(web: httpx.Client) -> None:
    """Rank and address do not matter for the match, one character of the key does."""
    add_seed(web)
    assert [404, 404, 200] == [get_seed(web, key).status_code for key in (KEY + "$draft", KEY.lower()[:-1], KEY)]


def test_a_seed_on_the_clients_own_host_comes_first(web: httpx.Client) -> None:
    """The bytes then pass no network."""
    add_seed(web)
    add_seed(web, {**SEED, "SEED_IP": "127.0.0.1"})
    add_seed(web, OTHER)
    assert "127.0.0.1" == acquire_lease(web)["SEED_IP"]


def test_a_seed_at_an_ipv6_address_is_told_as_it_was(web: httpx.Client) -> None:
    """What the client connects to, and gives back."""
    add_seed(web, {**SEED, "SEED_IP": "fd00::7"})
    leased = acquire_lease(web)
    assert ("fd00::7", 200) == (leased["SEED_IP"], put_seed(web, leased))


def test_a_lease_is_bound_to_its_seed(web: httpx.Client) -> None:
    """Another seed's address with the right user ends and renews nothing."""
    add_seed(web)
    add_seed(web, OTHER)
    leased = acquire_lease(web)
    other = OTHER if leased["SEED_IP"] == SEED["SEED_IP"] else SEED
    wrong = {**other, "USER_ID": leased["USER_ID"]}
    assert (404, 404, 200) == (put_seed(web, wrong), renew_lease(web, wrong), renew_lease(web, leased))


def test_a_lease_lapses_unless_it_is_renewed(web: httpx.Client, time: FakeTime) -> None:
    """Renewed each third of its time it lives on; left alone its slot is free after the whole."""
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
    assert ([200] * 9, 404, 404, 200) == (
        renewed,
        before_expiry,
        renew_lease(web, leased),
        get_seed(web).status_code,
    )


def test_a_lease_lives_as_long_as_was_told(web: httpx.Client, time: FakeTime) -> None:
    """Longer than an instance of rfork's own may be silent: these clients send nothing else meanwhile."""
    add_seed(web)
    leased = acquire_lease(web)
    add_seed(web)
    time.now += 29
    assert 200 == renew_lease(web, leased)


def test_a_lease_that_lapsed_cannot_be_given_back(web: httpx.Client, time: FakeTime) -> None:
    """Whoever got the slot since keeps it."""
    add_seed(web)
    leased = acquire_lease(web)
    time.now += 31
    new_lease = acquire_lease(web)
    assert (404, 200) == (put_seed(web, leased), renew_lease(web, new_lease))


def test_a_lease_ends_with_its_seed(web: httpx.Client, time: FakeTime) -> None:
    """A seed that fell silent is not read from for ever, though its reader renews."""
    add_seed(web)
    leased = acquire_lease(web)
    renewed = []
    for _ in range(8):
        time.now += 10
        renewed.append(renew_lease(web, leased))
    assert ([200] * 7 + [404], 404) == (renewed, put_seed(web, leased))

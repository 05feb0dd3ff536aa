"""Leases of seeds, as clients of vLLM-Ascend's RFork take them."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
from fastapi import FastAPI

from tests.unit.planner.ascend import ADD, KEY, OTHER, SEED, add, get, lease, put, renew
from tests.unit.planner.builders import FakeTime


def test_two_clients_never_hold_one_seed(web: httpx.Client) -> None:
    """Each seed takes one reader; the slot is free again once it is given back."""
    add(web)
    add(web, OTHER)
    held = [lease(web), lease(web)]
    full = get(web).status_code
    put(web, held[0])
    assert ({"10.0.0.7", "10.0.0.8"}, 404, held[0]["SEED_IP"]) == (
        {each["SEED_IP"] for each in held}, full, lease(web)["SEED_IP"],
    )  # fmt: skip


async def test_of_many_that_ask_at_once_one_gets_the_seed(app: FastAPI) -> None:
    """The others are told that there is none, without waiting for it."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(base_url="http://planner", transport=transport) as client:
        await client.post("/add_seed", headers=ADD)
        asked = [client.get("/get_seed", headers={"SEED_KEY": KEY}) for _ in range(16)]
        assert Counter({404: 15, 200: 1}) == Counter(
            answer.status_code for answer in await asyncio.gather(*asked)
        )


def test_a_key_is_matched_whole(web: httpx.Client) -> None:
    """Rank and address do not matter for the match, one character of the key does."""
    add(web)
    assert [404, 404, 200] == [get(web, key).status_code for key in (KEY + "$draft", KEY.lower()[:-1], KEY)]


def test_a_seed_on_the_clients_own_host_comes_first(web: httpx.Client) -> None:
    """The bytes then pass no network."""
    add(web)
    add(web, {**SEED, "SEED_IP": "127.0.0.1"})
    add(web, OTHER)
    assert "127.0.0.1" == lease(web)["SEED_IP"]


def test_a_seed_at_an_ipv6_address_is_told_as_it_was(web: httpx.Client) -> None:
    """What the client connects to, and gives back."""
    add(web, {**SEED, "SEED_IP": "fd00::7"})
    held = lease(web)
    assert ("fd00::7", 200) == (held["SEED_IP"], put(web, held))


def test_a_lease_is_bound_to_its_seed(web: httpx.Client) -> None:
    """Another seed's address with the right user ends and renews nothing."""
    add(web)
    add(web, OTHER)
    held = lease(web)
    other = OTHER if held["SEED_IP"] == SEED["SEED_IP"] else SEED
    wrong = {**other, "USER_ID": held["USER_ID"]}
    assert (404, 404, 200) == (put(web, wrong), renew(web, wrong), renew(web, held))


def test_a_lease_lapses_unless_it_is_renewed(web: httpx.Client, time: FakeTime) -> None:
    """Renewed each third of its time it lives on; left alone its slot is free after the whole."""
    add(web)
    held = lease(web)
    renewed = []
    for _ in range(9):
        time.now += 10
        add(web)
        renewed.append(renew(web, held))
    time.now += 29
    still = get(web).status_code
    time.now += 2
    assert ([200] * 9, 404, 404, 200) == (renewed, still, renew(web, held), get(web).status_code)


def test_a_lease_lives_as_long_as_was_told(web: httpx.Client, time: FakeTime) -> None:
    """Longer than an instance of rfork's own may be silent: these clients send nothing else meanwhile."""
    add(web)
    held = lease(web)
    add(web)
    time.now += 29
    assert 200 == renew(web, held)


def test_a_lease_that_lapsed_cannot_be_given_back(web: httpx.Client, time: FakeTime) -> None:
    """Whoever got the slot since keeps it."""
    add(web)
    held = lease(web)
    time.now += 31
    now_held = lease(web)
    assert (404, 200) == (put(web, held), renew(web, now_held))


def test_a_lease_ends_with_its_seed(web: httpx.Client, time: FakeTime) -> None:
    """A seed that fell silent is not read from for ever, though its reader renews."""
    add(web)
    held = lease(web)
    renewed = []
    for _ in range(8):
        time.now += 10
        renewed.append(renew(web, held))
    assert ([200] * 7 + [404], 404) == (renewed, put(web, held))

"""Leases that arrive before the keys to check them."""

from __future__ import annotations

import asyncio

import pytest

from rfork.errors import LeaseRejected
from rfork.peer import call_guard


class DelayedKeys:
    """Has its keys after it was queried a number of times."""

    def __init__(self, queries: int) -> None:
        self.queries = queries

    @property
    def has_lease_keys(self) -> bool:
        self.queries -= 1
        return self.queries < 0

    def check(self, token: str) -> str:
        if self.queries >= 0:
            raise LeaseRejected("no keys yet")
        return f"fork of {token}"


def test_a_lease_is_checked_once_the_keys_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target is sent to a relay that has not received the response to its own first report."""
    monkeypatch.setattr(call_guard, "KEYS_POLL_INTERVAL_S", 0.0)
    assert "fork of token" == asyncio.run(call_guard.fork_of(DelayedKeys(3), "token"))


@pytest.mark.parametrize(("token", "timeout_s", "left"), [("token", 0.0, 9), ("", 60.0, 10)])
def test_a_lease_without_keys_is_rejected(
    token: str, timeout_s: float, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a time if the planner does not respond; at once without a token."""
    monkeypatch.setattr(call_guard, "KEYS_TIMEOUT_S", timeout_s)
    leases = DelayedKeys(10)
    with pytest.raises(LeaseRejected):
        asyncio.run(call_guard.fork_of(leases, token))
    assert left == leases.queries

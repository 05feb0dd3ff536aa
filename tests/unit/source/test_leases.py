"""Leases: which tokens are valid, and which forks occupy a reader slot."""

from __future__ import annotations

import pytest

from rfork.errors import LeaseRejected, SourceBusy, SourceWeightsChanged
from rfork.planner_client.lease import LeaseClaims, sign
from rfork.source.served_image import MAX_CHANNELS_PER_FORK
from tests.unit.source.lease_tables import TimedLeases

KEYS = {name: name.encode() * 32 for name in "abc"}
CLAIMS = LeaseClaims("fork-1", "seed-1", "0" * 32, None, 0, 1030.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def build_verifier(clock: Clock | None = None, *, keys: str = "a", max_readers: int = 2) -> TimedLeases:
    leases = TimedLeases(max_readers, CLAIMS.layout_id, clock or Clock())
    leases.set_keys([KEYS[key] for key in keys])
    return leases


def token(fork_id: str = "fork-1", *, key: str = "a", expires_at: float = 1030.0) -> str:
    return sign(CLAIMS._replace(fork_id=fork_id, expires_at=expires_at), KEYS[key])


def test_a_valid_token_returns_its_claims() -> None:
    """A token signed for this source, generation and time is accepted, however often it is presented."""
    leases = build_verifier()
    assert [CLAIMS, CLAIMS] == [leases.check(token(), 0, None) for _ in range(2)]


@pytest.mark.parametrize(
    ("presented_token", "message"),
    [
        ("", "no lease token"),
        ("not-a-token", "malformed"),
        (token(key="b"), "forged"),
        (token(expires_at=1000.0), "expired"),
        (sign(CLAIMS._replace(source_id="seed-2"), KEYS["a"]), "another source"),
        (sign(CLAIMS._replace(layout_id="f" * 32), KEYS["a"]), f"for layout {'f' * 32}, but the source has {'0' * 32}"),
    ],
    ids=["none", "malformed", "forged", "expired", "other source", "other layout"],
)
def test_an_invalid_token_is_rejected(presented_token: str, message: str) -> None:
    """Each invalid token is rejected, and the error states the reason."""
    with pytest.raises(LeaseRejected, match=message):
        build_verifier().check(presented_token, 0, None)


def test_a_known_token_expires_too() -> None:
    """A token that was accepted is rejected from the second it expires."""
    clock = Clock()
    leases = build_verifier(clock)
    leases.check(token(), 0, None)
    clock.now = 1030.0
    rejections = 0
    for _ in range(2):
        with pytest.raises(LeaseRejected, match="expired"):
            leases.check(token(), 0, None)
        rejections += 1
    assert 2 == rejections


def test_an_instance_without_a_key_admits_no_reader() -> None:
    """Until the planner has sent a key, no token can be checked, so none is accepted."""
    with pytest.raises(LeaseRejected, match="not reached its planner"):
        build_verifier(keys="").check(token(), 0, None)


def test_another_generation_is_fenced() -> None:
    """A lease for earlier weights is not valid for the current ones, even if it was accepted before."""
    leases = build_verifier()
    leases.check(token(), 0, None)
    with pytest.raises(SourceWeightsChanged, match="generation 0"):
        leases.check(token(), 1, None)


def accepted_keys(leases: TimedLeases) -> str:
    """Return the keys whose tokens are accepted."""
    accepted = ""
    for key in KEYS:
        try:
            leases.check(token(f"fork-{key}", key=key), 0, None)
        except LeaseRejected:
            continue
        accepted += key
    return accepted


def test_tokens_of_every_listed_key_are_accepted() -> None:
    """While the planner rotates its secret, tokens signed with any of the keys that it lists are accepted."""
    assert "ab" == accepted_keys(build_verifier(keys="ba"))


@pytest.mark.parametrize(("used", "expected"), [(True, "ab"), (False, "b")])
def test_a_withdrawn_key_is_accepted_only_where_it_was_used(used: bool, expected: str) -> None:
    """A key that is no longer listed is accepted while a token that it signed here is still valid."""
    leases = build_verifier(keys="a")
    if used:
        leases.check(token(), 0, None)
    leases.set_keys([KEYS["b"]])
    assert expected == accepted_keys(leases)


def test_a_withdrawn_key_expires_with_the_tokens_it_verified() -> None:
    """After they expire the key is rejected; tokens that it verifies meanwhile do not extend this."""
    clock = Clock()
    leases = build_verifier(clock, keys="a")
    leases.check(token(), 0, None)
    leases.set_keys([KEYS["b"]])
    leases.check(token("fork-2", expires_at=2000.0), 0, None)
    clock.now = 1030.0
    with pytest.raises(LeaseRejected, match="forged"):
        leases.check(token("fork-3", expires_at=2000.0), 0, None)


def test_a_key_that_is_listed_again_is_accepted() -> None:
    """Reverting a rotation restores the first key, also for tokens that were never presented."""
    clock = Clock()
    leases = build_verifier(clock, keys="a")
    leases.set_keys([KEYS["b"]])
    leases.set_keys([KEYS["a"]])
    assert "a" == accepted_keys(leases)


def open_channel(leases: TimedLeases, fork_id: str, expires_at: float = 1030.0) -> str:
    leases.check(token(fork_id, expires_at=expires_at), 0, None)
    return leases.open(fork_id)


def test_reader_slots_are_counted_by_fork() -> None:
    """A fork occupies one slot, however many channels it has; a fork without a free slot is rejected."""
    leases = build_verifier(max_readers=2)
    for fork in ("fork-1", "fork-1", "fork-2"):
        open_channel(leases, fork)
    with pytest.raises(SourceBusy, match="all 2 reader slots of the source are used"):
        open_channel(leases, "fork-3")
    assert ("fork-1", "fork-2") == leases.readers


def test_closing_frees_a_reader_slot() -> None:
    """A slot is free once the last channel of its fork is closed; closing a closed channel is no error."""
    leases = build_verifier(max_readers=1)
    channels = [open_channel(leases, "fork-1") for _ in range(2)]
    leases.close(channels[0])
    remaining_readers = leases.readers
    leases.close(channels[1])
    leases.close(channels[1])
    assert ("fork-1",) == remaining_readers
    assert () == leases.readers
    assert leases.has_channel(open_channel(leases, "fork-2"), "fork-2")


def test_a_channel_belongs_to_its_fork() -> None:
    """The id of another fork's channel is rejected."""
    leases = build_verifier()
    channel = open_channel(leases, "fork-1")
    assert leases.has_channel(channel, "fork-1")
    assert not leases.has_channel(channel, "fork-2")
    assert not leases.has_channel("other", "fork-1")


def test_expiry_frees_a_reader_slot() -> None:
    """A reader that died without closing occupies its slot no longer than its lease."""
    clock = Clock()
    leases = build_verifier(clock, max_readers=1)
    channel = open_channel(leases, "fork-1")
    clock.now = 1030.0
    again = open_channel(leases, "fork-2", expires_at=1060.0)
    assert not leases.has_channel(channel, "fork-1")
    assert leases.has_channel(again, "fork-2")
    assert ("fork-2",) == leases.readers


def test_a_renewed_lease_keeps_the_reader_slot() -> None:
    """A reader that presents a newer token in time keeps its slot until that token expires."""
    clock = Clock()
    leases = build_verifier(clock)
    open_channel(leases, "fork-1")
    leases.check(token(expires_at=1060.0), 0, None)
    readers = []
    for clock.now in (1030.0, 1059.0, 1060.0):
        readers.append(leases.readers)
    assert [("fork-1",), ("fork-1",), ()] == readers


def test_the_channels_of_a_fork_are_limited() -> None:
    """A fork that opens too many channels is rejected, others are not, and it may open one after closing one."""
    leases = build_verifier()
    channels = [open_channel(leases, "fork-1") for _ in range(MAX_CHANNELS_PER_FORK)]
    with pytest.raises(SourceBusy, match="which is the maximum"):
        open_channel(leases, "fork-1")
    open_channel(leases, "fork-2")
    leases.close(channels[0])
    assert leases.has_channel(open_channel(leases, "fork-1"), "fork-1")


def test_a_channel_that_expired_is_swept_once() -> None:
    """However the expiry was noticed, the sweep returns the channel once."""
    clock = Clock()
    leases = build_verifier(clock)
    first, second = open_channel(leases, "fork-1"), open_channel(leases, "fork-2", expires_at=1060.0)
    clock.now = 1030.0
    before = leases.readers
    swept = [leases.sweep(), leases.sweep()]
    clock.now = 1060.0
    assert ("fork-2",) == before
    assert [(first,), ()] == swept
    assert (second,) == leases.sweep()


THESE_WEIGHTS, OTHER_WEIGHTS = "1" * 32, "2" * 32


@pytest.mark.parametrize("weights_id", [OTHER_WEIGHTS, None])
def test_a_lease_for_other_weights_is_refused(weights_id: str | None) -> None:
    """They are rejected also while the source does not know yet which weights it receives."""
    with pytest.raises(SourceWeightsChanged, match=f"for weights {THESE_WEIGHTS}"):
        build_verifier().check(sign(CLAIMS._replace(weights_id=THESE_WEIGHTS), KEYS["a"]), 0, weights_id)


@pytest.mark.parametrize("weights_id", [THESE_WEIGHTS, None])
def test_a_lease_for_these_weights_is_valid(weights_id: str | None) -> None:
    """A lease issued before the weights were known names none, and is valid too."""
    claims = CLAIMS._replace(weights_id=weights_id)
    assert claims == build_verifier().check(sign(claims, KEYS["a"]), 0, THESE_WEIGHTS)


def test_a_lease_is_checked_each_time_it_is_presented() -> None:
    """The weights may have changed since."""
    leases, presented_token = build_verifier(), sign(CLAIMS._replace(weights_id=THESE_WEIGHTS), KEYS["a"])
    leases.check(presented_token, 0, THESE_WEIGHTS)
    with pytest.raises(SourceWeightsChanged):
        leases.check(presented_token, 0, OTHER_WEIGHTS)

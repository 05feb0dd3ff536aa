"""The lease book: which tokens are good, and who has a reader's place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rfork.errors import LeaseRejected, SourceBusy, SourceWeightsChanged
from rfork.planner_client.lease import LeaseClaims, sign
from rfork.source.leases import MAX_CHANNELS_PER_FORK, LeaseVerifier

KEYS = {name: name.encode() * 32 for name in "abc"}
CLAIMS = LeaseClaims("fork-1", "seed-1", "0" * 32, None, 0, 1030.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def build_verifier(clock: Clock | None = None, *, keys: str = "a", max_readers: int = 2) -> LeaseVerifier:
    leases = LeaseVerifier("seed-1", max_readers, layout_id=CLAIMS.layout_id, clock=clock or Clock())
    leases.set_keys([KEYS[key] for key in keys])
    return leases


def token(fork_id: str = "fork-1", *, key: str = "a", expires_at: float = 1030.0) -> str:
    return sign(replace(CLAIMS, fork_id=fork_id, expires_at=expires_at), KEYS[key])


def test_a_good_token_tells_its_fork() -> None:
    """A token signed for this source, generation and time is good, however often it is shown."""
    leases = build_verifier()
    assert [CLAIMS, CLAIMS] == [leases.check(token(), 0, None) for _ in range(2)]


@pytest.mark.parametrize(
    ("presented_token", "message"),
    [
        ("", "no lease token"),
        ("not-a-token", "malformed"),
        (token(key="b"), "forged"),
        (token(expires_at=1000.0), "expired"),
        (sign(replace(CLAIMS, source_id="seed-2"), KEYS["a"]), "another source"),
        (sign(replace(CLAIMS, layout_id="f" * 32), KEYS["a"]), f"for layout {'f' * 32}, this is {'0' * 32}"),
    ],
    ids=["none", "malformed", "forged", "expired", "other source", "other layout"],
)
def test_a_bad_token_is_refused(presented_token: str, message: str) -> None:
    """Each bad token is refused, and the refusal says why."""
    with pytest.raises(LeaseRejected, match=message):
        build_verifier().check(presented_token, 0, None)


def test_a_known_token_expires_too() -> None:
    """A token that was good is refused from the second it expires, and stays refused."""
    clock = Clock()
    leases = build_verifier(clock)
    leases.check(token(), 0, None)
    clock.now = 1030.0
    refused = 0
    for _ in range(2):
        with pytest.raises(LeaseRejected, match="expired"):
            leases.check(token(), 0, None)
        refused += 1
    assert 2 == refused


def test_an_instance_without_a_key_admits_nobody() -> None:
    """Until the planner has told a key, no token can be checked, so none is good."""
    with pytest.raises(LeaseRejected, match="not reached its planner"):
        build_verifier(keys="").check(token(), 0, None)


def test_another_generation_is_fenced() -> None:
    """A lease for the weights as they were is no lease for the weights as they are, known or not."""
    leases = build_verifier()
    leases.check(token(), 0, None)
    with pytest.raises(SourceWeightsChanged, match="generation 0"):
        leases.check(token(), 1, None)


def accepted_keys(leases: LeaseVerifier) -> str:
    """The keys whose tokens are good."""
    accepted = ""
    for key in KEYS:
        try:
            leases.check(token(f"fork-{key}", key=key), 0, None)
        except LeaseRejected:
            continue
        accepted += key
    return accepted


def test_every_listed_key_opens_tokens() -> None:
    """While the planner changes its secret, tokens under each key it gives are good."""
    assert "ab" == accepted_keys(build_verifier(keys="ba"))


@pytest.mark.parametrize(("used", "expected"), [(True, "ab"), (False, "b")])
def test_a_withdrawn_key_stays_good_only_where_it_was_used(used: bool, expected: str) -> None:
    """A key that is listed no more opens tokens if it opened one that is not over."""
    leases = build_verifier(keys="a")
    if used:
        leases.check(token(), 0, None)
    leases.set_keys([KEYS["b"]])
    assert expected == accepted_keys(leases)


def test_a_withdrawn_key_ends_with_the_tokens_it_opened() -> None:
    """Once these are over it opens nothing, and a token it opens meanwhile puts that off no further."""
    clock = Clock()
    leases = build_verifier(clock, keys="a")
    leases.check(token(), 0, None)
    leases.set_keys([KEYS["b"]])
    leases.check(token("fork-2", expires_at=2000.0), 0, None)
    clock.now = 1030.0
    with pytest.raises(LeaseRejected, match="forged"):
        leases.check(token("fork-3", expires_at=2000.0), 0, None)


def test_a_key_that_is_listed_again_is_as_good_as_new() -> None:
    """A rotation that is taken back leaves the first key good, also for tokens never seen."""
    clock = Clock()
    leases = build_verifier(clock, keys="a")
    leases.set_keys([KEYS["b"]])
    leases.set_keys([KEYS["a"]])
    assert "a" == accepted_keys(leases)


def opened(leases: LeaseVerifier, fork_id: str, expires_at: float = 1030.0) -> str:
    leases.check(token(fork_id, expires_at=expires_at), 0, None)
    return leases.open(fork_id)


def test_places_are_counted_by_fork() -> None:
    """One fork takes one place with however many channels; a fork too many is told to go elsewhere."""
    leases = build_verifier(max_readers=2)
    for fork in ("fork-1", "fork-1", "fork-2"):
        opened(leases, fork)
    with pytest.raises(SourceBusy, match="all 2 reader slots"):
        opened(leases, "fork-3")
    assert ("fork-1", "fork-2") == leases.readers


def test_closing_frees_a_place() -> None:
    """A place is free once the last channel of its fork is closed; closing one that is gone is no error."""
    leases = build_verifier(max_readers=1)
    channels = [opened(leases, "fork-1") for _ in range(2)]
    leases.close(channels[0])
    remaining_readers = leases.readers
    leases.close(channels[1])
    leases.close(channels[1])
    assert (("fork-1",), ()) == (remaining_readers, leases.readers)
    assert leases.has_channel(opened(leases, "fork-2"), "fork-2")


def test_a_channel_belongs_to_its_fork() -> None:
    """Knowing another fork's channel id is of no use."""
    leases = build_verifier()
    channel = opened(leases, "fork-1")
    assert (True, False, False) == (
        leases.has_channel(channel, "fork-1"),
        leases.has_channel(channel, "fork-2"),
        leases.has_channel("other", "fork-1"),
    )


def test_expiry_frees_a_place() -> None:
    """A reader that died without closing keeps its place no longer than its lease."""
    clock = Clock()
    leases = build_verifier(clock, max_readers=1)
    channel = opened(leases, "fork-1")
    clock.now = 1030.0
    again = opened(leases, "fork-2", expires_at=1060.0)
    assert (False, True, ("fork-2",)) == (
        leases.has_channel(channel, "fork-1"),
        leases.has_channel(again, "fork-2"),
        leases.readers,
    )


def test_a_renewed_lease_keeps_the_place() -> None:
    """A reader that shows a newer token in time keeps its place until that one expires."""
    clock = Clock()
    leases = build_verifier(clock)
    opened(leases, "fork-1")
    leases.check(token(expires_at=1060.0), 0, None)
    readers = []
    for clock.now in (1030.0, 1059.0, 1060.0):
        readers.append(leases.readers)
    assert [("fork-1",), ("fork-1",), ()] == readers


def test_one_fork_gets_no_more_than_a_handful_of_channels() -> None:
    """A fork that asks for more is refused; others are not, and it may go on once it closed one."""
    leases = build_verifier()
    channels = [opened(leases, "fork-1") for _ in range(MAX_CHANNELS_PER_FORK)]
    with pytest.raises(SourceBusy, match="gets no more"):
        opened(leases, "fork-1")
    opened(leases, "fork-2")
    leases.close(channels[0])
    assert leases.has_channel(opened(leases, "fork-1"), "fork-1")


def test_a_channel_that_expired_is_swept_once() -> None:
    """However it was noticed that the lease is over, the channel is told of, and not again."""
    clock = Clock()
    leases = build_verifier(clock)
    first, second = opened(leases, "fork-1"), opened(leases, "fork-2", expires_at=1060.0)
    clock.now = 1030.0
    before = leases.readers
    swept = [leases.sweep(), leases.sweep()]
    clock.now = 1060.0
    assert (("fork-2",), [(first,), ()], (second,)) == (before, swept, leases.sweep())


HERE, ELSEWHERE = "1" * 32, "2" * 32


@pytest.mark.parametrize("weights_id", [ELSEWHERE, None])
def test_a_lease_for_other_weights_is_refused(weights_id: str | None) -> None:
    """Also where the source does not know yet which weights it gets."""
    with pytest.raises(SourceWeightsChanged, match=f"for the weights {HERE}"):
        build_verifier().check(sign(replace(CLAIMS, weights_id=HERE), KEYS["a"]), 0, weights_id)


@pytest.mark.parametrize("weights_id", [HERE, None])
def test_a_lease_for_these_weights_is_good(weights_id: str | None) -> None:
    """One that was given before the weights were known names none."""
    claims = replace(CLAIMS, weights_id=weights_id)
    assert claims == build_verifier().check(sign(claims, KEYS["a"]), 0, HERE)


def test_a_lease_is_checked_again_each_time_it_is_shown() -> None:
    """The weights may have changed since."""
    leases, presented_token = build_verifier(), sign(replace(CLAIMS, weights_id=HERE), KEYS["a"])
    leases.check(presented_token, 0, HERE)
    with pytest.raises(SourceWeightsChanged):
        leases.check(presented_token, 0, ELSEWHERE)

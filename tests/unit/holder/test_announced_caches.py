"""JIT caches of announced models are pulled once for each announcement."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import Future

import pytest

from rfork.holder.announced_caches import AnnouncedCaches

ENABLED = {"RFORK_ARTIFACTS_KINDS": "inductor"}
WAIT_S = 30.0


def pulls_of(*announcements: set[str]) -> list[str]:
    """Return the models whose caches are pulled for these announcements."""
    pulled: list[str] = []
    done = threading.Event()

    def pull(model: str, environment: Mapping[str, str], stopped: threading.Event) -> None:
        pulled.append(model)
        if model == "last":
            done.set()

    caches = AnnouncedCaches(ENABLED, pull)
    for models in (*announcements, {"last"}):
        caches.announce(models)
    assert done.wait(WAIT_S)
    caches.stop()
    return pulled[:-1]


@pytest.mark.parametrize(
    ("announcements", "expected"),
    [
        ([{"a"}], ["a"]),
        ([{"a"}, {"a"}, {"a", "b"}], ["a", "b"]),
        ([{"a"}, set(), {"a"}], ["a", "a"]),
        ([set()], []),
    ],
    ids=["one", "once", "announced again", "nothing"],
)
def test_caches_of_announced_models(announcements: list[set[str]], expected: list[str]) -> None:
    """Once for each announcement, one after the other."""
    assert expected == pulls_of(*announcements)


@pytest.mark.parametrize("environment", [{}, {"RFORK_ARTIFACTS_KINDS": ""}])
def test_nothing_is_pulled_unless_types_are_named(environment: Mapping[str, str]) -> None:
    """Installing caches is off by default: they are programs."""
    models: list[str] = []
    caches = AnnouncedCaches(environment, lambda model, *_: models.append(model))
    caches.announce({"a"})
    caches.stop()
    assert [] == models


def test_stopping_ends_a_pull() -> None:
    """The pull that runs is stopped, and the next one does not begin."""
    began: Future[str] = Future()
    ended = threading.Event()
    models: list[str] = []

    def pull(model: str, environment: Mapping[str, str], stopped: threading.Event) -> None:
        models.append(model)
        began.set_result(model)
        assert stopped.wait(WAIT_S)
        ended.set()

    caches = AnnouncedCaches(ENABLED, pull)
    caches.announce({"a", "b"})
    began.result(WAIT_S)
    caches.stop()
    assert ended.wait(WAIT_S)
    assert ["a"] == models

"""Checks of hosts and origins, in a planner without tokens."""

from __future__ import annotations

import httpx
import pytest

from planner.app import create_app
from planner.origins import KnownHosts, is_foreign
from rfork.settings import PlannerSettings
from tests.unit.planner.app_transport import AppTransport

HOSTS = KnownHosts(["planner.example", "0.0.0.0"])
KNOWN = [
    "localhost", "LOCALHOST:8700", "a.localhost", "127.0.0.1:8700", "[::1]:8700", "10.0.0.7", "[fd00::7]:1",
    "planner.example", "Planner.Example.:8700", None,
]  # fmt: skip
UNKNOWN = [
    "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example:8700", "planner", "",
    "2130706433", "0x7f.1", "[::1", "a@localhost", "localhost/x", "localhost:x", "planner.example.evil", "*",
]  # fmt: skip


@pytest.mark.parametrize("host", KNOWN)
def test_a_known_host_passes(host: str | None) -> None:
    """Loopback names, literal addresses, and the names that are set."""
    assert HOSTS.contains(host)


@pytest.mark.parametrize("host", UNKNOWN)
def test_any_other_host_is_refused(host: str) -> None:
    """A page's own name that resolves to the planner among them."""
    assert not HOSTS.contains(host)


def test_a_star_knows_every_host() -> None:
    """For a planner behind a proxy that checks the host itself."""
    assert KnownHosts(["*"]).contains("evil.example")


ORIGINS = [
    # Origin, Sec-Fetch-Site, Host, foreign
    (None, None, "localhost:8700", False),
    ("http://localhost:8700", None, "localhost:8700", False),
    ("http://planner", None, "planner:80", False),
    ("https://planner", None, "planner", False),
    ("http://localhost:8701", None, "localhost:8700", True),
    ("http://evil.example", None, "localhost:8700", True),
    ("null", None, "localhost:8700", True),
    ("http://[", None, "localhost:8700", True),
    ("http://localhost:8700", "same-origin", "localhost:8700", False),
    (None, "none", "localhost:8700", False),
    ("http://proxy.example", "same-origin", "localhost:8700", False),
    ("http://localhost:8700", "cross-site", "localhost:8700", True),
    (None, "same-site", "localhost:8700", True),
]


@pytest.mark.parametrize(("origin", "site", "host", "expected"), ORIGINS)
def test_the_browser_tells_a_foreign_page(origin: str | None, site: str | None, host: str, expected: bool) -> None:
    """By Sec-Fetch-Site, and by Origin where it sends none."""
    assert expected == is_foreign(origin, site, host)


def http_client(**settings: object) -> httpx.Client:
    """A client of a planner on loopback."""
    chosen = PlannerSettings.model_validate(settings)
    app = create_app(chosen, hosts=KnownHosts.of(chosen))
    return httpx.Client(base_url="http://127.0.0.1:8700", transport=AppTransport(app))


def slug(response: httpx.Response) -> str:
    """The last part of the problem's type."""
    return str(response.json()["type"]).rpartition("/")[2]


def test_a_rebound_name_reads_nothing() -> None:
    """The problem names the setting that lets a good name in."""
    response = http_client().get("/v1/instances", headers={"Host": "evil.example"})
    assert "unknown-host" == slug(response)
    assert "RFORK_PLANNER_ALLOWED_HOSTS" in response.json()["detail"]


def test_a_foreign_page_changes_nothing() -> None:
    """A form of any page can send a POST without a body."""
    response = http_client().post("/v1/instances/s/drain", headers={"Origin": "http://evil.example"})
    assert "cross-origin" == slug(response)


def test_the_planners_own_page_may_ask_for_previews() -> None:
    """It is known to the planner by its origin."""
    response = http_client().post("/v1/previews", json={"model": "m"}, headers={"Origin": "http://127.0.0.1:8700"})
    assert "unknown-model" == slug(response)


def test_a_name_that_is_set_is_known() -> None:
    """A cluster's Service, for example."""
    web = http_client(allowed_hosts="planner.rfork.svc, planner")
    assert 200 == web.get("/v1/instances", headers={"Host": "planner.rfork.svc:8700"}).status_code


def test_with_a_token_any_host_is_answered() -> None:
    """A page has no token."""
    response = http_client(token="t" * 8).get("/v1/instances", headers={"Host": "planner.example"})
    assert "unauthorized" == slug(response)

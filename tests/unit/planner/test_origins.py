"""Host and origin checks of a planner without tokens."""

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
def test_a_known_host_is_accepted(host: str | None) -> None:
    """Loopback names, literal addresses and configured names are known."""
    assert HOSTS.contains(host)


@pytest.mark.parametrize("host", UNKNOWN)
def test_an_unknown_host_is_rejected(host: str) -> None:
    """This includes a page's own name that resolves to the planner."""
    assert not HOSTS.contains(host)


def test_a_star_accepts_every_host() -> None:
    """It is for a planner behind a proxy that checks the host."""
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
def test_foreign_pages_are_detected(origin: str | None, site: str | None, host: str, expected: bool) -> None:
    """Sec-Fetch-Site decides, or Origin if the browser does not send it."""
    assert expected == is_foreign(origin, site, host)


def http_client(**settings: object) -> httpx.Client:
    """Return a client of a planner on loopback."""
    chosen = PlannerSettings.model_validate(settings)
    app = create_app(chosen, hosts=KnownHosts.of(chosen))
    return httpx.Client(base_url="http://127.0.0.1:8700", transport=AppTransport(app))


def slug(response: httpx.Response) -> str:
    """Return the last part of the problem's type."""
    return str(response.json()["type"]).rpartition("/")[2]


def test_a_rebound_name_cannot_read() -> None:
    """The problem names the setting that allows a host."""
    response = http_client().get("/v1/instances", headers={"Host": "evil.example"})
    assert "unknown-host" == slug(response)
    assert "RFORK_PLANNER_ALLOWED_HOSTS" in response.json()["detail"]


def test_a_foreign_page_cannot_change_anything() -> None:
    """Any page's form can send a POST without a body."""
    response = http_client().post("/v1/instances/s/drain", headers={"Origin": "http://evil.example"})
    assert "cross-origin" == slug(response)


def test_the_planners_own_page_may_request_previews() -> None:
    """It has the planner's own origin."""
    response = http_client().post("/v1/previews", json={"model": "m"}, headers={"Origin": "http://127.0.0.1:8700"})
    assert "unknown-model" == slug(response)


def test_a_configured_host_name_is_accepted() -> None:
    """For example, a cluster's Service."""
    web = http_client(allowed_hosts="planner.rfork.svc, planner")
    assert 200 == web.get("/v1/instances", headers={"Host": "planner.rfork.svc:8700"}).status_code


def test_with_a_token_any_host_is_accepted() -> None:
    """A page has no token."""
    response = http_client(token="t" * 8).get("/v1/instances", headers={"Host": "planner.example"})
    assert "unauthorized" == slug(response)

"""Tokens, their roles, and the rights of each role."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import iter_route_contexts

from planner.app import create_app
from planner.auth import ROLES, ROUTES, Auth, Role, is_open, role_needed
from rfork.errors import SettingsError
from rfork.settings import PlannerSettings
from tests.unit.planner.app_transport import AppTransport
from tests.unit.planner.builders import FakeTime

FILE = """
# the fleet
reader   read-1   # dashboards
instance work-1

operator rule-1
"""
ROTATED = FILE.replace("work-1", "work-2")
TOKENS: dict[Role, bytes] = {
    "reader": b"Bearer read-1",
    "instance": b"Bearer work-1",
    "operator": b"Bearer rule-1",
}


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A file with one token of each role."""
    path = tmp_path / "tokens"
    path.write_text(FILE)
    return path


@pytest.fixture
def auth(tokens: Path, time: FakeTime) -> Auth:
    """Authentication with that file and a token from the settings."""
    return Auth(settings(token="all-1", tokens_file=tokens), time.clock.monotonic)


def settings(**options: str | Path) -> PlannerSettings:
    """Return the planner's settings."""
    return PlannerSettings(**options)  # type: ignore[arg-type]  # pydantic makes secrets of strings


def status(auth: Auth, method: str, path: str, authorization: bytes | None) -> int:
    """Return the status of the denial; 200 if the request is allowed."""
    problem = auth.check(method, path, authorization)
    return 200 if problem is None else problem.status


def _open(path: str) -> bool:
    return is_open(path) or is_open(f"{path}/")


def unlisted(app: FastAPI) -> list[str]:
    """Return the routes that are neither open nor listed with a role; ANY stands for non-HTTP routes."""
    return [
        f"{method} {route.path}"
        for route in iter_route_contexts(app.routes)
        for method in sorted(route.methods or {"ANY"})
        if not _open(route.path or "") and role_needed(method, route.path or "") is None
    ]


def test_every_route_of_the_planner_has_its_role() -> None:
    """New routes must be added to `ROUTES`."""
    assert [] == unlisted(create_app(PlannerSettings()))


def test_a_route_without_a_role_is_found() -> None:
    """The check above detects a direct route, a router's route, a further method and a websocket."""

    def endpoint() -> None:
        """Do nothing."""

    app, router = FastAPI(docs_url=None, redoc_url=None), APIRouter(prefix="/v1")
    app.add_api_route("/v1/secrets", endpoint, methods=["GET"])
    router.add_api_route("/models", endpoint, methods=["GET", "DELETE"])
    router.add_api_websocket_route("/forks", endpoint)
    app.include_router(router)
    assert {"GET /v1/secrets", "DELETE /v1/models", "ANY /v1/forks"} == set(unlisted(app))


def test_every_entry_of_the_route_table_is_reachable() -> None:
    """Each is the first match for its own path."""
    wrong = [(method, path) for method, path, role in ROUTES if role_needed(method, path) != role]
    assert [] == wrong


RIGHTS = [
    # request, then the status for a reader, an instance and an operator
    ("PUT", "/v1/instances/s", 403, 200, 200),
    ("DELETE", "/v1/instances/s", 403, 200, 200),
    ("GET", "/v1/instances/s/exit", 403, 200, 200),
    ("POST", "/v1/instances/s/drain", 403, 200, 200),
    ("POST", "/v1/instances/s/exit", 403, 403, 200),
    ("POST", "/v1/forks", 403, 200, 200),
    ("POST", "/v1/forks/f/progress", 403, 200, 200),
    ("POST", "/v1/forks/f/finish", 403, 200, 200),
    ("GET", "/get_seed", 403, 200, 200),
    ("POST", "/put_seed", 403, 200, 200),
    ("POST", "/add_seed", 403, 200, 200),
    ("POST", "/remove_seed", 403, 200, 200),
    ("POST", "/renew_seed_lease", 403, 200, 200),
    ("GET", "/v1/instances", 200, 200, 200),
    ("GET", "/v1/instances/s", 200, 200, 200),
    ("GET", "/v1/forks", 200, 200, 200),
    ("GET", "/v1/forks/f", 200, 200, 200),
    ("GET", "/v1/forks/f/events", 200, 200, 200),
    ("PUT", "/v1/holders/h", 403, 200, 200),
    ("DELETE", "/v1/holders/h", 403, 200, 200),
    ("GET", "/v1/holders", 200, 200, 200),
    ("GET", "/v1/holders/h", 200, 200, 200),
    ("GET", "/v1/models", 200, 200, 200),
    ("GET", "/metrics", 200, 200, 200),
    ("GET", "/openapi.json", 200, 200, 200),
    ("GET", "/v1/scaleups", 200, 200, 200),
    ("GET", "/v1/scaleups/up", 200, 200, 200),
    ("POST", "/v1/scaleups", 403, 403, 200),
    ("POST", "/v1/previews", 200, 200, 200),
    ("DELETE", "/v1/scaleups/up", 403, 403, 200),
    ("GET", "/nowhere", 403, 403, 200),
    ("PATCH", "/v1/models", 403, 403, 200),
    ("DELETE", "/v1/instances/s/drain", 403, 403, 200),
    ("GET", "/healthz", 200, 200, 200),
    ("GET", "/readyz", 200, 200, 200),
]  # fmt: skip


@pytest.mark.parametrize(("method", "path", "reader", "instance", "operator"), RIGHTS)
def test_each_role_has_its_rights(
    auth: Auth, method: str, path: str, reader: int, instance: int, operator: int
) -> None:
    """Unlisted routes require an operator."""
    assert [reader, instance, operator] == [status(auth, method, path, TOKENS[role]) for role in ROLES]


def test_a_denial_names_the_required_role(auth: Auth) -> None:
    """It names both roles, and no token."""
    problem = auth.check("PATCH", "/v1/models", TOKENS["instance"])
    assert problem is not None
    assert 403 == problem.status
    assert "forbidden" == problem.slug
    assert "this requires the role operator; the token has the role instance" == problem.detail


DRAINS = [
    # query, then the status for a reader, an instance and an operator; the instance is unknown
    ("", 403, 404, 404),
    ("?force=false", 403, 404, 404),
    ("?force=true", 403, 403, 404),
    ("?force=on", 403, 403, 404),
    ("?force=false&force=1", 403, 403, 404),
]


@pytest.mark.parametrize(("query", "reader", "instance", "operator"), DRAINS)
def test_a_forced_drain_requires_an_operator(
    tokens: Path, query: str, reader: int, instance: int, operator: int
) -> None:
    """A Pod's preStop hook has an instance's token: it may drain, but not override the protection of others."""
    app = create_app(settings(tokens_file=tokens))
    web = httpx.Client(base_url="http://planner", transport=AppTransport(app))
    responses = [
        web.post(f"/v1/instances/s/drain{query}", headers={"Authorization": TOKENS[role].decode()}) for role in ROLES
    ]
    assert [reader, instance, operator] == [each.status_code for each in responses]


def test_without_tokens_a_forced_drain_is_allowed() -> None:
    """This also applies with a rate limit."""
    app = create_app(PlannerSettings(max_requests_per_s=100))
    web = httpx.Client(base_url="http://planner", transport=AppTransport(app))
    assert 404 == web.post("/v1/instances/s/drain?force=true").status_code


HEADERS = [
    (b"Bearer read-1", 200),
    (b"bearer  read-1 ", 200),
    (b"Bearer all-1", 200),
    (b"Bearer read-2", 401),
    (b"Bearer read-", 401),
    (b"Bearer LOOK-1", 401),
    (b"Bearer", 401),
    (b"Bearer ", 401),
    (b"Basic read-1", 401),
    (b"read-1", 401),
    (b"Bearer read-1, Bearer read-1", 401),
    (b"Bearer read-\xff1", 401),
    (b"", 401),
    (None, 401),
]


@pytest.mark.parametrize(("header", "expected"), HEADERS)
def test_only_a_valid_bearer_token_is_accepted(auth: Auth, header: bytes | None, expected: int) -> None:
    """The scheme is case-insensitive, the token is exact; 401 includes WWW-Authenticate."""
    problem = auth.check("GET", "/v1/models", header)
    assert expected == (problem.status if problem else 200)
    assert ({"WWW-Authenticate": "Bearer"} if expected == 401 else None) == (problem.headers if problem else None)


def test_without_tokens_everything_is_open() -> None:
    """This is the default, for a planner on loopback."""
    auth = Auth(PlannerSettings())
    assert not auth.guarded
    assert 200 == status(auth, "POST", "/v1/instances/s/drain", None)


def test_the_token_from_the_settings_has_full_access(tokens: Path) -> None:
    """This holds even if the file lists it with a lesser role."""
    auth = Auth(settings(token="read-1", tokens_file=tokens))
    assert 200 == status(auth, "POST", "/v1/instances/s/drain", b"Bearer read-1")


@pytest.mark.parametrize("token", ["", "two words", "schlüssel"])
def test_a_token_that_no_header_can_carry_is_rejected_at_startup(token: str) -> None:
    """It would lock everyone out."""
    with pytest.raises(SettingsError, match="RFORK_PLANNER_TOKEN"):
        Auth(settings(token=token))


MALFORMED = [
    (b"reader read-1\nadmin secret-2\n", ":2: expected `ROLE TOKEN`"),
    (b"secret-1 reader\n", ":1: expected `ROLE TOKEN`"),
    (b"\n\nsecret-1\n", ":3: expected `ROLE TOKEN`"),
    (b"reader secret-1 secret-2\n", ":1: expected `ROLE TOKEN`"),
    (b"reader # secret-1\n", ":1: expected `ROLE TOKEN`"),
    ("reader sécret-1\n".encode(), ":1: the token contains characters"),
    (b"reader secret-1\noperator secret-1\n", ":2: an earlier line has the same token"),
    (b"# no entries\n\n", " contains no token"),
    (b"", " contains no token"),
    (b"reader secret-\xff\n", ": it is not UTF-8 text"),
    (None, ": No such file or directory"),
]


@pytest.mark.parametrize(("content", "reason"), MALFORMED)
def test_a_malformed_tokens_file_is_a_settings_error(tmp_path: Path, content: bytes | None, reason: str) -> None:
    """The error has file and line, and nothing that may be a token."""
    path = tmp_path / "tokens"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(SettingsError) as error:
        Auth(settings(tokens_file=path))
    message = f"{error.value} {error.value.hint}"
    assert f"{path}{reason}" in message
    assert "cret-" not in message


def test_a_changed_tokens_file_is_reloaded(auth: Auth, tokens: Path, time: FakeTime) -> None:
    """After a second the new token works and the removed one does not."""
    seen = []
    tokens.write_text(f"{ROTATED}\n")  # longer: file systems may store times in steps of milliseconds
    for seconds in (0.9, 0.2):
        time.now += seconds
        presented = (b"Bearer work-1", b"Bearer work-2", b"Bearer read-1")
        seen.append([status(auth, "POST", "/v1/forks", token) for token in presented])
    assert [[200, 401, 403], [401, 200, 403]] == seen


def test_a_replaced_tokens_file_is_reloaded(auth: Auth, tokens: Path, time: FakeTime) -> None:
    """Kubernetes replaces files by renaming; size and times may be equal."""
    before = tokens.stat()
    (tokens.parent / "next").write_text(ROTATED)
    (tokens.parent / "next").replace(tokens)
    time.now += 1
    assert before.st_size == tokens.stat().st_size
    assert 200 == status(auth, "POST", "/v1/forks", b"Bearer work-2")


@pytest.mark.parametrize("broken", [b"reader\n", b"", None])
def test_an_invalid_tokens_file_keeps_the_previous_tokens(
    auth: Auth, tokens: Path, time: FakeTime, caplog: pytest.LogCaptureFixture, broken: bytes | None
) -> None:
    """The error is logged once; a repaired file is loaded."""
    if broken is None:
        tokens.unlink()
    else:
        tokens.write_bytes(broken)
    seen = []
    for _ in range(3):
        time.now += 1
        seen.append(status(auth, "POST", "/v1/forks", b"Bearer work-1"))
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    tokens.write_text(ROTATED)
    time.now += 1
    mended = [status(auth, "POST", "/v1/forks", token) for token in (b"Bearer work-1", b"Bearer work-2")]
    assert [200, 200, 200] == seen
    assert 1 == len(errors)
    assert str(tokens) in errors[0]
    assert [401, 200] == mended

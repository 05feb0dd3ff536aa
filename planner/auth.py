"""Authentication and authorization: bearer tokens, their roles, and the role that each route needs.

Tokens are stored as SHA-256 only and compared in constant time. There are three roles, each with the rights
of the one before: a *reader* lists, an *instance* reports and forks, an *operator* may do everything.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final, Literal, get_args

from starlette.routing import compile_path
from starlette.types import Scope

from planner.core.problems import ProblemError
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.settings import PlannerSettings

Role = Literal["reader", "instance", "operator"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
"""Ordered by rights, fewest first."""

CALLER: Final = "rfork_caller"
"""Key of the caller in a request's scope."""
AUTHORIZATION_CHECK: Final = "rfork_authorization_check"
"""Key, in a request's scope, of a function that checks whether the caller is still authorized."""
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/", "/ui", "/ui/", "/docs"})
"""Health checks and pages: no token, no rate limit."""
OPEN_FOLDERS: Final = ("/ui/page/", "/ui/vendor/", "/ui/swagger/")
"""Static files of the pages. The data that the pages show needs a reader's token."""
ROUTES: Final[tuple[tuple[str, str, Role], ...]] = (
    # Lifecycle of an instance.
    ("PUT", "/v1/instances/{instance_id}", "instance"),
    ("DELETE", "/v1/instances/{instance_id}", "instance"),
    ("GET", "/v1/instances/{instance_id}/exit", "instance"),
    ("POST", "/v1/instances/{instance_id}/drain", "instance"),  # with `force`, `require_role` requires an operator
    ("POST", "/v1/forks", "instance"),
    ("POST", "/v1/forks/{below:path}", "instance"),
    # The same in vLLM-Ascend's protocol; its first GET acquires a lease.
    ("GET", "/get_seed", "instance"),
    ("POST", "/put_seed", "instance"),
    ("POST", "/add_seed", "instance"),
    ("POST", "/remove_seed", "instance"),
    ("POST", "/renew_seed_lease", "instance"),
    # Lifecycle of a holder.
    ("PUT", "/v1/holders/{holder_id}", "instance"),
    ("DELETE", "/v1/holders/{holder_id}", "instance"),
    # Reading.
    ("GET", "/v1/instances", "reader"),
    ("GET", "/v1/instances/{below:path}", "reader"),
    ("GET", "/v1/forks", "reader"),
    ("GET", "/v1/forks/{below:path}", "reader"),
    ("GET", "/v1/holders", "reader"),
    ("GET", "/v1/holders/{below:path}", "reader"),
    ("GET", "/v1/events", "reader"),
    ("GET", "/v1/models", "reader"),
    ("GET", "/v1/models/{below:path}", "reader"),
    ("GET", "/v1/scaleups", "reader"),
    ("GET", "/v1/scaleups/{below:path}", "reader"),
    ("POST", "/v1/previews", "reader"),  # changes nothing
    ("GET", "/ui/feed", "reader"),
    ("GET", "/metrics", "reader"),
    ("GET", "/openapi.json", "reader"),
    # Announcing scale-ups makes other forks wait.
    ("POST", "/v1/scaleups", "operator"),
    ("DELETE", "/v1/scaleups/{scaleup_id}", "operator"),
)
"""Method, path template, role. The first match counts; anything else needs an operator."""
SECURITY_SCHEME: Final[Mapping[str, str]] = {
    "type": "http",
    "scheme": "bearer",
    "description": (
        "A token has a role. A reader may GET lists, events, metrics and this page, and request previews; an"
        " instance may also register, send heartbeats, fork, drain and remove itself; an operator may do"
        " everything."
    ),
}
"""Description of the token in the OpenAPI document."""

CHECK_S: Final = 1.0
"""Seconds between two checks of the tokens file."""
BEARER: Final = re.compile(rb"bearer +([!-~]+) *", re.IGNORECASE)
TOKEN: Final = re.compile("[!-~]+")
"""Visible ASCII: slightly more than RFC 6750, section 2.1, allows, and all that clients can send."""

_PATTERNS: Final[Mapping[str, tuple[tuple[re.Pattern[str], Role], ...]]] = {
    # Compiled by the router's own function, so that no path matches a route without matching here.
    method: tuple((compile_path(path)[0], role) for each, path, role in ROUTES if each == method)
    for method in {method for method, _, _ in ROUTES}
}


def is_open(path: str) -> bool:
    """Return True if the path needs no token."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)


def role_needed(method: str, path: str) -> Role | None:
    """Return the role that `ROUTES` requires, or None if no entry matches."""
    for pattern, role in _PATTERNS.get("GET" if method == "HEAD" else method, ()):
        if pattern.match(path):
            return role
    return None


@dataclass(frozen=True)
class Caller:
    """The owner of a valid token."""

    digest: bytes
    """SHA-256 of the token."""
    role: Role

    def has_role(self, role: Role) -> bool:
        """Return True if the caller has the rights of `role`."""
        return ROLES.index(self.role) >= ROLES.index(role)


class Auth:
    """Authenticates callers against `settings.token` (an operator) and the file `settings.tokens_file`.

    Use from the event loop's thread only. The constructor raises SettingsError, with file and line but no
    token, for a file that is invalid.
    """

    def __init__(self, settings: PlannerSettings, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._static_tokens: tuple[Caller, ...] = ()
        if settings.token is not None:
            token = settings.token.get_secret_value()
            if not TOKEN.fullmatch(token):
                raise SettingsError(
                    "RFORK_PLANNER_TOKEN is empty or contains characters that are not allowed in an HTTP header",
                    hint="use visible ASCII characters only, for example the output of `openssl rand -hex 32`",
                )
            self._static_tokens = (Caller(_digest(token), "operator"),)
        self._file = None if settings.tokens_file is None else TokensFile(settings.tokens_file, monotonic)

    @property
    def guarded(self) -> bool:
        """True if requests need a token at all."""
        return bool(self._static_tokens) or self._file is not None

    def check(self, method: str, path: str, authorization: bytes | None) -> ProblemError | None:
        """Return the problem if the request is refused: 401 without a valid token, 403 if the role has too
        few rights.
        """
        return self.denial_problem(method, path, authorization, self.caller(authorization))

    def caller(self, authorization: bytes | None) -> Caller | None:
        """Return the caller with this `Authorization` header, or None without a valid bearer token."""
        match = BEARER.fullmatch(authorization) if authorization else None
        if match is None:
            return None
        digest = hashlib.sha256(match[1]).digest()
        found = None
        # The token from the settings comes last, so it keeps its rights if the file lists it too.
        for caller in chain(self._file.callers() if self._file else (), self._static_tokens):
            if hmac.compare_digest(caller.digest, digest):
                found = caller
        return found

    def denial_problem(
        self, method: str, path: str, authorization: bytes | None, caller: Caller | None
    ) -> ProblemError | None:
        """Same as `check`, for a caller that is already authenticated."""
        if not self.guarded or is_open(path):
            return None
        if caller is None:
            detail = "the bearer token is not valid" if authorization else "this planner requires a bearer token"
            return ProblemError(401, "unauthorized", detail, headers={"WWW-Authenticate": "Bearer"})
        return _forbidden(caller, role_needed(method, path) or "operator")


def require_role(scope: Scope, role: Role) -> None:
    """Raise ProblemError 403 if the caller lacks the role; for routes where some requests need more rights.

    `planner.middleware.AuthMiddleware` stores the caller in the scope; without tokens there is none.
    """
    caller: Caller | None = scope.get(CALLER)
    problem = None if caller is None else _forbidden(caller, role)
    if problem is not None:
        raise problem


def still_authorized(scope: Scope) -> bool:
    """Return True if the caller of a streaming response is still authorized; true if no token is required.

    Its token may have been removed from the file or given a lesser role. Call it before each send, which
    happens at least every few seconds.
    """
    caller: Callable[[], bool] | None = scope.get(AUTHORIZATION_CHECK)
    return caller is None or caller()


def _forbidden(caller: Caller, role: Role) -> ProblemError | None:
    if caller.has_role(role):
        return None
    return ProblemError(403, "forbidden", f"this requires the role {role}; the token has the role {caller.role}")


class TokensFile:
    """The tokens of a file, one `ROLE TOKEN` per line, reloaded when it changes.

    Replace the file by renaming a new one over it, so that it is never read half written. While it is
    invalid, the previous tokens stay valid.
    """

    def __init__(self, path: Path, monotonic: Callable[[], float]) -> None:
        self._path = path
        self._monotonic = monotonic
        self._log = logger("planner.auth")
        self._version = _version(path)
        self._callers = _read(path)
        self._next_check = monotonic() + CHECK_S

    def callers(self) -> tuple[Caller, ...]:
        """Return the callers whose tokens the file lists."""
        if self._monotonic() >= self._next_check:
            self._next_check = self._monotonic() + CHECK_S
            self._reload_if_changed()
        return self._callers

    def _reload_if_changed(self) -> None:
        # Read before the content: a write in between is noticed at the next check.
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._callers = _read(self._path)
        except SettingsError as error:
            self._log.error("tokens file invalid, keeping the previous tokens", reason=str(error), hint=error.hint)
        else:
            self._log.info("tokens file reloaded", tokens=len(self._callers))


def _version(path: Path) -> tuple[int, ...] | None:
    """Return a value that changes whenever the file does, or None if the file cannot be inspected."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read(path: Path) -> tuple[Caller, ...]:
    """Return the callers listed in the file. Raises SettingsError, with file and line but never a token."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SettingsError(f"RFORK_PLANNER_TOKENS_FILE: cannot read {path}: {reason}") from None
    callers: dict[bytes, Caller] = {}
    for number, caller in _parsed(path, lines):
        if caller.digest in callers:
            raise SettingsError(
                f"{path}:{number}: an earlier line has the same token",
                hint="use another token in each line of RFORK_PLANNER_TOKENS_FILE",
            )
        callers[caller.digest] = caller
    if not callers:
        # More likely a truncated write than an attempt to lock everyone out.
        raise SettingsError(
            f"{path} contains no token", hint="write one `ROLE TOKEN` per line of RFORK_PLANNER_TOKENS_FILE"
        )
    return tuple(callers.values())


def _parsed(path: Path, lines: list[str]) -> Iterator[tuple[int, Caller]]:
    """Yield line number and caller of each non-empty line; `#` starts a comment."""
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        role = next((role for role in ROLES if role == words[0]), None)
        # Show neither word: if the two were swapped, the first one is the token.
        if role is None or len(words) != 2:
            raise SettingsError(f"{path}:{number}: expected `ROLE TOKEN` with a role of {', '.join(ROLES)}")
        if not TOKEN.fullmatch(words[1]):
            raise SettingsError(
                f"{path}:{number}: the token contains characters that are not allowed in an HTTP header",
                hint="use visible ASCII characters only",
            )
        yield number, Caller(_digest(words[1]), role)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()

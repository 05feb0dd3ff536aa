"""Who may do what: bearer tokens, the role of each, and the role that each route needs.

A token is known by its SHA-256 alone, and compared in constant time. There are three roles, each with the
rights of the one before it: a *reader* looks, an *instance* reports and forks, an *operator* does all.
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

from planner.http_errors import ProblemError
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.settings import PlannerSettings

Role = Literal["reader", "instance", "operator"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
"""Least rights first."""

CALLER: Final = "rfork_caller"
"""Where in a request's scope its caller stands."""
ROLE_ORDER: Final = "rfork_standing"
"""Where in it stands what tells whether that caller would be let in now."""
OPEN_PATHS: Final = frozenset({"/healthz", "/readyz", "/", "/ui", "/ui/", "/docs"})
"""Asked by whoever runs the container, or opens a page: no token, no limit."""
OPEN_FOLDERS: Final = ("/ui/page/", "/ui/vendor/", "/ui/swagger/")
"""Files of the pages, which are the same everywhere. What these show takes a reader's token."""
ROUTES: Final[tuple[tuple[str, str, Role], ...]] = (
    # An instance's own life.
    ("PUT", "/v1/instances/{instance_id}", "instance"),
    ("DELETE", "/v1/instances/{instance_id}", "instance"),
    ("GET", "/v1/instances/{instance_id}/exit", "instance"),
    ("POST", "/v1/instances/{instance_id}/drain", "instance"),  # with `force`: `require_role` of an operator
    ("POST", "/v1/forks", "instance"),
    ("POST", "/v1/forks/{below:path}", "instance"),
    # The same in vLLM-Ascend's protocol; its first GET takes a lease.
    ("GET", "/get_seed", "instance"),
    ("POST", "/put_seed", "instance"),
    ("POST", "/add_seed", "instance"),
    ("POST", "/remove_seed", "instance"),
    ("POST", "/renew_seed_lease", "instance"),
    # Looking.
    ("GET", "/v1/instances", "reader"),
    ("GET", "/v1/instances/{below:path}", "reader"),
    ("GET", "/v1/forks", "reader"),
    ("GET", "/v1/forks/{below:path}", "reader"),
    ("GET", "/v1/events", "reader"),
    ("GET", "/v1/models", "reader"),
    ("GET", "/v1/models/{below:path}", "reader"),
    ("GET", "/v1/scaleups", "reader"),
    ("GET", "/v1/scaleups/{below:path}", "reader"),
    ("POST", "/v1/previews", "reader"),  # it changes nothing
    ("GET", "/ui/feed", "reader"),
    ("GET", "/metrics", "reader"),
    ("GET", "/openapi.json", "reader"),
    # Saying whom all others wait for.
    ("POST", "/v1/scaleups", "operator"),
    ("DELETE", "/v1/scaleups/{scaleup_id}", "operator"),
)
"""Method, path in the words of the router, role. The first that fits counts; others are the operator's."""
SECURITY_SCHEME: Final[Mapping[str, str]] = {
    "type": "http",
    "scheme": "bearer",
    "description": (
        "A token has a role. A reader may GET lists, events, metrics and this page, and ask for previews; an"
        " instance may also register, send heartbeats, fork, drain and remove itself; an operator may do"
        " everything."
    ),
}
"""What the OpenAPI document says of the token."""

CHECK_S: Final = 1.0
"""Seconds between two looks at the tokens file."""
BEARER: Final = re.compile(rb"bearer +([!-~]+) *", re.IGNORECASE)
TOKEN: Final = re.compile("[!-~]+")
"""Visible ASCII: a little more than RFC 6750, section 2.1, allows, and all that clients can send."""

_PATTERNS: Final[Mapping[str, tuple[tuple[re.Pattern[str], Role], ...]]] = {
    # The router's own patterns: what they let through to a route, no looser one here has judged.
    method: tuple((compile_path(path)[0], role) for each, path, role in ROUTES if each == method)
    for method in {method for method, _, _ in ROUTES}
}


def is_open(path: str) -> bool:
    """Whether everybody may have it."""
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)


def role_needed(method: str, path: str) -> Role | None:
    """The role that `ROUTES` asks for; None where no line of it fits."""
    for pattern, role in _PATTERNS.get("GET" if method == "HEAD" else method, ()):
        if pattern.match(path):
            return role
    return None


@dataclass(frozen=True)
class Caller:
    """The holder of a token that is known."""

    digest: bytes
    """SHA-256 of the token."""
    role: Role

    def has_role(self, role: Role) -> bool:
        """Whether it has the rights of `role`."""
        return ROLES.index(self.role) >= ROLES.index(role)


class Auth:
    """Knows the callers of `settings.token` (an operator) and of the file `settings.tokens`.

    Used from the event loop's thread only. The constructor raises SettingsError, naming file and line but
    no token, for a file that cannot be used.
    """

    def __init__(self, settings: PlannerSettings, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._static_tokens: tuple[Caller, ...] = ()
        if settings.token is not None:
            token = settings.token.get_secret_value()
            if not TOKEN.fullmatch(token):
                raise SettingsError("RFORK_PLANNER_TOKEN is empty, or cannot stand in a header as it is")
            self._static_tokens = (Caller(_digest(token), "operator"),)
        self._file = None if settings.tokens_file is None else TokensFile(settings.tokens_file, monotonic)

    @property
    def guarded(self) -> bool:
        """Whether a token is asked for at all."""
        return bool(self._static_tokens) or self._file is not None

    def check(self, method: str, path: str, authorization: bytes | None) -> ProblemError | None:
        """Why the request is refused, if it is: 401 for no or an unknown token, 403 for too small a role."""
        return self.denial_problem(method, path, authorization, self.caller(authorization))

    def caller(self, authorization: bytes | None) -> Caller | None:
        """Who shows this `Authorization` header; None where it holds no known bearer token."""
        match = BEARER.fullmatch(authorization) if authorization else None
        if match is None:
            return None
        digest = hashlib.sha256(match[1]).digest()
        found = None
        # The token of the settings comes last: it keeps its rights if the file names it too.
        for caller in chain(self._file.callers() if self._file else (), self._static_tokens):
            if hmac.compare_digest(caller.digest, digest):
                found = caller
        return found

    def denial_problem(
        self, method: str, path: str, authorization: bytes | None, caller: Caller | None
    ) -> ProblemError | None:
        """As `check`, for a caller that is found out already."""
        if not self.guarded or is_open(path):
            return None
        if caller is None:
            detail = "the bearer token is wrong" if authorization else "this planner wants a bearer token"
            return ProblemError(401, "unauthorized", detail, headers={"WWW-Authenticate": "Bearer"})
        return _forbidden(caller, role_needed(method, path) or "operator")


def require_role(scope: Scope, role: Role) -> None:
    """For routes that take more of some requests: ProblemError 403 where the caller has not this role.

    The door (`planner.middleware.AuthMiddleware`) leaves the caller in the scope; where no token is asked for, none.
    """
    caller: Caller | None = scope.get(CALLER)
    problem = None if caller is None else _forbidden(caller, role)
    if problem is not None:
        raise problem


def still_authorized(scope: Scope) -> bool:
    """For answers without an end: whether their caller would be let in now.

    Its token may have been taken out of the file since, or have got a smaller role. To be asked each time
    that something is sent, which is once in a few seconds at least; where no token is asked for, it may.
    """
    caller: Callable[[], bool] | None = scope.get(ROLE_ORDER)
    return caller is None or caller()


def _forbidden(caller: Caller, role: Role) -> ProblemError | None:
    if caller.has_role(role):
        return None
    return ProblemError(403, "forbidden", f"this takes the role {role}, and the token shown has the role {caller.role}")


class TokensFile:
    """The tokens of a file, one `ROLE TOKEN` a line, read again when it changes.

    Replace it by renaming another one over it, so that it is never read half written. While it cannot be
    used, the tokens read before stay good.
    """

    def __init__(self, path: Path, monotonic: Callable[[], float]) -> None:
        self._path = path
        self._monotonic = monotonic
        self._log = logger("planner.auth")
        self._version = _version(path)
        self._callers = _read(path)
        self._next_check = monotonic() + CHECK_S

    def callers(self) -> tuple[Caller, ...]:
        """Those whose tokens the file names."""
        if self._monotonic() >= self._next_check:
            self._next_check = self._monotonic() + CHECK_S
            self._reload_if_changed()
        return self._callers

    def _reload_if_changed(self) -> None:
        # Taken before reading: what is written in between is seen at the next look.
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._callers = _read(self._path)
        except SettingsError as error:
            self._log.error("the tokens file cannot be used: the tokens before it stay good", reason=str(error))
        else:
            self._log.info("the tokens file was read again", tokens=len(self._callers))


def _version(path: Path) -> tuple[int, ...] | None:
    """What changes whenever the file does; None where it cannot be looked at."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read(path: Path) -> tuple[Caller, ...]:
    """The callers that the file names. Raises SettingsError, naming file and line but never a token."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise SettingsError(f"{path}: {reason}", hint="RFORK_PLANNER_TOKENS_FILE names the tokens file") from None
    callers: dict[bytes, Caller] = {}
    for number, caller in _parsed(path, lines):
        if caller.digest in callers:
            raise SettingsError(f"{path}:{number}: the token stands in the file twice")
        callers[caller.digest] = caller
    if not callers:
        # More likely a write that was cut short than the wish to lock everyone out.
        raise SettingsError(f"{path}: no token in it", hint="write `ROLE TOKEN` lines")
    return tuple(callers.values())


def _parsed(path: Path, lines: list[str]) -> Iterator[tuple[int, Caller]]:
    """Line number and caller of each line that is not empty; `#` begins a comment."""
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        role = next((role for role in ROLES if role == words[0]), None)
        # Neither word is shown: whoever swapped the two has written the token first.
        if role is None or len(words) != 2:
            raise SettingsError(f"{path}:{number}: not `ROLE TOKEN` with a role of {', '.join(ROLES)}")
        if not TOKEN.fullmatch(words[1]):
            raise SettingsError(f"{path}:{number}: the token has characters that cannot stand in a header")
        yield number, Caller(_digest(words[1]), role)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()

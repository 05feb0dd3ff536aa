"""Headers of vLLM-Ascend's RFork planner protocol: parsing, validation and OpenAPI documentation.

Values are sent to other clients later, so only well-formed ones are accepted.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final

from fastapi import Request, Response
from fastapi.routing import APIRoute
from typing_extensions import Self

from planner.core.problems import ProblemError

NAME_PREFIX: Final = "ascend:"
"""Prefix of the names of models and instances of this protocol."""
REASON_HEADER: Final = "RFORK_REASON"
"""Response header with the reason of a rejection. Clients need not read it."""
SEED_HEADERS: Final = ("SEED_IP", "SEED_PORT", "SEED_RANK")
MAX_KEY_CHARS: Final = 500
"""A model's name can hold this many characters after the prefix."""
NUMBER_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "SEED_PORT": (1, 65_535),
    "SEED_RANK": (0, 999_999),
    "SEED_REFCNT": (0, 999_999),
}
KEY_PATTERN: Final = re.compile("[!-~]([ -~]*[!-~])?")
DIGITS_PATTERN: Final = re.compile("[0-9]{1,6}")
INSTANCE_ID_PATTERN: Final = re.compile(
    f"{NAME_PREFIX}(?P<ip>[0-9a-f.:]+):(?P<port>[0-9]{{1,5}}):(?P<rank>[0-9]{{1,6}})"
)
USER_ID_PATTERN: Final = re.compile("[A-Za-z0-9._:-]{1,128}")

_SCHEMAS: Final[Mapping[str, Mapping[str, object]]] = {
    "SEED_KEY": {
        "type": "string", "maxLength": MAX_KEY_CHARS, "pattern": f"^{KEY_PATTERN.pattern}$", "example": "qwen3$bf16$1",
    },
    "SEED_IP": {
        "type": "string", "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}], "example": "10.0.0.7",
    },
    "USER_ID": {"type": "string", "pattern": f"^{USER_ID_PATTERN.pattern}$", "example": "5f0c9a7d"},
    "LEASE_TTL_SEC": {"type": "number", "example": 30},
    **{
        name: {"type": "integer", "minimum": low, "maximum": high, "example": low}
        for name, (low, high) in NUMBER_RANGES.items()
    },
}  # fmt: skip


class BadHeader(Exception):
    """A header is missing, duplicated or invalid. The text names the header and never contains its value."""


@dataclass(frozen=True)
class AscendSeed:
    """Identity of a seed: its address, and its rank there."""

    ip: str
    port: int
    rank: int

    @property
    def instance_id(self) -> str:
        """Id in the registry."""
        return f"{NAME_PREFIX}{self.ip}:{self.port}:{self.rank}"

    @classmethod
    def from_instance_id(cls, instance_id: str) -> Self | None:
        """Return the seed with this id, or None if it is not the id of a seed."""
        match = INSTANCE_ID_PATTERN.fullmatch(instance_id)
        return None if match is None else cls(match["ip"], int(match["port"]), int(match["rank"]))

    @classmethod
    def from_request(cls, request: Request) -> Self:
        """Parse the seed of a request. Raises BadHeader."""
        try:
            ip = ipaddress.ip_address(header_text(request, "SEED_IP"))
        except ValueError:
            raise BadHeader("SEED_IP is not an IP address") from None
        if isinstance(ip, ipaddress.IPv6Address) and ip.scope_id is not None:
            raise BadHeader("SEED_IP has a scope, which is meaningless on another machine")
        return cls(str(ip), header_int(request, "SEED_PORT"), header_int(request, "SEED_RANK"))


class HeaderRoute(APIRoute):
    """Route that reports errors as a status without a body, as these clients expect."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the endpoint with error handling."""
        endpoint = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await endpoint(request)
            except BadHeader as error:
                return response(400, **{REASON_HEADER: str(error)})
            except ProblemError as problem:
                return response(problem.status, **{REASON_HEADER: problem.slug, **(problem.headers or {})})

        return handle


def response(status: int, **headers: str) -> Response:
    """Return a response without a body."""
    return Response(status_code=status, headers=headers)


def header_text(request: Request, name: str) -> str:
    """Return a header's value. Raises BadHeader unless it occurs exactly once."""
    values = request.headers.getlist(name)
    if len(values) != 1 or not values[0]:
        raise BadHeader(f"{name} occurs more than once" if len(values) > 1 else f"{name} is missing")
    return values[0]


def header_int(request: Request, name: str) -> int:
    """Return the value of a header of `NUMBER_RANGES`. Raises BadHeader."""
    digits = header_text(request, name)
    low, high = NUMBER_RANGES[name]
    if not DIGITS_PATTERN.fullmatch(digits) or not low <= int(digits) <= high:
        raise BadHeader(f"{name} is not a number from {low} to {high}")
    return int(digits)


def seed_key(request: Request) -> str:
    """Return the key that must be equal for a seed and its readers. Raises BadHeader."""
    key = header_text(request, "SEED_KEY")
    if len(key) > MAX_KEY_CHARS or not KEY_PATTERN.fullmatch(key):
        raise BadHeader(f"SEED_KEY must be at most {MAX_KEY_CHARS} printable ASCII characters")
    return key


def user_id(request: Request) -> str:
    """Return the id of a lease. Raises BadHeader."""
    lease_id = header_text(request, "USER_ID")
    if not USER_ID_PATTERN.fullmatch(lease_id):
        raise BadHeader("USER_ID was not issued by a planner")
    return lease_id


def request_header_docs(*names: str) -> dict[str, Any]:
    """Return a route's `openapi_extra` with its request headers."""
    return {
        "parameters": [
            {"name": name, "in": "header", "required": True, "schema": dict(_SCHEMAS[name])} for name in names
        ]
    }


def response_header_docs(*names: str) -> dict[str, Any]:
    """Return a response's `headers` for `responses`."""
    return {name: {"schema": dict(_SCHEMAS[name])} for name in names}

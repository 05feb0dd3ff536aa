"""The headers of vLLM-Ascend's RFork planner protocol: read, checked, and told in the OpenAPI document.

What comes in is echoed to other clients later on, so nothing is taken that is not of its header's form.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Final, Self

from fastapi import Request, Response
from fastapi.routing import APIRoute

from planner.http_errors import ProblemError

PREFIX: Final = "ascend:"
"""Of the names of models and instances that came by this protocol."""
REASON: Final = "RFORK_REASON"
"""Header that says why a request was refused, for those who look for the reason; clients need not."""
SEED: Final = ("SEED_IP", "SEED_PORT", "SEED_RANK")
MAX_KEY_CHARS: Final = 500
"""Characters; a model's name holds that many behind the prefix."""
NUMBERS: Final[Mapping[str, tuple[int, int]]] = {
    "SEED_PORT": (1, 65_535),
    "SEED_RANK": (0, 999_999),
    "SEED_REFCNT": (0, 999_999),
}
KEY: Final = re.compile("[!-~]([ -~]*[!-~])?")
DIGITS: Final = re.compile("[0-9]{1,6}")
INSTANCE_ID: Final = re.compile(f"{PREFIX}(?P<ip>[0-9a-f.:]+):(?P<port>[0-9]{{1,5}}):(?P<rank>[0-9]{{1,6}})")
USER_ID: Final = re.compile("[A-Za-z0-9._:-]{1,128}")

_SCHEMAS: Final[Mapping[str, Mapping[str, object]]] = {
    "SEED_KEY": {
        "type": "string", "maxLength": MAX_KEY_CHARS, "pattern": f"^{KEY.pattern}$", "example": "qwen3$bf16$1",
    },
    "SEED_IP": {
        "type": "string", "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}], "example": "10.0.0.7",
    },
    "USER_ID": {"type": "string", "pattern": f"^{USER_ID.pattern}$", "example": "5f0c9a7d"},
    "LEASE_TTL_SEC": {"type": "number", "example": 30},
    **{
        name: {"type": "integer", "minimum": low, "maximum": high, "example": low}
        for name, (low, high) in NUMBERS.items()
    },
}  # fmt: skip


class BadHeader(Exception):
    """A header is missing, comes twice or cannot be used; the text names it, and never repeats its value."""


@dataclass(frozen=True)
class AscendSeed:
    """What tells one seed from others: where it is served, and its rank there."""

    ip: str
    port: int
    rank: int

    @property
    def instance_id(self) -> str:
        """Its name in the registry."""
        return f"{PREFIX}{self.ip}:{self.port}:{self.rank}"

    @classmethod
    def from_instance_id(cls, instance_id: str) -> Self | None:
        """The seed with this `instance_id`; None where no seed has such a one."""
        match = INSTANCE_ID.fullmatch(instance_id)
        return None if match is None else cls(match["ip"], int(match["port"]), int(match["rank"]))

    @classmethod
    def from_request(cls, request: Request) -> Self:
        """The seed that a request names; raises BadHeader."""
        try:
            ip = ipaddress.ip_address(header_text(request, "SEED_IP"))
        except ValueError:
            raise BadHeader("SEED_IP is no IP address") from None
        if isinstance(ip, ipaddress.IPv6Address) and ip.scope_id is not None:
            raise BadHeader("SEED_IP has a scope, which means nothing on another machine")
        return cls(str(ip), header_int(request, "SEED_PORT"), header_int(request, "SEED_RANK"))


class HeaderRoute(APIRoute):
    """Answers what cannot be done with a status and without a body, as these clients expect it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The endpoint, its errors answered."""
        endpoint = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await endpoint(request)
            except BadHeader as error:
                return response(400, **{REASON: str(error)})
            except ProblemError as problem:
                return response(problem.status, **{REASON: problem.slug, **(problem.headers or {})})

        return handle


def response(status: int, **headers: str) -> Response:
    """An answer without a body."""
    return Response(status_code=status, headers=headers)


def header_text(request: Request, name: str) -> str:
    """The header's value; raises BadHeader where there is none, or more than one."""
    values = request.headers.getlist(name)
    if len(values) != 1 or not values[0]:
        raise BadHeader(f"{name} is given more than once" if len(values) > 1 else f"{name} is missing")
    return values[0]


def header_int(request: Request, name: str) -> int:
    """The header's value as one of `NUMBERS`; raises BadHeader."""
    digits, (low, high) = header_text(request, name), NUMBERS[name]
    if not DIGITS.fullmatch(digits) or not low <= int(digits) <= high:
        raise BadHeader(f"{name} is no number from {low} to {high}")
    return int(digits)


def seed_key(request: Request) -> str:
    """What a seed and those that read from it must agree in; raises BadHeader."""
    key = header_text(request, "SEED_KEY")
    if len(key) > MAX_KEY_CHARS or not KEY.fullmatch(key):
        raise BadHeader(f"SEED_KEY is not at most {MAX_KEY_CHARS} printable characters of ASCII")
    return key


def user_id(request: Request) -> str:
    """The name of a lease; raises BadHeader."""
    name = header_text(request, "USER_ID")
    if not USER_ID.fullmatch(name):
        raise BadHeader("USER_ID is none that a planner gives")
    return name


def request_header_docs(*names: str) -> dict[str, Any]:
    """The `openapi_extra` of a route: the headers it takes."""
    return {
        "parameters": [
            {"name": name, "in": "header", "required": True, "schema": dict(_SCHEMAS[name])} for name in names
        ]
    }


def response_header_docs(*names: str) -> dict[str, Any]:
    """The `headers` of an answer in `responses`."""
    return {name: {"schema": dict(_SCHEMAS[name])} for name in names}

"""Errors that end a request with a problem document (RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rfork.schema import ChunkRange


class ProblemError(Exception):
    """Ends a request with a problem document; `slug` is the last part of its `type`."""

    def __init__(
        self,
        status: int,
        slug: str,
        detail: str,
        *,
        errors: Sequence[Mapping[str, str]] = (),
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.slug = slug
        self.detail = detail
        self.errors = tuple(errors)
        self.headers = headers


def invalid_field(field: str, message: str) -> ProblemError:
    """Return a problem for a field with an invalid value in an otherwise well-formed request."""
    return ProblemError(422, "invalid-request", f"{field}: {message}", errors=[{"field": field, "message": message}])


def check_ranges(field: str, ranges: tuple[ChunkRange, ...], chunk_count: int) -> None:
    """Raise ProblemError `invalid-request` for ranges outside an image of `chunk_count` chunks."""
    for begin, end in ranges:
        if not 0 <= begin < end <= chunk_count:
            raise invalid_field(field, f"({begin}, {end}) is not a range of chunks in an image of {chunk_count}")


def store_busy() -> ProblemError:
    """Return the problem for a group that other replicas changed at each attempt."""
    detail = "other planner replicas kept changing this group: retry"
    return ProblemError(503, "busy", detail, headers={"Retry-After": "1"})

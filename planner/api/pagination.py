"""Paginated lists, ordered by id, so that pages stay consistent while items come and go."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Annotated, Final

from fastapi import Query

from rfork.schema import Identifier

DEFAULT_PAGE_SIZE: Final = 100
MAX_PAGE_SIZE: Final = 1000

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE_SIZE, description="maximum number of items in this page")]
After = Annotated[Identifier | None, Query(description="`next` of the previous page; none: the first page")]


def paginate(ids: Iterable[str], limit: int) -> tuple[list[str], str | None]:
    """Return the first `limit` ids, and the cursor of the next page, if there is one.

    `ids` are sorted and start after this page's cursor; only as many as needed are consumed.
    """
    found = list(islice(ids, limit + 1))
    return found[:limit], found[limit - 1] if len(found) > limit else None

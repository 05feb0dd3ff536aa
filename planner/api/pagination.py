"""Lists in pages: in the order of ids, so that a page is right whatever came or went before it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import Annotated, Final

from fastapi import Query

from rfork.schema.types import Identifier

PAGE: Final = 100
MAX_PAGE: Final = 1000

Limit = Annotated[int, Query(ge=1, le=MAX_PAGE, description="most items of this page")]
After = Annotated[Identifier | None, Query(description="`next` of the page before; none: the first page")]


def paginate(ids: Iterable[str], limit: int) -> tuple[list[str], str | None]:
    """The first `limit` ids, and the cursor of the next page, if there is one.

    `ids` are in order, from behind this page's cursor on; no more of them are taken than it needs.
    """
    found = list(islice(ids, limit + 1))
    return found[:limit], found[limit - 1] if len(found) > limit else None

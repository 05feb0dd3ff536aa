"""The name that seeds and forks of a model meet under, where nobody gives it one.

Whoever asks for a model by a name gets what that name's seeds hold, as long as the layout fits: two
fine-tunes of one model must not have one name. So a folder goes by its last part, unless that says nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

HUB_FOLDER: Final = re.compile(r"(?:^|/)models--(?P<name>[^/]+)/snapshots/(?P<revision>[^/]+)/?$")
"""Where the hub's cache keeps a model: what engines make of the model's id when they are offline."""
SAYS_NOTHING: Final = re.compile(
    r"(?:checkpoint|model|models|weights|snapshot|step|epoch|latest|last|best|final|merged|output|out|main|hf|v|r)?"
    r"[-_.]?[0-9]*|[0-9a-f]{7,64}",
    re.IGNORECASE,
)
"""Last parts of folders that many models have: such a folder goes by its whole path."""


def meeting_name(source: str | Path, revision: str | None = None) -> str:
    """A hub's id as it is, a folder by its last part, or its path; with ``@revision`` where one is named.

    Of the hub's cache, it is the id, and the commit that lies there.
    """
    if hub := HUB_FOLDER.search(str(source)):
        return f"{hub['name'].replace('--', '/')}@{revision or hub['revision']}"
    folder = Path(source)
    if isinstance(source, Path) or folder.is_dir():
        whole = folder.resolve()
        name = str(whole) if SAYS_NOTHING.fullmatch(whole.name) else whole.name
    else:
        name = source
    return f"{name}@{revision}" if revision else name

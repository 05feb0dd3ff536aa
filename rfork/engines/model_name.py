"""The name that seeds and forks of a model meet under, where nobody gives it one.

Instances share weights only where their versions are equal too (`rfork.weights_version`), so a name need not
tell one set of weights from another. A folder has its last part as its name, unless that says nothing.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

HUB_FOLDER: Final = re.compile(r"(?:^|/)models--(?P<name>[^/]+)/snapshots/[^/]+/?$")
"""Where the hub's cache keeps a model: what engines make of the model's id when they are offline."""
GENERIC_FOLDER_NAMES: Final = re.compile(
    r"(?:checkpoint|model|models|weights|snapshot|step|epoch|latest|last|best|final|merged|output|out|main|hf|v|r)?"
    r"[-_.]?[0-9]*|[0-9a-f]{7,64}",
    re.IGNORECASE,
)
"""Last parts of folders that many models have: such a folder goes by its whole path."""


def canonical_model_name(source: str | Path) -> str:
    """Return a hub id as it is, also that of a folder in the hub's cache; of other folders the last part.

    Where that says nothing (``checkpoint-100``) it is the folder's path.
    """
    if hub := HUB_FOLDER.search(str(source)):
        return str(hub["name"].replace("--", "/"))
    folder = Path(source)
    if not isinstance(source, Path) and not folder.is_dir():
        return source
    resolved = folder.resolve()
    return str(resolved) if GENERIC_FOLDER_NAMES.fullmatch(resolved.name) else resolved.name

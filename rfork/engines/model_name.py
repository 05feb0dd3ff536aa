"""Default name under which seeds and forks of a model find each other.

Instances share weights only if their versions are equal too (`rfork.weights_version`), so a name need not
identify one set of weights. A folder is named by its last path component, unless that is generic.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

HUB_FOLDER: Final = re.compile(r"(?:^|/)models--(?P<name>[^/]+)/snapshots/[^/]+/?$")
"""Folder of a model in the hub's cache: offline engines use it in place of the model's id."""
GENERIC_FOLDER_NAMES: Final = re.compile(
    r"(?:checkpoint|model|models|weights|snapshot|step|epoch|latest|last|best|final|merged|output|out|main|hf|v|r)?"
    r"[-_.]?[0-9]*|[0-9a-f]{7,64}",
    re.IGNORECASE,
)
"""Last path components that many models share: a folder with one of them is named by its full path."""


def canonical_model_name(source: str | Path) -> str:
    """Return a hub id unchanged, also for a folder in the hub's cache; for other folders the last path component.

    If that component is generic (``checkpoint-100``), the name is the full path.
    """
    if hub := HUB_FOLDER.search(str(source)):
        return str(hub["name"].replace("--", "/"))
    folder = Path(source)
    if not isinstance(source, Path) and not folder.is_dir():
        return source
    resolved = folder.resolve()
    return str(resolved) if GENERIC_FOLDER_NAMES.fullmatch(resolved.name) else resolved.name

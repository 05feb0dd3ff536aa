"""Generated parts of pages: a line ``<!-- generated: NAME -->`` is replaced by the output of NAME.

The build of the site (`docs/site/build.py`) generates them each time, so that no page is older than the code.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Final

from benchmarks import figures
from docs.site.reference import (
    cli_page,
    errors_page,
    grpc_page,
    matrix_page,
    metrics_page,
    python_page,
    rest_page,
    settings_page,
    zoo_page,
)

MARKER: Final = re.compile(r"^<!-- generated: ([a-z-]+) -->$", re.MULTILINE)
PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "cli": cli_page.page,
    "error-tree": errors_page.tree,
    "errors": errors_page.page,
    "figures": figures.markdown,
    "grpc-peer": lambda: grpc_page.page(grpc_page.PEER),
    "grpc-scaler": lambda: grpc_page.page(grpc_page.SCALER),
    "metrics": metrics_page.page,
    "sglang-versions": lambda: matrix_page.table_of("sglang"),
    "architectures": zoo_page.architectures,
    "vllm-versions": lambda: matrix_page.table_of("vllm"),
    "python": python_page.page,
    "rest-problems": rest_page.page_problems,
    "rest-routes": rest_page.page_routes,
    "rest-schemas": rest_page.page_schemas,
    "settings": settings_page.page,
}


def fill_markers(markdown: str) -> str:
    """Return a page with all generated parts. Raises KeyError for an unknown name."""
    return MARKER.sub(lambda found: PARTS[found[1]](), markdown)

"""Cases: an engine, and how its weights reach it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from benchmarks.engines.cases import EngineName

WeightSource = Literal["none", "disk", "seed", "prefetch", "holder", "restart"]
"""`none`: no weights at all. `seed`: a fork from another host. `prefetch`: the same, and `rfork launch` fetches while
the engine starts. `holder`: a holder of this host has the image. `restart`: as `holder`, after the engine of that case
was killed.
"""


@dataclass(frozen=True, slots=True)
class Link:
    """Link of each host. `bytes_per_s` None: as fast as the machine sends between two network namespaces."""

    name: str
    bytes_per_s: float | None


SHAPED: Final = Link("200 MB/s", 200e6)
OPEN: Final = Link("open link", None)


@dataclass(frozen=True, slots=True)
class ReadyCase:
    """One table row. `link` None: it reads nothing from other hosts."""

    engine: EngineName
    name: str
    weights: WeightSource
    link: Link | None = None
    cold: bool = False
    """True if the checkpoint was dropped from the page cache before the start."""

    @property
    def key(self) -> str:
        """Unique name of the row."""
        return f"{self.engine}: {self.name}" + (f", {self.link.name}" if self.link is not None else "")

    @property
    def needs_holder(self) -> bool:
        """True if it runs while a holder of its host has the image."""
        return self.weights in ("holder", "restart")


START_UP: Final = "start-up alone"
COLD, WARM = "default loader, cold cache", "default loader, warm cache"
FORK, PREFETCH = "rfork", "rfork with prefetch"
HOLDER, RESTART = "rfork, holder has the image", "rfork, restart after kill -9"


def cases_of(engine: EngineName, links: Sequence[Link]) -> list[ReadyCase]:
    """Return the cases of one engine in the order of the table."""
    return [
        ReadyCase(engine, START_UP, "none"),
        ReadyCase(engine, COLD, "disk", cold=True),
        ReadyCase(engine, WARM, "disk"),
        *(ReadyCase(engine, FORK, "seed", link) for link in links),
        *(ReadyCase(engine, PREFETCH, "prefetch", link) for link in links),
        ReadyCase(engine, HOLDER, "holder"),
        ReadyCase(engine, RESTART, "restart"),
    ]

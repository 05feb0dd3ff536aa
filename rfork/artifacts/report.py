"""Report of fetching artifacts."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class ArtifactReport:
    """Result of fetching the caches for one start. Sizes in bytes, times in seconds.

    `model` is the requested name, `key` the id of the compatibility key (GPU, versions), `seconds` the
    duration of the call. `files` and `bytes` count what was installed; `already_present` files existed
    before, `kept_existing` files existed with other content, which was kept. `source` is the instance or the
    URI they came from, or None if nothing was fetched. `reason` is then the cause, else the caches that were
    skipped.
    """

    model: str
    key: str
    files: int = 0
    bytes: int = 0
    already_present: int = 0
    kept_existing: int = 0
    seconds: float = 0.0
    source: str | None = None
    reason: str | None = None

    def to_dict(self) -> dict[str, str | int | float | None]:
        """Return all values, ready for JSON."""
        return asdict(self)

    def line(self) -> str:
        """Return the report on one line."""
        if self.source is None:
            return f"no artifacts installed after {self.seconds:.2f} s: {self.reason}"
        also = f", {self.already_present} already present" if self.already_present else ""
        also += f", {self.kept_existing} existing kept" if self.kept_existing else ""
        also += f"; {self.reason}" if self.reason else ""
        return (
            f"{self.files} artifact files ({self.bytes / 1e6:.1f} MB) from {self.source} in {self.seconds:.2f} s{also}"
        )

"""What taking artifacts did, or why nothing was taken."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class ArtifactReport:
    """How the caches of a start were taken. Sizes in bytes, times in seconds.

    `model` is the name that they were asked for under, `key` the id of what has to be equal on both sides
    (GPU, versions), `seconds` the whole call. `files` and `bytes` were put in place; `already_present` files were there
    already, `kept_existing` were there with other content, which stays. `source` is the instance or the URI that gave
    them, None where nothing was taken: `reason` says why then, or which kinds were passed over.
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
        """All values, ready for JSON."""
        return asdict(self)

    def line(self) -> str:
        """The report on one line."""
        if self.source is None:
            return f"no artifacts taken in {self.seconds:.2f} s, because: {self.reason}"
        also = f", {self.already_present} were there" if self.already_present else ""
        also += f", {self.kept_existing} stay as they were" if self.kept_existing else ""
        also += f"; {self.reason}" if self.reason else ""
        return (
            f"{self.files} files ({self.bytes / 1e6:.1f} MB) of artifacts from {self.source} in "
            f"{self.seconds:.2f} s{also}"
        )

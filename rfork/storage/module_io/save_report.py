"""Report of a save or a conversion."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Report of a save or a conversion; `nbytes` counts the bytes of the tensors."""

    uri: str
    tensors: int
    nbytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """Rate in 10^9 bytes per second."""
        return self.nbytes / 1e9 / self.seconds if self.seconds > 0 else 0.0

    def line(self) -> str:
        """Return the report as one line."""
        return (
            f"{self.uri}: {self.tensors} tensors, {self.nbytes / 1e6:,.1f} MB in {self.seconds:.2f} s, "
            f"{self.gb_per_s:.2f} GB/s"
        )

"""What was written to storage."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SaveReport:
    """The report of a save or a conversion; `nbytes` are those of the tensors."""

    uri: str
    tensors: int
    nbytes: int
    seconds: float

    @property
    def gb_per_s(self) -> float:
        """The rate, in 10^9 bytes a second."""
        return self.nbytes / 1e9 / self.seconds if self.seconds > 0 else 0.0

    def line(self) -> str:
        """The report on one line."""
        return (
            f"{self.uri}: {self.tensors} tensors, {self.nbytes / 1e6:,.1f} MB in {self.seconds:.2f} s, "
            f"{self.gb_per_s:.2f} GB/s"
        )

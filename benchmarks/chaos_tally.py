"""What many rounds of `benchmarks.chaos` come to: a table by what was done to whom, and the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.chaos_draw import STRIKES
from benchmarks.chaos_judge import Ended, Finding, Seen, Wrong
from benchmarks.harness import Row

ENDS: Final[Mapping[Ended, str]] = {
    "forked": "forked", "fallback": "fell back", "failed": "failed", "killed": "killed",
}  # fmt: skip
WRONGS: Final[Mapping[Wrong, str]] = {
    "bytes": "wrong bytes", "hang": "hung", "leak": "leaked", "repeats": "repeated", "lost": "lost",
    "error": "errors", "books": "books",
}  # fmt: skip


@dataclass
class Count:
    """Some rounds, added up."""

    rounds: int = 0
    ended: Counter[Ended] = field(default_factory=Counter)
    wrong: Counter[Wrong] = field(default_factory=Counter)
    recovery_s: float = 0.0

    def add(self, seen: Seen, findings: Sequence[Finding]) -> None:
        """One more round."""
        self.rounds += 1
        self.ended.update(ending.ended for ending in seen.endings)
        self.wrong.update(finding.wrong for finding in findings)
        self.recovery_s = max(self.recovery_s, seen.recovery_s)

    def row(self, name: str) -> Row:
        """As the table shows it."""
        return {
            "fault": name,
            "rounds": self.rounds,
            **{column: self.ended[ended] for ended, column in ENDS.items()},
            **{column: self.wrong[wrong] for wrong, column in WRONGS.items()},
            "recovery s": round(self.recovery_s, 1),
        }


class Tally:
    """All rounds so far. A round in which two things were done counts in both rows, and in "all" once."""

    def __init__(self) -> None:
        self._all = Count()
        self._by_fault: dict[tuple[str, str], Count] = {}

    def add(self, seen: Seen, findings: Sequence[Finding]) -> None:
        """One more round, and what the judge found."""
        self._all.add(seen, findings)
        for fault in {(struck.kind, struck.role) for struck in seen.struck}:
            self._by_fault.setdefault(fault, Count()).add(seen, findings)

    def note(self, findings: Sequence[Finding]) -> None:
        """What was found that belongs to no round alone."""
        self._all.wrong.update(finding.wrong for finding in findings)

    @property
    def rows(self) -> list[Row]:
        """The table: a row for each fault and role that there was."""
        rows = [self._by_fault[fault].row(" ".join(fault)) for fault in STRIKES if fault in self._by_fault]
        return [*rows, self._all.row("all")]

    @property
    def figures(self) -> dict[str, float]:
        """The figures; each but the first three is a count of what must not be."""
        ended, wrong = self._all.ended, self._all.wrong
        return {
            "chaos_rounds": self._all.rounds,
            "chaos_forked_share": ended["forked"] / max(1, ended.total() - ended["killed"]),
            "chaos_worst_recovery_s": self._all.recovery_s,
            "chaos_wrong_bytes": wrong["bytes"],
            "chaos_hangs": wrong["hang"],
            "chaos_leaks": wrong["leak"],
            "chaos_repeated_over_bound": wrong["repeats"],
            "chaos_lost": wrong["lost"],
            "chaos_errors": wrong["error"],
            "chaos_stale_books": wrong["books"],
        }

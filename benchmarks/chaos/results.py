"""Summary of many rounds of `benchmarks.chaos`: a table by fault and role, and the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from benchmarks.chaos.checks import EndingType, Finding, FindingType, RoundObservation
from benchmarks.chaos.scenarios import FAULT_ROLES
from benchmarks.harness import Row

ENDING_LABELS: Final[Mapping[EndingType, str]] = {
    "forked": "forked", "fallback": "fell back", "failed": "failed", "killed": "killed",
}  # fmt: skip
FINDING_LABELS: Final[Mapping[FindingType, str]] = {
    "bytes": "wrong bytes", "hang": "hung", "leak": "leaked", "repeats": "repeated", "lost": "lost",
    "error": "errors", "stale": "stale",
}  # fmt: skip


@dataclass
class FaultCount:
    """Totals of several rounds."""

    rounds: int = 0
    endings: Counter[EndingType] = field(default_factory=Counter)
    findings_by_type: Counter[FindingType] = field(default_factory=Counter)
    recovery_s: float = 0.0

    def add(self, observation: RoundObservation, findings: Sequence[Finding]) -> None:
        """Add a round."""
        self.rounds += 1
        self.endings.update(ending.ending_type for ending in observation.endings)
        self.findings_by_type.update(finding.finding_type for finding in findings)
        self.recovery_s = max(self.recovery_s, observation.recovery_s)

    def row(self, name: str) -> Row:
        """Return the table row."""
        return {
            "fault": name,
            "rounds": self.rounds,
            **{column: self.endings[endings] for endings, column in ENDING_LABELS.items()},
            **{column: self.findings_by_type[findings_by_type] for findings_by_type, column in FINDING_LABELS.items()},
            "recovery s": round(self.recovery_s, 1),
        }


class ChaosSummary:
    """Summary of all rounds so far. A round with two faults counts in both rows, and once in "all"."""

    def __init__(self) -> None:
        self._all = FaultCount()
        self._by_fault: dict[tuple[str, str], FaultCount] = {}

    def add(self, observation: RoundObservation, findings: Sequence[Finding]) -> None:
        """Add a round and its findings."""
        self._all.add(observation, findings)
        for fault in {(injected.fault_type, injected.role) for injected in observation.injected}:
            self._by_fault.setdefault(fault, FaultCount()).add(observation, findings)

    def add_findings(self, findings: Sequence[Finding]) -> None:
        """Add findings that belong to no single round."""
        self._all.findings_by_type.update(finding.finding_type for finding in findings)

    @property
    def rows(self) -> list[Row]:
        """Table with a row for each fault and role that occurred."""
        rows = [self._by_fault[fault].row(" ".join(fault)) for fault in FAULT_ROLES if fault in self._by_fault]
        return [*rows, self._all.row("all")]

    @property
    def figures(self) -> dict[str, float]:
        """Figures; all but the first three count violated guarantees."""
        endings, findings_by_type = self._all.endings, self._all.findings_by_type
        return {
            "chaos_rounds": self._all.rounds,
            "chaos_forked_share": endings["forked"] / max(1, endings.total() - endings["killed"]),
            "chaos_worst_recovery_s": self._all.recovery_s,
            "chaos_wrong_bytes": findings_by_type["bytes"],
            "chaos_hangs": findings_by_type["hang"],
            "chaos_leaks": findings_by_type["leak"],
            "chaos_repeated_over_bound": findings_by_type["repeats"],
            "chaos_lost": findings_by_type["lost"],
            "chaos_errors": findings_by_type["error"],
            "chaos_stale_books": findings_by_type["stale"],
        }

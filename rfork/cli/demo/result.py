"""Result of the demo: whether all processes have the same tensors, and how long the forks took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from rich.table import Table

from rfork.cli.demo.monitor import DemoMonitor, Latency
from rfork.cli.demo.processes import ChildFailed, Event


@dataclass(frozen=True, slots=True)
class ForkRow:
    """One fork, as it reported itself."""

    host: str
    outcome: str
    seconds: float
    gb_per_s: float
    sources: Mapping[str, int]
    bytes_repeated: int
    chunks: int
    chunks_verified: int
    replans: int
    weights_id: str
    sha256: str
    generated: str


@dataclass(frozen=True, slots=True)
class DemoResult:
    """Result of the demo; `sources` count verified bytes by host."""

    model: str
    image_bytes: int
    seed_weights_id: str
    seed_sha256: str
    seed_reply: str
    killed: str | None
    killed_at_share: float
    latency: Mapping[str, Latency]
    forks: tuple[ForkRow, ...]

    @property
    def differences(self) -> list[str]:
        """Differences from the expected result, one line each; empty if every fork equals the seed."""
        found = []
        for fork in self.forks:
            if fork.outcome != "forked":
                found.append(f"{fork.host} did not fork: {fork.outcome}")
            if fork.chunks_verified != fork.chunks:
                found.append(f"{fork.host} verified {fork.chunks_verified} of {fork.chunks} chunks")
            if (fork.weights_id, fork.sha256) != (self.seed_weights_id, self.seed_sha256):
                found.append(f"{fork.host} has different bytes than the seed")
            if not fork.generated.startswith(self.seed_reply) or not self.seed_reply:
                found.append(f"{fork.host} answers {fork.generated!r}, the seed {self.seed_reply!r}")
        return found

    @property
    def equal(self) -> bool:
        """True if every fork equals the seed."""
        return not self.differences

    def table(self) -> Table:
        """Return a table with one row per fork."""
        size = f"{self.image_bytes / 1e6:.0f} MB"
        table = Table(
            "fork", "seconds", "GB/s", "sources", "reread", "verified", "re-plans",
            title=f"{self.model}, {size}",
        )  # fmt: skip
        for fork in self.forks:
            total = sum(fork.sources.values()) or 1
            table.add_row(
                fork.host,
                f"{fork.seconds:.2f}",
                f"{fork.gb_per_s:.3f}",
                ", ".join(f"{host} {nbytes / total:.0%}" for host, nbytes in fork.sources.items()),
                f"{fork.bytes_repeated / 1e6:.1f} MB",
                f"{fork.chunks_verified}/{fork.chunks}",
                str(fork.replans),
            )
        return table

    def lines(self) -> Iterator[str]:
        """Yield the lines below the table."""
        if self.killed is None:
            yield "no relay was killed: none was half finished with a reader when checked"
        else:
            yield (
                f"killed with SIGKILL: {self.killed}, a relay with {self.killed_at_share:.0%} verified; "
                f"replaced by {max(fork.host for fork in self.forks)}"
            )
        for name, latency in self.latency.items():
            yield (
                f"seed latency while {name}: median {latency.median:.3f} s, maximum {latency.slowest:.3f} s "
                f"({latency.replies} answers)"
            )
        yield f"answer of the seed: {self.seed_reply}"
        for fork in self.forks:
            yield f"answer of {fork.host}: {fork.generated}"
        if self.equal:
            yield f"equal: all tensors of seed and forks have the SHA-256 {self.seed_sha256[:16]}…"
        for difference in self.differences:
            yield f"DIFFERENT: {difference}"

    def to_dict(self) -> dict[str, object]:
        """Return the result for JSON."""
        return {**asdict(self), "equal": self.equal, "differences": self.differences}


def compare_results(monitor: DemoMonitor, results: Mapping[str, Event]) -> DemoResult:
    """Combine the reports of the seed and the forks; `results` are the forks' reports by host."""
    replies = {reply.text for reply in monitor.replies}
    if len(replies) != 1:
        raise ChildFailed(f"the seed returned different answers to the same prompt: {sorted(replies)}")
    ready = monitor.seed_ready
    return DemoResult(
        model=str(ready["model"]),
        image_bytes=_integer(ready, "image_bytes"),
        seed_weights_id=str(ready["weights_id"]),
        seed_sha256=str(ready["sha256"]),
        seed_reply=replies.pop(),
        killed=monitor.victim,
        killed_at_share=monitor.killed_at_share,
        latency=monitor.latencies(),
        forks=tuple(_row(host, report) for host, report in results.items()),
    )


def _row(host: str, report: Event) -> ForkRow:
    shares = report["sources"]
    if not isinstance(shares, list):
        raise ChildFailed(f"a process reported sources={shares!r}, not a list")
    return ForkRow(
        host=host,
        outcome=str(report["outcome"]),
        seconds=_number(report, "seconds"),
        gb_per_s=_number(report, "gb_per_s"),
        sources={str(share["host"]): int(share["verified_bytes"]) for share in shares},
        bytes_repeated=_integer(report, "bytes_repeated"),
        chunks=_integer(report, "chunks"),
        chunks_verified=_integer(report, "chunks_verified"),
        replans=_integer(report, "replans"),
        weights_id=str(report["weights_id"]),
        sha256=str(report["sha256"]),
        generated=str(report["generated"]),
    )


def _number(event: Event, name: str) -> float:
    value = event[name]
    if not isinstance(value, int | float):
        raise ChildFailed(f"a process reported {name}={value!r}, not a number")
    return float(value)


def _integer(event: Event, name: str) -> int:
    return int(_number(event, name))

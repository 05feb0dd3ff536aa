"""Runs the rounds of `benchmarks.chaos` on its crew, one at a time, and sees what came of them."""

from __future__ import annotations

import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks import chaos_disk
from benchmarks.chaos_crew import DEADLINE_S, PLANNER, PORTS, WINDOW, Crew
from benchmarks.chaos_draw import Round
from benchmarks.chaos_faults import Faults
from benchmarks.chaos_inspect import Inspector
from benchmarks.chaos_judge import Ending, Finding, Seen
from benchmarks.chaos_node import CHECKPOINT, SNAPSHOT
from benchmarks.chaos_wire import Answer, Command

GRACE_S: Final = 10.0
"""What a fork may take after its deadline, to fall back or to say that it cannot."""
REST_S: Final = 10.0
DUMP_S: Final = 0.5
LOOK_S: Final = 0.2
LOOK_AGAIN_S: Final = 2.0
"""When a planner that did not answer is asked again who reads from whom."""
TICK_S: Final = 0.05
DISK_RATE: Final = 16 << 20
"""Bytes a second that a disk gives: less than a link."""


class Runner:
    """Runs rounds, one at a time."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._inspector = Inspector(crew)

    def run(self, round_: Round) -> Seen:
        """One round. Raises ChaosError where it could not even begin."""
        crew, inspector = self._crew, self._inspector
        crew.replace()
        crew.wait_planner(round_.store)
        inspector.remember_births()
        right, files = self._prepare(round_)
        commands = {host: self._command(round_, host, files.get(host)) for host in round_.target_hosts}
        answers: dict[str, Answer] = {}

        def revive(host: str) -> None:
            crew.end(host)  # its end may not have been noticed yet
            answers.pop(host, None)
            crew.replace([host])
            crew.nodes[host].send(Command("prepare", size=commands[host].size))
            crew.nodes[host].send(commands[host])

        faults = Faults(crew, round_, files, revive)
        hung = self._fork(round_, faults, commands, answers)
        ended_at = time.monotonic()
        faults.finish()
        self._hear_out(faults)
        self._end_hung(hung)
        whole = [host for host, answer in answers.items() if answer.outcome in ("forked", "fallback")]
        hashes = crew.ask(whole, Command("check"))
        hosts = (*round_.seed_hosts, *round_.target_hosts)
        died = self._died(set(hosts) - faults.killed - hung)
        alive = [host for host in hosts if host in crew.nodes]
        rested = crew.ask(alive, Command("rest"), REST_S)
        stuck = {host for host in alive if host not in rested or rested[host].error}
        after = inspector.settled(set(alive) - stuck)
        self._end_hung(stuck)
        for host in round_.target_hosts if round_.keeps else ():
            chaos_disk.clear(crew.disk(host, inside=False))
        inspector.over(round_.name, round_.store)
        return Seen(
            round=round_,
            window=WINDOW,
            struck=tuple(faults.struck),
            endings=tuple(
                _ending(host, answers.get(host), hashes.get(host), right, faults.killed, hung)
                for host in round_.target_hosts
            ),
            before={host: inspector.born[host] for host in after},
            after=after,
            died=died,
            stuck=tuple(sorted(stuck)),
            traces=inspector.traces(),
            held=inspector.held(),
            recovery_s=ended_at - (faults.struck_at or ended_at),
        )

    def settle(self) -> tuple[Finding, ...]:
        """Once all rounds are over: what is still wrong with what outlived them, the planners."""
        return self._inspector.settle()

    # -- before -------------------------------------------------------------------------------------

    def _prepare(self, round_: Round) -> tuple[str, dict[str, Path]]:
        """The right hash, and by host the file that a target could read."""
        crew, size = self._crew, round_.size_mib << 20
        givers = round_.seed_hosts or ("seed0",)
        filled = crew.must(givers, Command("prepare", size=size, weights=round_.number + 1))
        crew.must(round_.target_hosts, Command("prepare", size=size))
        files: dict[str, Path] = {}
        if round_.fallback or not round_.seeds:
            files = self._store(round_)
        if round_.seeds:
            crew.must(givers, Command("seed", model=round_.name, planner=crew.url(round_.store)))
        return filled[givers[0]].sha256, files

    def _command(self, round_: Round, host: str, file: Path | None) -> Command:
        """What has a target fork."""
        snapshot = file is not None and round_.start == "snapshot"
        return Command(
            "fork",
            model=round_.name,
            planner=self._crew.url(round_.store),
            size=round_.size_mib << 20,
            checkpoint=str(file.parent) if file is not None and not snapshot else "",
            snapshot=file.as_uri() if file is not None and snapshot else "",
            disk_rate=0 if round_.seeds else DISK_RATE,
            resume=str(self._crew.disk(host, inside=True)) if round_.keeps else "",
        )

    def _store(self, round_: Round) -> dict[str, Path]:
        """Each target's file; where one is to be torn, each has one of its own."""
        folder = self._crew.folder / "files"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._crew.must(["seed0"], Command("store", folder=str(folder)))
        name = SNAPSHOT if round_.start == "snapshot" else CHECKPOINT
        torn = any(fault.kind == "torn" for fault in round_.faults)
        if not torn:
            return dict.fromkeys(round_.target_hosts, folder / name)
        for host in round_.target_hosts:
            shutil.copytree(folder, folder / host, ignore=shutil.ignore_patterns("t*"))
        return {host: folder / host / name for host in round_.target_hosts}

    # -- the round itself ---------------------------------------------------------------------------

    def _fork(
        self, round_: Round, faults: Faults, commands: Mapping[str, Command], ends: dict[str, Answer]
    ) -> set[str]:
        """Have all targets fork, and keep the answers of those that end; returns those that hang."""
        crew, progress = self._crew, dict.fromkeys(round_.target_hosts, 0.0)
        for host, command in commands.items():
            crew.nodes[host].send(command)
        give_up = time.monotonic() + DEADLINE_S + GRACE_S
        look = Command("look", model=round_.name, planner=crew.url(round_.store))
        look_at = 0.0
        while True:
            now = time.monotonic()
            faults.due(progress, ends)
            left = {host for host in round_.target_hosts if host in crew.nodes} - ends.keys() - faults.killed
            if now >= give_up + faults.longest_s or not (left or faults.reviving):
                return left
            if faults.curious and now >= look_at:
                crew.nodes[PLANNER].send(look)
                look_at = now + LOOK_AGAIN_S
            for host, answer in crew.hear(TICK_S):
                if answer.verb == "progress":
                    progress[host] = answer.verified
                elif answer.verb == "fork" and host not in faults.killed:
                    ends[host] = answer
                elif answer.verb == "look":
                    look_at = now + LOOK_S
                    if not answer.error:
                        faults.see(answer.forks)
                else:
                    faults.hear(host, answer)

    def _hear_out(self, faults: Faults) -> None:
        until = time.monotonic() + REST_S
        while faults.unanswered and (left := until - time.monotonic()) > 0:
            for host, answer in self._crew.hear(left):
                if answer.verb == "snapshot":
                    faults.hear(host, answer)

    # -- after --------------------------------------------------------------------------------------

    def _end_hung(self, hosts: set[str]) -> None:
        """Have them log where their threads are, and end them."""
        for host in hosts & self._crew.nodes.keys():
            process = self._crew.nodes[host].process
            process.signal(signal.SIGUSR1)
            process.wait(DUMP_S)
            self._crew.end(host)

    def _died(self, hosts: set[str]) -> tuple[str, ...]:
        """Who has ended and was not killed; a planner that has is started again."""
        self._crew.hear(0.0)
        died = sorted(hosts - self._crew.nodes.keys())
        for store in PORTS:
            if self._crew.planners[store].wait(0.0):
                died.append(f"{PLANNER} ({store})")
                self._crew.start_planner(store)
        return tuple(died)


def _ending(
    host: str,
    answer: Answer | None,
    checked: Answer | None,
    right: str,
    killed: set[str],
    hung: set[str],
) -> Ending:
    if host in killed:  # maybe after it was done: nobody can look at its bytes any more
        return Ending(host, "killed")
    if answer is None or host in hung:
        return Ending(host, "hung")
    return Ending(
        host,
        answer.outcome,
        right=checked is not None and checked.sha256 == right if answer.outcome != "failed" else None,
        repeated=answer.repeated,
        chunk_bytes=answer.chunk_bytes,
        seconds=answer.seconds,
        reasons=answer.reasons,
    )

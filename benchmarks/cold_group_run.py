"""Runs the cases of `benchmarks.cold_group` on its crew."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

from benchmarks.cold_group_case import STORE, Case, Outcome
from benchmarks.cold_group_crew import URIS, ColdCrew
from benchmarks.fanout_crew import STEP_S, FanoutError
from benchmarks.fanout_wire import Answer, Command
from benchmarks.netlab import Traffic

KILLED_AT: Final = 0.35
"""When the victim dies, in S/B: it has read its share in part, and others wait for the rest of it."""
PATIENCE: Final = 4.0
"""A case that takes this many times what the links allow, and a minute, hangs."""


class Runner:
    """Runs cases on a crew, one at a time."""

    def __init__(self, crew: ColdCrew) -> None:
        self._crew = crew
        self._runs = 0

    def run(self, case: Case) -> Outcome:
        """One run; raises FanoutError where it does not come to its end, or not to the right bytes."""
        self._runs += 1
        crew = self._crew
        self._all(case.hosts, Command("prepare"))
        port = crew[STORE].ask(Command("listen")).port if case.limit else 0
        watched = (STORE, *case.hosts)
        before = {host: crew.lab.traffic(host) for host in watched}
        used, started = crew.processors(), time.monotonic()
        answers = self._take(case, port) if case.limit else self._fork(case)
        busy, _ = crew.processors().busy_since(used)
        traffic = {host: _since(crew.lab.traffic(host), before[host]) for host in watched}
        if not case.limit:
            self._check(answers)
        self._all(tuple(answers), Command("rest"))
        if case.victim is not None:
            crew.start_again(case.victim)
        return Outcome(started, answers, traffic, busy)

    def _fork(self, case: Case) -> dict[str, Answer]:
        begun = time.monotonic()
        model = f"run{self._runs}"
        snapshot = URIS["snapshot"] if case.kind == "snapshot" else ""
        checkpoint = URIS["checkpoint"] if case.kind == "checkpoint" else ""
        command = Command("fork", model, snapshot=snapshot, checkpoint=checkpoint, alone=case.alone)
        for host in case.hosts:
            self._crew[host].send(command)
        if case.victim is not None:
            time.sleep(max(0.0, begun + KILLED_AT * self._line_s - time.monotonic()))
            self._crew.kill(case.victim)
        left = [host for host in case.hosts if host != case.victim]
        return {host: self._crew[host].answer(self._most_s(case)) for host in left}

    def _take(self, case: Case, port: int) -> dict[str, Answer]:
        giver, taker = self._crew[STORE], self._crew[case.hosts[0]]
        giver.send(Command("give"))
        address = self._crew.lab.address(STORE)
        taken = taker.ask(Command("take", address=address, port=port), self._most_s(case))
        giver.answer()
        return {taker.name: taken}

    def _check(self, answers: dict[str, Answer]) -> None:
        """By a hash that the forks never used."""
        for host, checked in self._all(tuple(answers), Command("check")).items():
            if checked.sha256 != self._crew.sha256:
                raise FanoutError(f"{host} holds other bytes than were stored")

    def _all(self, hosts: Sequence[str], command: Command) -> dict[str, Answer]:
        for host in hosts:
            self._crew[host].send(command)
        return {host: self._crew[host].answer() for host in hosts}

    @property
    def _line_s(self) -> float:
        """Seconds that the image takes on a link, headers left out."""
        return self._crew.size * 8 / self._crew.rate

    def _most_s(self, case: Case) -> float:
        return STEP_S + PATIENCE * self._line_s * case.bound


def _since(now: Traffic, before: Traffic) -> Traffic:
    return Traffic(now.sent - before.sent, now.received - before.received)

"""Runs the cases of `benchmarks.fanout` on its crew.

All three modes use the product as it is. Whom a target may read from is set by the name of the model
alone: targets of one model are one group to the planner. In a star each target forks a model of its own
name, and the seed gives its module under all of these names, so nobody can relay. In doubling each
hand-over from one instance to the next has a name of its own, which the giver seeds once it is complete.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from benchmarks.fanout_case import SLOW_RATE, Case, Outcome, doubling
from benchmarks.fanout_crew import STEP_S, Crew, FanoutError
from benchmarks.fanout_wire import Answer, Command
from benchmarks.netlab import Traffic

LATE_AT: Final = 0.25
"""When the late ones come, in S/B."""
PATIENCE: Final = 3.0
"""A fork that takes this many times what its schedule allows, and a minute, hangs."""


class Runner:
    """Runs cases on a crew, one at a time."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._runs = 0
        self._filled: dict[str, str] = {}
        """Seeds whose modules hold the weights, and the SHA-256 of their images."""
        self._weights_id = ""

    def run(self, case: Case) -> Outcome:
        """One run; raises FanoutError where it does not come to its end, or not to the right bytes."""
        self._runs += 1
        crew, hosts = self._crew, (*case.seed_hosts, *case.target_hosts)
        with self._shaped(case):
            go = self._ready(case, f"run{self._runs}")
            before = {host: crew.lab.traffic(host) for host in hosts}
            used, started = crew.processors(), time.monotonic()
            answers = go()
            busy, busy_crew = crew.processors().busy_since(used)
            traffic = {host: _since(crew.lab.traffic(host), before[host]) for host in hosts}
        if case.mode != "limit":
            self._check(case, answers)
        self._all(hosts, Command("rest"))
        return Outcome(started, answers, traffic, busy, busy_crew)

    # -- before the go ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _shaped(self, case: Case) -> Iterator[None]:
        """The links as the case wants them; afterwards as they were."""
        lab, rate = self._crew.lab, self._crew.rate
        rates = dict.fromkeys(case.slow_hosts, rate * SLOW_RATE)
        if case.seed_rate != 1:
            rates |= dict.fromkeys(case.seed_hosts, rate * case.seed_rate)
        for host, own in rates.items():
            lab.shape(host, rate=own)
        try:
            yield
        finally:
            for host in rates:
                lab.shape(host, rate=rate)

    def _ready(self, case: Case, model: str) -> Callable[[], dict[str, Answer]]:
        """Everything up to the go, which the function that it returns gives."""
        fresh = [host for host in case.seed_hosts if host not in self._filled]
        self._all(fresh, Command("prepare", filled=True))
        self._filled |= {host: answer.sha256 for host, answer in self._all(fresh, Command("check")).items()}
        self._all(case.target_hosts, Command("prepare"))
        seed = self._crew[case.seed_hosts[0]]
        match case.mode:
            case "limit":
                port = seed.ask(Command("listen")).port
                return lambda: self._take(case, port)
            case "rfork":
                given = self._all(case.seed_hosts, Command("seed", model))
                self._weights_id = given[seed.name].weights_id
                return lambda: self._together(case, dict.fromkeys(case.target_hosts, model))
            case "star":
                models = {host: f"{model}-{host}" for host in case.target_hosts}
                for own in models.values():
                    self._weights_id = seed.ask(Command("seed", own)).weights_id
                return lambda: self._together(case, models)
            case "doubling":
                self._weights_id = seed.ask(Command("seed", _hand_over(model, 1))).weights_id
                return lambda: self._doubling(case, model)

    # -- from the go to the end ---------------------------------------------------------------------

    def _take(self, case: Case, port: int) -> dict[str, Answer]:
        giver, taker = self._crew[case.seed_hosts[0]], self._crew[case.target_hosts[0]]
        giver.send(Command("give"))
        taken = taker.ask(
            Command("take", address=self._crew.lab.address(giver.name), port=port), self._most_s(case)
        )
        giver.answer()
        return {taker.name: taken}

    def _together(self, case: Case, models: Mapping[str, str]) -> dict[str, Answer]:
        """All at once, but for those that come late."""
        late_at = time.monotonic() + LATE_AT * self._line_s
        for host in case.target_hosts:
            if host in case.late_hosts:
                time.sleep(max(0.0, late_at - time.monotonic()))
            self._crew[host].send(Command("fork", models[host]))
        return {host: self._crew[host].answer(self._most_s(case)) for host in case.target_hosts}

    def _doubling(self, case: Case, model: str) -> dict[str, Answer]:
        """Each giver on a thread: once it is complete it seeds for one target after the other."""
        hosts = (case.seed_hosts[0], *case.target_hosts)
        complete: dict[int, Future[Answer]] = {number: Future() for number in range(len(hosts))}
        complete[0].set_result(Answer())

        def give(giver: int, takers: Sequence[int]) -> None:
            for taker in takers:
                edge = _hand_over(model, taker)
                try:
                    complete[giver].result()
                    if taker != 1:  # the first one is seeded for before the go
                        self._crew[hosts[giver]].ask(Command("seed", edge))
                    answer = self._crew[hosts[taker]].ask(Command("fork", edge), self._most_s(case))
                except FanoutError as error:
                    complete[taker].set_exception(error)
                else:
                    complete[taker].set_result(answer)

        with ThreadPoolExecutor(len(hosts)) as pool:
            for giver, takers in doubling(case.targets).items():
                pool.submit(give, giver, takers)
            return {hosts[taker]: complete[taker].result() for taker in range(1, len(hosts))}

    # -- after the end ------------------------------------------------------------------------------

    def _check(self, case: Case, answers: Mapping[str, Answer]) -> None:
        """The weights_id that the transfer verified, and beside it a hash that it never used."""
        right = self._filled[case.seed_hosts[0]]
        for host, checked in self._all(case.target_hosts, Command("check")).items():
            if (answers[host].weights_id, checked.sha256) != (self._weights_id, right):
                raise FanoutError(f"{case.name}: {host} holds other bytes than the seed")

    def _all(self, hosts: Sequence[str], command: Command) -> dict[str, Answer]:
        for host in hosts:
            self._crew[host].send(command)
        return {host: self._crew[host].answer() for host in hosts}

    @property
    def _line_s(self) -> float:
        """Seconds that the image takes on a link, headers left out."""
        return self._crew.size * 8 / self._crew.rate

    def _most_s(self, case: Case) -> float:
        """Seconds after which a fork hangs."""
        return STEP_S + PATIENCE * self._line_s * max(case.targets, case.bound)


def _hand_over(model: str, taker: int) -> str:
    return f"{model}-to-{taker}"


def _since(now: Traffic, before: Traffic) -> Traffic:
    return Traffic(now.sent - before.sent, now.received - before.received)

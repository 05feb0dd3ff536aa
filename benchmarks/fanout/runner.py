"""Runs the cases of `benchmarks.fanout` on its cluster.

All three modes use the product unchanged. The model name alone determines which sources a target may read
from: the planner treats the targets of one model as one group. In a star each target forks a model with a
unique name, and the seed serves its module under all of these names, so no target can relay. In doubling each
transfer from one instance to the next has a unique model name, which the source seeds once it is complete.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

from benchmarks.fanout.cases import SLOW_RATE, FanoutCase, FanoutOutcome, doubling
from benchmarks.fanout.cluster import STEP_S, FanoutCluster, FanoutError
from benchmarks.fanout.messages import FanoutCommand, FanoutResponse
from benchmarks.netlab import Traffic

LATE_AT: Final = 0.25
"""When the late targets start, in S/B."""
TIMEOUT_FACTOR: Final = 3.0
"""A fork counts as hung after this multiple of the time that its schedule allows, plus a minute."""


class FanoutRunner:
    """Runs cases on a cluster, one at a time."""

    def __init__(self, cluster: FanoutCluster) -> None:
        self._cluster = cluster
        self._runs = 0
        self._filled: dict[str, str] = {}
        """Seeds whose modules have the weights, and the SHA-256 of their images."""
        self._weights_id = ""

    def run(self, case: FanoutCase) -> FanoutOutcome:
        """Run a case once; raises FanoutError if it does not finish, or finishes with the wrong bytes."""
        self._runs += 1
        cluster, hosts = self._cluster, (*case.seed_hosts, *case.target_hosts)
        with self._shape_links(case):
            start = self._prepare_case(case, f"run{self._runs}")
            before = {host: cluster.lab.traffic(host) for host in hosts}
            used, started = cluster.processors(), time.monotonic()
            responses = start()
            cpu_busy, cpu_busy_processes = cluster.processors().busy_since(used)
            traffic = {host: _since(cluster.lab.traffic(host), before[host]) for host in hosts}
        if case.mode != "limit":
            self._check(case, responses)
        self._cluster.request_all(hosts, FanoutCommand("release"))
        return FanoutOutcome(started, responses, traffic, cpu_busy, cpu_busy_processes)

    # -- preparation --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _shape_links(self, case: FanoutCase) -> Iterator[None]:
        """Shape the links for the case; restore them afterwards."""
        lab, rate = self._cluster.lab, self._cluster.rate
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

    def _prepare_case(self, case: FanoutCase, model: str) -> Callable[[], dict[str, FanoutResponse]]:
        """Prepare everything before the start; the returned function starts the forks."""
        fresh = [host for host in case.seed_hosts if host not in self._filled]
        self._cluster.request_all(fresh, FanoutCommand("prepare", filled=True))
        self._filled |= {
            host: response.sha256 for host, response in self._cluster.request_all(fresh, FanoutCommand("check")).items()
        }
        self._cluster.request_all(case.target_hosts, FanoutCommand("prepare"))
        seed = self._cluster[case.seed_hosts[0]]
        match case.mode:
            case "limit":
                port = seed.request(FanoutCommand("listen")).port
                return lambda: self._bare_transfer(case, port)
            case "rfork":
                seed_responses = self._cluster.request_all(case.seed_hosts, FanoutCommand("seed", model))
                self._weights_id = seed_responses[seed.name].weights_id
                return lambda: self._start_together(case, dict.fromkeys(case.target_hosts, model))
            case "star":
                models = {host: f"{model}-{host}" for host in case.target_hosts}
                for own in models.values():
                    self._weights_id = seed.request(FanoutCommand("seed", own)).weights_id
                return lambda: self._start_together(case, models)
            case "doubling":
                self._weights_id = seed.request(FanoutCommand("seed", _edge_model(model, 1))).weights_id
                return lambda: self._doubling(case, model)

    # -- forks --------------------------------------------------------------------------------------

    def _bare_transfer(self, case: FanoutCase, port: int) -> dict[str, FanoutResponse]:
        sender, receiver = self._cluster[case.seed_hosts[0]], self._cluster[case.target_hosts[0]]
        sender.send(FanoutCommand("send"))
        received = receiver.request(
            FanoutCommand("receive", address=self._cluster.lab.address(sender.name), port=port),
            self._timeout_s(case),
        )
        sender.receive()
        return {receiver.name: received}

    def _start_together(self, case: FanoutCase, models: Mapping[str, str]) -> dict[str, FanoutResponse]:
        """Start all targets together except the late ones."""
        late_at = time.monotonic() + LATE_AT * self._cluster.min_transfer_s
        for host in case.target_hosts:
            if host in case.late_hosts:
                time.sleep(max(0.0, late_at - time.monotonic()))
            self._cluster[host].send(FanoutCommand("fork", models[host]))
        return {host: self._cluster[host].receive(self._timeout_s(case)) for host in case.target_hosts}

    def _doubling(self, case: FanoutCase, model: str) -> dict[str, FanoutResponse]:
        """Run a thread per source: once it is complete, it seeds for one target after the other."""
        hosts = (case.seed_hosts[0], *case.target_hosts)
        complete: dict[int, Future[FanoutResponse]] = {number: Future() for number in range(len(hosts))}
        complete[0].set_result(FanoutResponse())

        def seed_readers(source: int, readers: Sequence[int]) -> None:
            for reader in readers:
                edge = _edge_model(model, reader)
                try:
                    complete[source].result()
                    if reader != 1:  # the first one is seeded before the start
                        self._cluster[hosts[source]].request(FanoutCommand("seed", edge))
                    response = self._cluster[hosts[reader]].request(FanoutCommand("fork", edge), self._timeout_s(case))
                except FanoutError as error:
                    complete[reader].set_exception(error)
                else:
                    complete[reader].set_result(response)

        with ThreadPoolExecutor(len(hosts)) as pool:
            for source, readers in doubling(case.targets).items():
                pool.submit(seed_readers, source, readers)
            return {hosts[reader]: complete[reader].result() for reader in range(1, len(hosts))}

    # -- after the forks ----------------------------------------------------------------------------

    def _check(self, case: FanoutCase, responses: Mapping[str, FanoutResponse]) -> None:
        """Check the weights_id that the transfer verified, and a hash that it does not use."""
        right = self._filled[case.seed_hosts[0]]
        for host, checked in self._cluster.request_all(case.target_hosts, FanoutCommand("check")).items():
            if (responses[host].weights_id, checked.sha256) != (self._weights_id, right):
                raise FanoutError(f"{case.name}: {host} has other bytes than the seed")

    def _timeout_s(self, case: FanoutCase) -> float:
        """Return the seconds after which a fork counts as hung."""
        return STEP_S + TIMEOUT_FACTOR * self._cluster.min_transfer_s * max(case.targets, case.min_time)


def _edge_model(model: str, reader: int) -> str:
    return f"{model}-to-{reader}"


def _since(now: Traffic, before: Traffic) -> Traffic:
    return Traffic(now.sent - before.sent, now.received - before.received)

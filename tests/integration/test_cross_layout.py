"""Forks across layouts between real processes: a planner, seeds of several layouts, and this process as the target.

With ``rfork[nixl]``, run this file alone; see `tests.integration.test_nixl`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.reshard.sharded_model import ShardedEngine, ShardedModel
from rfork.cli.app import app
from rfork.engines.relocation import tensors_of
from rfork.errors import NoSource, SlowSources
from rfork.planner_client.client import PlannerClient
from rfork.receiver.box_fork import BoxFork
from rfork.receiver.own_load import OwnLoad
from rfork.schema import Rank
from rfork.settings import InstanceSettings, TransportName
from rfork.source.box_images import MODEL_SUFFIX
from rfork.transport.nixl.library import library_state
from tests.conftest import StartRfork
from tests.integration.sharded_seed import COMMANDS, MODEL, SHAPE, UPDATED_VERSION, SeedProcess, weights_of
from tests.processes import RforkProcess

SLOW_BYTES_PER_S = 400_000
DEADLINE_S = 120.0
BOXES = f"{MODEL}{MODEL_SUFFIX}"
SHARED_HOST = "host"

StartShardedSeed = Callable[..., RforkProcess]
NIXL = library_state()
needs_nixl = pytest.mark.skipif(bool(NIXL.error), reason=f"{NIXL.error} ({NIXL.hint})")
OTHER_TRANSPORTS: Mapping[str, Sequence[pytest.MarkDecorator]] = {
    "shared_memory": (),
    "transfer_engine": (),
    "gloo": (),
    "nixl": (needs_nixl,),
}


def with_each_transport(*marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Run a test over each transport of host memory. `marks`: of all transports but http."""
    others = [pytest.param(name, marks=(*own, *marks)) for name, own in OTHER_TRANSPORTS.items()]
    return pytest.mark.parametrize("transport", ["http", *others])


@pytest.fixture
def planner(rfork_process: StartRfork) -> str:
    """URL of a planner that soon forgets killed instances."""
    environment = {"RFORK_PLANNER_HEARTBEAT_INTERVAL_S": "0.5", "RFORK_PLANNER_INSTANCE_TTL_S": "2"}
    ready = r'"event": ?"ready"'
    process = rfork_process("planner", "--port", "0", "--json", until=ready, environment=environment)
    url: str = json.loads(process.wait_for(rf"^.*{ready}.*$").group())["url"]
    return url


@pytest.fixture
def start_seed(planner: str) -> Iterator[StartShardedSeed]:
    """Starts seeds of one rank: ``start(rank, size, *options, version="v1", bytes_per_s=None, transport="http")``."""
    started: list[RforkProcess] = []

    def start(
        rank: int,
        size: int,
        *options: str,
        version: str = "v1",
        bytes_per_s: int | None = None,
        transport: str = "http",
    ) -> RforkProcess:
        environment = {
            **os.environ,
            "RFORK_PLANNER": planner,
            "RFORK_TRANSPORTS": transport,
            "RFORK_ALLOW_UNAUTHENTICATED_TCP": "1",
            "RFORK_NODE_NAME": SHARED_HOST if transport == "shared_memory" else f"source-{len(started)}",
        }
        if bytes_per_s is not None:
            environment["RFORK_MAX_EGRESS_BYTES_PER_S"] = str(bytes_per_s)
        arguments = (str(rank), str(size), version, *options)
        process = RforkProcess(arguments, environment, module="tests.integration.sharded_seed")
        started.append(process)
        process.wait_for("ready")
        return process

    yield start
    for process in started:
        process.stop()
        print(process.transcript())


def settings_of(planner: str, transport: TransportName = "http") -> InstanceSettings:
    """Return the target's settings. Over shared memory, it is on the host of the sources."""
    return InstanceSettings(
        planner=planner,
        transports=(transport,),
        allow_unauthenticated_tcp=True,
        node_name=SHARED_HOST if transport == "shared_memory" else "target",
        source_idle_timeout_s=2,
        no_source_timeout_s=1,
        min_source_bytes_per_s=1000,
        drain_timeout_s=0,
    )


class Target:
    """One rank that was loaded from other layouts."""

    def __init__(
        self, planner: str, rank: int, size: int, version: str | None = "v1", *, transport: TransportName = "http"
    ) -> None:
        deadline = time.monotonic() + DEADLINE_S
        self.engine = ShardedEngine(SHAPE, rank, size)
        settings = settings_of(planner, transport)
        fork = BoxFork(MODEL, Rank(tp=rank, tp_size=size), version, settings, deadline=deadline)
        self.weights = fork.fetch(self.engine.record(fork.checkpoint))
        self.module = self.weights.load(self.engine.load_from, tensors_of)

    @property
    def sources(self) -> set[str]:
        """Ranks that the boxes come from."""
        return {part.layout.sample.rank.key.split("-")[1] for part in self.weights.parts}

    @property
    def different_tensors(self) -> list[str]:
        """Tensors that differ from an own load."""
        own, expected = digests(self.module), digests(self.engine.load_from(lambda _: weights_of(self.weights.version)))
        return [name for name in expected if own[name] != expected[name]]

    @property
    def transports(self) -> set[str]:
        """Transports over which boxes were read."""
        return {share.transport for part in self.weights.parts for share in part.report.sources}


def digests(model: ShardedModel) -> dict[str, str]:
    """Return the SHA-256 of each tensor."""
    return {
        name: hashlib.sha256(tensor.detach().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in model.tensors.items()
    }


def run_command(seed: RforkProcess, command: Callable[[SeedProcess], None]) -> None:
    """Let a seed run a command, and wait until it has."""
    (number,) = [number for number, each in COMMANDS.items() if each is command]
    seed.signal(number)
    seed.wait_for(f"^{command.__name__}$")


def wait_for_progress(planner: str) -> None:
    """Wait until a target has received some chunks."""
    polls = threading.Event()
    with PlannerClient.of(settings_of(planner)) as client:
        while not any(fork.progress is not None for fork in client.forks(state="running")):
            polls.wait(0.05)


def wait_for_instances(planner: str, model: str, count: int) -> None:
    """Wait until the planner knows this number of instances of a model."""
    polls = threading.Event()
    with PlannerClient.of(settings_of(planner)) as client:
        while len(client.instances(model=model)) != count:
            polls.wait(0.05)


def target_of_disturbed_fork(
    planner: str, start_seed: StartShardedSeed, transport: TransportName, disturb: Callable[[RforkProcess], None]
) -> Target:
    """Return a target whose first source was disturbed in mid-fork, while others have the same bytes."""
    source = start_seed(0, 1, bytes_per_s=SLOW_BYTES_PER_S, transport=transport)
    start_seed(0, 2, transport=transport)
    start_seed(1, 2, transport=transport)
    with ThreadPoolExecutor(1) as pool:
        fetching = pool.submit(Target, planner, 0, 1, transport=transport)
        wait_for_progress(planner)
        disturb(source)
        return fetching.result()


def accusations(planner: str, model: str) -> list[str]:
    """Return the reasons for which instances of a model are accused."""
    with PlannerClient.of(settings_of(planner)) as client:
        return [info.accused for info in client.instances(model=model) if info.accused is not None]


def test_a_rank_of_two_from_a_complete_model(planner: str, start_seed: StartShardedSeed) -> None:
    """Each rank receives what it needs, and no more."""
    start_seed(0, 1)
    for rank in (0, 1):
        target = Target(planner, rank, 2)
        assert target.weights.needed_bytes == target.weights.received_bytes
        assert [] == target.different_tensors


def test_a_complete_model_from_two_ranks(planner: str, start_seed: StartShardedSeed) -> None:
    """A target without a version gets both halves of the served one."""
    start_seed(0, 2)
    start_seed(1, 2)
    target = Target(planner, 0, 1, version=None)
    assert "v1" == target.weights.version
    assert {"tp0of2", "tp1of2"} == target.sources
    assert [] == target.different_tensors


@with_each_transport()
def test_boxes_in_place(planner: str, start_seed: StartShardedSeed, transport: TransportName) -> None:
    """Sources without memory for copies serve boxes that are contiguous in their tensors."""
    start_seed(0, 2, "--without-copies", transport=transport)
    start_seed(1, 2, "--without-copies", transport=transport)
    target = Target(planner, 0, 1, transport=transport)
    assert {transport} == target.transports
    assert [] == target.different_tensors


@with_each_transport()
def test_copied_boxes(planner: str, start_seed: StartShardedSeed, transport: TransportName) -> None:
    """Columns of a source's tensors are read from host memory, and rows where they are, as one image."""
    start_seed(0, 1, transport=transport)
    target = Target(planner, 1, 2, transport=transport)
    assert {transport} == target.transports
    assert {True, False} == {box.is_contiguous for part in target.weights.parts for box in part.boxes}
    assert [] == target.different_tensors


def test_two_layouts_fill_one_target(planner: str, start_seed: StartShardedSeed) -> None:
    """Half of a model from a rank of two, the other half from two ranks of four."""
    start_seed(0, 2)
    start_seed(2, 4)
    start_seed(3, 4)
    target = Target(planner, 0, 1)
    assert {"tp0of2", "tp2of4", "tp3of4"} == target.sources
    assert target.weights.needed_bytes == target.weights.received_bytes
    assert [] == target.different_tensors


@with_each_transport(pytest.mark.slow)
def test_targets_of_one_layout_read_from_each_other(
    planner: str, start_seed: StartShardedSeed, transport: TransportName
) -> None:
    """The source sends each byte once to two targets that begin together."""
    start_seed(0, 1, bytes_per_s=SLOW_BYTES_PER_S, transport=transport)
    with ThreadPoolExecutor(2) as pool:
        targets = list(pool.map(lambda _: Target(planner, 0, 2, transport=transport), range(2)))
    shares = [share for target in targets for part in target.weights.parts for share in part.report.sources]
    instances = {part.report.instance_id for target in targets for part in target.weights.parts}
    assert instances & {share.source_id for share in shares}
    for target in targets:
        assert [] == target.different_tensors


def test_a_preview_of_other_layouts(planner: str, start_seed: StartShardedSeed) -> None:
    """`rfork plan --from-layouts` shows what each serving rank would send, and what cannot serve."""
    start_seed(0, 2)
    start_seed(1, 2)
    start_seed(0, 1, "--without-map")
    arguments = ["plan", MODEL, "--from-layouts", "--planner", planner, "--json"]
    result = CliRunner().invoke(app, arguments)
    assert 0 == result.exit_code, result.output
    preview = json.loads(result.stdout)
    assert preview["needed_bytes"] == sum(each["sent_bytes"] for each in preview["layouts"])
    assert 0 == preview["missing_bytes"]
    (refused,) = [each for each in preview["layouts"] if each["reason"]]
    assert Rank().key == refused["rank_key"]


def test_a_fleet_without_placement_maps(planner: str, start_seed: StartShardedSeed) -> None:
    """The reason is known at once: the same request is not repeated."""
    start_seed(0, 1, "--without-map")
    fork = BoxFork(MODEL, Rank(tp_size=2), "v1", settings_of(planner), deadline=time.monotonic() + DEADLINE_S)
    with pytest.raises(NoSource, match="has no placement map"):
        _ = fork.layouts
    with PlannerClient.of(settings_of(planner)) as client:
        assert 1 == len(client.forks(model=MODEL))


def test_a_fork_that_is_slower_than_the_own_load_ends(planner: str, start_seed: StartShardedSeed) -> None:
    """The engine's loader replaces it at once; the source is not blamed."""
    start_seed(0, 1, bytes_per_s=SLOW_BYTES_PER_S)
    deadline = time.monotonic() + DEADLINE_S
    fork = BoxFork(
        MODEL,
        Rank(tp_size=2),
        "v1",
        settings_of(planner),
        deadline=deadline,
        sample_load=lambda byte_count: OwnLoad("the engine's loader", byte_count / 0.5, 0.5),
    )
    engine = ShardedEngine(SHAPE, 0, 2)
    weights = fork.fetch(engine.record(fork.checkpoint))
    with pytest.raises(SlowSources, match=r"loader about 0\.5 s"):
        weights.load(engine.load_from, tensors_of)
    with PlannerClient.of(settings_of(planner)) as client:
        assert not any(info.accused or info.quarantined for info in client.instances())


def test_other_versions_are_never_mixed(planner: str, start_seed: StartShardedSeed) -> None:
    """A better layout of another version is no source."""
    start_seed(0, 1, version="v2")
    start_seed(0, 2)
    start_seed(1, 2)
    target = Target(planner, 0, 1)
    assert {"tp0of2", "tp1of2"} == target.sources
    assert [] == target.different_tensors


def test_wrong_bytes_of_a_source_are_found(planner: str, start_seed: StartShardedSeed) -> None:
    """A source whose memory changed unnoticed sends nothing; other layouts replace it."""
    run_command(start_seed(0, 1), SeedProcess.corrupt_weights)
    start_seed(0, 2)
    start_seed(1, 2)
    target = Target(planner, 0, 1)
    assert {"tp0of2", "tp1of2"} == target.sources
    assert [] == target.different_tensors
    (accusation,) = accusations(planner, MODEL)
    assert "the weights were changed without notice: chunk 0" in accusation


@with_each_transport()
@pytest.mark.parametrize("corrupt", [SeedProcess.corrupt_weights, SeedProcess.corrupt_copies])
def test_wrong_bytes_are_refused(
    planner: str,
    start_seed: StartShardedSeed,
    transport: TransportName,
    corrupt: Callable[[SeedProcess], None],
) -> None:
    """Boxes that change unnoticed after their digests are known are not used; other layouts replace their source."""
    source = start_seed(0, 1, transport=transport)
    first = Target(planner, 0, 2, transport=transport)
    first.weights.release(0.0)
    wait_for_instances(planner, BOXES, 1)
    run_command(source, corrupt)
    start_seed(0, 4, transport=transport)
    start_seed(1, 4, transport=transport)
    target = Target(planner, 0, 2, transport=transport)
    assert {"tp0of4", "tp1of4"} == target.sources
    assert [] == target.different_tensors
    (accusation,) = accusations(planner, BOXES)
    assert "SourceCorrupt" in accusation


@with_each_transport(pytest.mark.slow)
def test_weights_are_updated_during_the_fork(
    planner: str, start_seed: StartShardedSeed, transport: TransportName
) -> None:
    """The target gets the version that it began with from other layouts; a later one gets the new version."""
    target = target_of_disturbed_fork(
        planner, start_seed, transport, lambda source: run_command(source, SeedProcess.update)
    )
    assert {"tp0of2", "tp1of2"} == target.sources
    assert [] == target.different_tensors
    assert [] == accusations(planner, MODEL) + accusations(planner, BOXES)
    later = Target(planner, 0, 4, UPDATED_VERSION, transport=transport)
    assert [] == later.different_tensors


@with_each_transport()
def test_a_source_is_killed_during_the_fork(
    planner: str, start_seed: StartShardedSeed, transport: TransportName
) -> None:
    """Instances with other layouts replace it."""
    target = target_of_disturbed_fork(planner, start_seed, transport, lambda source: source.signal(signal.SIGKILL))
    assert {"tp0of2", "tp1of2"} == target.sources
    assert [] == target.different_tensors

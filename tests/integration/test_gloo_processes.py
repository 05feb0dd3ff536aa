"""gloo between real processes that die, stop and are fenced, and through the planner."""

from __future__ import annotations

import hashlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import Queue
from typing import cast

import pytest
import torch

from rfork.engines.transformers import loaded_model
from rfork.errors import SourceError, SourceTimeout, SourceUnavailable
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.image.memory import image_sha256
from rfork.peer.client import PeerClient
from rfork.settings import TlsSettings
from rfork.source.seed import Seed
from rfork.transport.collective.gloo import GlooBackend
from rfork.transport.collective.key_store import RemoteKeyStore
from rfork.transport.collective.messages import (
    GroupFormed,
    JoinGroup,
    RequestBlock,
    SendingBlock,
    StoreValues,
    receive_from_source,
    send_message,
)
from tests.conftest import StartRfork
from tests.integration.gloo_node import SIZES, SLOW, create_token, open_reader, start_seed
from tests.integration.gloo_processes import GlooProcess, running_threads, wait_until
from tests.integration.gloo_processes import node as node
from tests.integration.test_fork_end_to_end import READY, event, result
from tests.transport_contract import content, image_of, soon


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.slow  # logic: tests/integration/test_gloo.py
def test_a_target_that_dies_or_stops_during_a_send(
    node: Callable[..., GlooProcess], signal_number: signal.Signals
) -> None:
    """The source's threads are free again, and its next reader gets everything."""
    seed = start_seed(rate=SLOW, stall_s=2.0)
    target = node("read", seed.report().address, "fork-1")
    assert "connected" == target.next_event()
    assert "chunk" == target.next_event()
    assert wait_until(lambda: seed.served_bytes > 4 * MIB)  # in the middle of the next read
    target.signal(signal_number)
    assert wait_until(lambda: not running_threads().count("rfork-gloo"))
    image = image_of(SIZES)
    peer, _, reader = open_reader(seed.report().address, image, "fork-2")
    reader.read(0, image.layout.image_bytes, soon())
    reader.close()
    peer.close()
    expected_bytes = content(seed.image)
    seed.close()
    assert content(image) == expected_bytes
    target.close()
    assert wait_until(lambda: not running_threads()), running_threads()


@pytest.mark.slow  # logic: tests/integration/test_gloo.py
def test_a_stopped_target_continues(node: Callable[..., GlooProcess]) -> None:
    """Its group has ended by then; it joins another one and gets the rest."""
    seed = start_seed(rate=SLOW, stall_s=1.0)
    target = node("read", seed.report().address, "fork-1")
    assert "connected" == target.next_event()
    assert "chunk" == target.next_event()
    assert wait_until(lambda: seed.served_bytes > 4 * MIB)  # in the middle of the next read
    target.signal(signal.SIGSTOP)
    assert wait_until(lambda: not running_threads().count("rfork-gloo"))
    target.signal(signal.SIGCONT)
    events = iter(target.next_event, "")
    last = next(word for word in events if word != "chunk")
    expected = hashlib.sha256(content(seed.image)).hexdigest()
    seed.close()
    assert expected == last


@pytest.mark.parametrize(
    ("signal_number", "error_type"),
    [(signal.SIGKILL, SourceUnavailable), (signal.SIGSTOP, SourceTimeout)],
    ids=["killed", "stopped"],
)
def test_a_source_that_dies_or_stops_during_a_send(
    node: Callable[..., GlooProcess], signal_number: signal.Signals, error_type: type[Exception]
) -> None:
    """The read reports it by its deadline, and nothing of the reader is left."""
    source = node("seed", str(SLOW))
    image = image_of(SIZES)
    peer, _, reader = open_reader(source.next_event(), image, "fork-1", stall_s=2.0)
    reader.read(*image.layout.chunks[0], soon())
    source.signal(signal_number)
    deadline = time.monotonic() + 4.0
    with pytest.raises(error_type):
        reader.read(0, image.layout.image_bytes, deadline)
    late = time.monotonic() - deadline
    reader.close()
    peer.close()
    assert wait_until(lambda: not running_threads()), running_threads()
    assert late < 10.0


@contextmanager
def stalled_reader(seed: Seed) -> Iterator[None]:
    """Join a group and request a block that the source starts to send; never receive it."""
    token, formed = create_token(seed.image, "fork-1"), Queue[GroupFormed]()
    sending, backend = threading.Event(), GlooBackend("127.0.0.1")
    peer = PeerClient(seed.report().address, lambda: token, TlsSettings())
    channel_id, _ = peer.open(seed.image.layout.layout_id, ("gloo",), soon())
    line = peer.open_control_stream(channel_id)
    keys = RemoteKeyStore(line, 1)

    def receive_messages() -> None:
        with suppress(SourceError):
            while True:
                match receive_from_source(line, soon()):
                    case GroupFormed() as message:
                        formed.put(message)
                    case StoreValues() as message:
                        keys.on_reply(message)
                    case SendingBlock():
                        sending.set()

    receiving_thread = threading.Thread(target=receive_messages)
    receiving_thread.start()
    send_message(line, JoinGroup())
    rank = formed.get(timeout=30)
    group = backend.form(keys, rank.rank, rank.size, "", torch.device("cpu"), soon())
    send_message(line, RequestBlock(number=1, begin=0, end=backend.block_bytes, token=token))
    assert sending.wait(30)
    yield
    line.close()
    peer.close()
    receiving_thread.join()
    group.close()


def test_a_fence_cuts_running_sends() -> None:
    """A reader that receives nothing, for up to ten minutes, does not delay the update."""
    seed = start_seed(stall_s=600)
    with stalled_reader(seed):
        fencing = threading.Thread(target=seed.fence, daemon=True)
        fencing.start()
        fencing.join(30)
        fenced = not fencing.is_alive()
    seed.close()
    assert fenced
    assert wait_until(lambda: not running_threads()), running_threads()


@pytest.mark.slow
def test_a_fork_through_the_planner(rfork_process: StartRfork, tiny_model: Path) -> None:
    """Planner, seed and pull with gloo as the only transport: the right bytes, by gloo."""
    planner = rfork_process("planner", "--port", "0", "--json", until=READY)
    url = event(planner)["url"]
    environment = {"RFORK_TRANSPORTS": "gloo"}
    shared = (str(tiny_model), "--name", "tiny", "--planner", url, "--json")
    rfork_process("seed", *shared, until=READY, environment=environment)
    pull = rfork_process("pull", *shared, "--sha256", environment=environment)
    report = result(pull)
    expected = image_sha256(capture(loaded_model(tiny_model)))
    sources = cast(list[dict[str, str]], report["sources"])
    assert "forked" == report["outcome"]
    assert expected == report["sha256"]
    assert ["gloo"] == [source["transport"] for source in sources]

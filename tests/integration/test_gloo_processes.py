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
from rfork.errors import SourceError, SourceGone, SourceStalled
from rfork.image.capture import capture
from rfork.image.chunks import MIB
from rfork.image.proof import image_sha256
from rfork.peer.client import PeerClient
from rfork.seed.seed import Seed
from rfork.settings import TlsSettings
from rfork.transport.collective.far_keys import FarKeys
from rfork.transport.collective.gloo import GlooBackend
from rfork.transport.collective.messages import Formed, Have, Join, Sending, Want, hear_source
from rfork.transport.collective.messages import say as tell
from tests.conftest import StartRfork
from tests.integration.gloo_node import SIZES, SLOW, a_reader, a_seed, a_token
from tests.integration.gloo_processes import Node, ours, until
from tests.integration.gloo_processes import node as node
from tests.integration.test_fork_flow import READY, event, result
from tests.transport_contract import content, image_of, soon


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_target_that_dies_or_stops_in_mid_send(node: Callable[..., Node], how: signal.Signals) -> None:
    """The source's threads are free again, and its next reader gets everything."""
    seed = a_seed(rate=SLOW, stall_s=2.0)
    target = node("read", seed.report().address, "fork-1")
    assert ["connected", "chunk"] == [target.heard(), target.heard()]
    assert until(lambda: seed.given_bytes > 4 * MIB)  # in the midst of the next read
    target.signal(how)
    assert until(lambda: not ours().count("rfork-gloo"))
    image = image_of(SIZES)
    peer, _, reader = a_reader(seed.report().address, image, "fork-2")
    reader.read(0, image.layout.image_bytes, soon())
    reader.close()
    peer.close()
    whole = content(seed.image)
    seed.close()
    assert content(image) == whole
    target.close()
    assert until(lambda: not ours()), ours()


def test_a_target_that_was_stopped_goes_on(node: Callable[..., Node]) -> None:
    """Its group is over by then; it joins another one and gets the rest."""
    seed = a_seed(rate=SLOW, stall_s=1.0)
    target = node("read", seed.report().address, "fork-1")
    assert ["connected", "chunk"] == [target.heard(), target.heard()]
    assert until(lambda: seed.given_bytes > 4 * MIB)  # in the midst of the next read
    target.signal(signal.SIGSTOP)
    assert until(lambda: not ours().count("rfork-gloo"))
    target.signal(signal.SIGCONT)
    heard = iter(target.heard, "")
    last = next(word for word in heard if word != "chunk")
    expected = hashlib.sha256(content(seed.image)).hexdigest()
    seed.close()
    assert expected == last


@pytest.mark.parametrize(
    ("how", "kind"),
    [(signal.SIGKILL, SourceGone), (signal.SIGSTOP, SourceStalled)],
    ids=["killed", "stopped"],
)
def test_a_source_that_dies_or_stops_in_mid_send(
    node: Callable[..., Node], how: signal.Signals, kind: type[Exception]
) -> None:
    """The read says so, by its deadline, and nothing of the reader is left."""
    source = node("seed", str(SLOW))
    image = image_of(SIZES)
    peer, _, reader = a_reader(source.heard(), image, "fork-1", stall_s=2.0)
    reader.read(*image.layout.chunks[0], soon())
    source.signal(how)
    deadline = time.monotonic() + 4.0
    with pytest.raises(kind):
        reader.read(0, image.layout.image_bytes, deadline)
    late = time.monotonic() - deadline
    reader.close()
    peer.close()
    assert until(lambda: not ours()), ours()
    assert late < 10.0


@contextmanager
def a_reader_that_takes_nothing(seed: Seed) -> Iterator[None]:
    """Joins a group and wants a block, which the source is about to send inside; it never takes it."""
    shown, changed, formed = a_token(seed.image, "fork-1"), threading.Condition(), Queue[Formed]()
    sending, backend = threading.Event(), GlooBackend("127.0.0.1")
    peer = PeerClient(seed.report().address, lambda: shown, TlsSettings())
    channel_id, _ = peer.open(seed.image.layout.layout_id, ("gloo",), soon())
    line = peer.talk(channel_id)
    keys = FarKeys(line, 1, changed)

    def hear() -> None:
        with suppress(SourceError):
            while True:
                match hear_source(line, soon()):
                    case Formed() as message:
                        formed.put(message)
                    case Have() as message:
                        with changed:
                            keys.heard(message)
                            changed.notify_all()
                    case Sending():
                        sending.set()

    hearing = threading.Thread(target=hear)
    hearing.start()
    tell(line, Join())
    rank = formed.get(timeout=30)
    group = backend.form(keys, rank.rank, rank.size, "", torch.device("cpu"), soon())
    tell(line, Want(number=1, begin=0, end=backend.block_bytes, token=shown))
    assert sending.wait(30)
    yield
    line.close()
    peer.close()
    hearing.join()
    group.close()


def test_a_fence_cuts_what_is_under_way() -> None:
    """Though the reader takes nothing, and might for ten minutes: the update does not wait for it."""
    seed = a_seed(stall_s=600)
    with a_reader_that_takes_nothing(seed):
        fencing = threading.Thread(target=seed.fence, daemon=True)
        fencing.start()
        fencing.join(30)
        fenced = not fencing.is_alive()
    seed.close()
    assert fenced
    assert until(lambda: not ours()), ours()


@pytest.mark.slow
def test_a_fork_through_the_planner(rfork_process: StartRfork, tiny_model: Path) -> None:
    """Planner, seed and pull that are told gloo and nothing else: the right bytes, by gloo."""
    planner = rfork_process("planner", "--port", "0", "--json", until=READY)
    url = event(planner)["url"]
    over = {"RFORK_TRANSPORTS": "gloo"}
    shared = (str(tiny_model), "--name", "tiny", "--planner", url, "--json")
    rfork_process("seed", *shared, until=READY, environment=over)
    pull = rfork_process("pull", *shared, "--sha256", environment=over)
    report = result(pull)
    expected = image_sha256(capture(loaded_model(tiny_model)))
    sources = cast(list[dict[str, str]], report["sources"])
    assert ("forked", expected, ["gloo"]) == (
        report["outcome"],
        report["sha256"],
        [source["transport"] for source in sources],
    )

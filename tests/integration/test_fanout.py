"""The fan-out benchmark end to end, with an image so small that only the bytes are checked."""

from __future__ import annotations

import pytest

from benchmarks import netlab
from benchmarks.fanout.cases import FanoutCase
from benchmarks.fanout.cluster import FanoutCluster, FanoutError
from benchmarks.fanout.messages import FanoutCommand
from benchmarks.fanout.runner import FanoutRunner

pytestmark = [
    pytest.mark.slow,  # four processes that import torch
    pytest.mark.skipif(bool(netlab.unavailable_reason()), reason=netlab.unavailable_reason() or "available"),
]

SIZE = 8 << 20
CASES = [
    FanoutCase("limit", 1),
    FanoutCase("rfork", 2),
    FanoutCase("star", 2),
    FanoutCase("doubling", 2),
    FanoutCase("rfork", 2, late=1, slow=1),
]


def test_every_mode_fills_every_target() -> None:
    """The seed sends the image as often as the mode states, and the runner compares all bytes."""
    sent: dict[str, int] = {}
    with FanoutCluster(["seed0", "t00", "t01"], size=SIZE, rate=200e6, delay_s=0.0) as cluster:
        runner = FanoutRunner(cluster)
        for case in CASES:
            run = runner.run(case)
            sent[case.name] = round(run.traffic["seed0"].sent / SIZE)
        with pytest.raises(FanoutError, match="no socket is listening"):
            cluster["t00"].request(FanoutCommand("send"))
    expected = {"limit: TCP": 1, "rfork 2": 1, "star 2": 2, "doubling 2": 2, "rfork 2, 1 late, 1 slow": 1}
    assert expected == sent

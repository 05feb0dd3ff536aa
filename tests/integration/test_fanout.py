"""The fan-out benchmark from end to end, with an image so small that only the bytes are looked at."""

from __future__ import annotations

import pytest

from benchmarks import netlab
from benchmarks.fanout_case import Case
from benchmarks.fanout_crew import Crew, FanoutError
from benchmarks.fanout_run import Runner
from benchmarks.fanout_wire import Command

pytestmark = [
    pytest.mark.slow,  # four processes that import torch
    pytest.mark.skipif(bool(netlab.why_not()), reason=netlab.why_not() or "labs can be made"),
]

SIZE = 8 << 20
CASES = [
    Case("limit", 1),
    Case("rfork", 2),
    Case("star", 2),
    Case("doubling", 2),
    Case("rfork", 2, late=1, slow=1),
]


def test_every_mode_fills_every_target() -> None:
    """The seed sends the image as often as the mode says, and the runner compares all bytes itself."""
    sent: dict[str, int] = {}
    with Crew(["seed0", "t00", "t01"], size=SIZE, rate=200e6, delay_s=0.0) as crew:
        runner = Runner(crew)
        for case in CASES:
            run = runner.run(case)
            sent[case.name] = round(run.traffic["seed0"].sent / SIZE)
        with pytest.raises(FanoutError, match="nobody listens"):
            crew["t00"].ask(Command("give"))
    expected = {"limit: TCP": 1, "rfork 2": 1, "star 2": 2, "doubling 2": 2, "rfork 2, 1 late, 1 slow": 1}
    assert expected == sent

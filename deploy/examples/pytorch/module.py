"""A plain nn.Module, given by one process and forked by another.

    rfork planner &
    python module.py seed --planner http://127.0.0.1:8700 &
    python module.py fork --planner http://127.0.0.1:8700

The fork prints what it got, from whom and how fast, and a checksum that is the seed's. It gives the weights
onwards as long as it runs: end the seed, start a third, and that forks from the second. With `--once` it ends
instead. Needs: pip install rfork.
"""

from __future__ import annotations

import argparse
import signal
import sys

import torch
from torch import nn

import rfork

NAME = "mlp"
"""Seeds and forks meet under it: a name for these very weights, with the revision where there are several."""


def build() -> nn.Module:
    """The module in its final layout: both sides build the same, and only the seed's values count."""
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))


def checksum(module: nn.Module) -> float:
    """What it computes from a fixed input."""
    with torch.inference_mode():
        return float(module(torch.linspace(-1, 1, 1024)).double().sum())


def seed_module(planner: str | None) -> None:
    """The seed: somebody has to have the weights first. Here they are random, in earnest they are loaded."""
    module = build()
    with rfork.seed(module, model=NAME, planner=planner) as seed:
        seed.wait_registered(10)  # the planner knows it: who asks from now on gets it as a source
        print(f"seeding, checksum {checksum(module):.9f}", flush=True)
        while True:  # what serves tells how long it takes, so that forks do not slow it down
            with seed.measure_step():
                checksum(module)
            if signal.sigtimedwait([signal.SIGTERM, signal.SIGINT], 0.05) is not None:
                return


def fork_module(planner: str | None, *, once: bool) -> None:
    """The target: any values in, the seed's out. From here on it gives them onwards."""
    module = build()
    report = rfork.fork(module, model=NAME, planner=planner)
    print(report.line(), flush=True)
    print(f"forked, checksum {checksum(module):.9f}", flush=True)
    if not once:
        signal.sigwait([signal.SIGTERM, signal.SIGINT])
    if report.seed is not None:
        report.seed.close(drain_s=report.seed.settings.drain_timeout_s if not once else 0)


def main() -> None:
    """Be one of the two."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("role", choices=["seed", "fork"])
    parser.add_argument("--planner", help="URL of the planner [RFORK_PLANNER]")
    parser.add_argument("--once", action="store_true", help="end after the fork")
    options = parser.parse_args()
    # Waited for above, on this thread: blocked here, before there are others.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])
    try:
        if options.role == "seed":
            seed_module(options.planner)
        else:
            fork_module(options.planner, once=options.once)
    except rfork.RforkError as error:
        sys.exit(f"{error.kind}: {error} {error.hint}".rstrip())


if __name__ == "__main__":
    main()

"""A plain nn.Module, seeded by one process and forked by another.

    rfork planner &
    python module.py seed --planner http://127.0.0.1:8700 &
    python module.py fork --planner http://127.0.0.1:8700

The fork prints the size, the source, the speed, and a checksum equal to the seed's. It is a seed itself while
it runs: stop the first seed, start a third process, and that forks from the second. With `--once` it exits
instead. Needs: pip install 'rfork[planner]'.
"""

from __future__ import annotations

import argparse
import signal
import sys

import torch
from torch import nn

import rfork

NAME = "mlp"
"""Seeds and forks meet under this name, so it must be unique for these weights, including their revision."""


def build() -> nn.Module:
    """Build the module in its final layout. Both sides build the same, and only the seed's values count."""
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))


def checksum(module: nn.Module) -> float:
    """Return a value computed from a fixed input."""
    with torch.inference_mode():
        return float(module(torch.linspace(-1, 1, 1024)).double().sum())


def seed_module(planner: str | None) -> None:
    """Be the first seed. Here the weights are random; a real program loads them."""
    module = build()
    with rfork.seed(module, model=NAME, planner=planner) as seed:
        seed.wait_registered(10)  # registered with the planner: new forks get it as a source
        print(f"seeding, checksum {checksum(module):.9f}", flush=True)
        while True:  # report each step's duration, so that forks do not slow it down
            with seed.measure_step():
                checksum(module)
            if signal.sigtimedwait([signal.SIGTERM, signal.SIGINT], 0.05) is not None:
                return


def fork_module(planner: str | None, *, once: bool) -> None:
    """Be a target: replace the initial values by the seed's, then serve as a source."""
    module = build()
    report = rfork.fork(module, model=NAME, planner=planner)
    print(report.line(), flush=True)
    print(f"forked, checksum {checksum(module):.9f}", flush=True)
    if not once:
        signal.sigwait([signal.SIGTERM, signal.SIGINT])
    if report.seed is not None:
        report.seed.close(drain_s=report.seed.settings.drain_timeout_s if not once else 0)


def main() -> None:
    """Run as a seed or a fork."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("role", choices=["seed", "fork"])
    parser.add_argument("--planner", help="URL of the planner [RFORK_PLANNER]")
    parser.add_argument("--once", action="store_true", help="exit after the fork")
    options = parser.parse_args()
    # Signals are awaited above, on this thread: block them before other threads start.
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

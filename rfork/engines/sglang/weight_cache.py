"""SGLang's weight cache daemon: its ranks fork their weights, and serve them to other hosts.

A daemon's process loads no plug-ins, so it is started with `run_daemon`: by ``sglang serve`` with
``--weight-cache-mode daemon``, and by this module, which replaces ``python -m sglang.srt.weight_cache.daemon`` and has
the same arguments::

    python -m rfork.engines.sglang.weight_cache --model-path MODEL --load-format rfork
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Final

DAEMON: Final = "sglang.srt.weight_cache.daemon"
"""SGLang's module of the daemon."""
RUN: Final = "run_weight_cache_daemon"
"""Function of that module that a daemon's process runs."""
ORIGINAL: Final = "rfork_run"
"""Attribute of that module that keeps the function once it is replaced."""
DRAIN_S: Final = 4.0
"""Maximum seconds for readers: SGLang kills a daemon five seconds after SIGTERM."""


def hook_launchers() -> None:
    """Let this process start SGLang's daemons with `run_daemon`, if this SGLang has daemons. Idempotent."""
    try:
        module: Any = import_module(DAEMON)
    except ImportError:
        return
    if hasattr(module, RUN) and not hasattr(module, ORIGINAL):
        setattr(module, ORIGINAL, getattr(module, RUN))
        setattr(module, RUN, run_daemon)


def run_daemon(*args: Any, **kwargs: Any) -> None:
    """Run a daemon of SGLang in its own process, with rfork's plug-in."""
    from sglang.srt.plugins import load_plugins

    from rfork.engines import weight_cache

    weight_cache.become_holder("sglang")
    load_plugins()
    module = import_module(DAEMON)
    run: Callable[..., None] = getattr(module, ORIGINAL, None) or getattr(module, RUN)
    with weight_cache.closing_seeds(DRAIN_S):
        run(*args, **kwargs)


def main(arguments: Sequence[str]) -> None:
    """Start the daemons of this host, or the one of ``--tp-rank``, until they end."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    daemon: Any = import_module(DAEMON)
    parser = argparse.ArgumentParser(add_help=False)
    daemon.WeightCacheDaemonArgs.add_cli_args(parser)
    parsed, server_arguments = parser.parse_known_args(list(arguments))
    chosen = daemon.WeightCacheDaemonArgs.from_cli_args(parsed)
    server_args = prepare_server_args(server_arguments)
    hook_launchers()
    ranks = [rank for rank in (chosen.gpu_id, chosen.tp_rank) if rank is not None]
    if not ranks:
        daemon.launch_weight_cache_daemons(
            server_args, dist_init_method=chosen.dist_init_method, timeout=chosen.timeout, force=chosen.force
        )
        return
    gpu_id = ranks[0]
    daemon.cleanup_stale_daemon_files(daemon.current_platform.get_device_uuid(gpu_id), force=chosen.force)
    run_daemon(
        server_args,
        gpu_id=gpu_id,
        tp_rank=ranks[-1],
        pp_rank=chosen.pp_rank,
        dist_init_method=chosen.dist_init_method,
    )


if __name__ == "__main__":
    main(sys.argv[1:])

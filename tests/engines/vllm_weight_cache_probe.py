"""vLLM's weight cache daemon with rfork, in host memory: what it calls of a GPU is replaced.

Arguments: model folder, folder of the socket. Run by `test_weight_cache.py` with vLLM's Python.
"""

from __future__ import annotations

import sys
from queue import SimpleQueue
from types import SimpleNamespace

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.weight_cache import daemon
from vllm.utils.network_utils import get_distributed_init_method, get_open_port

from rfork.engines.vllm.weight_cache import run_daemon


class PrintingQueue(SimpleQueue[object]):
    """Prints the role and rank of a daemon that is ready."""

    def put(self, item: object, *_: object) -> None:
        print("READY", item, flush=True)


def main() -> None:
    """Run one daemon until it is stopped."""
    model, sockets = sys.argv[1:]
    nothing = dict.fromkeys(("memory_allocated", "memory_reserved", "current_device_index"), lambda *_: 0)
    changes = dict.fromkeys(("set_device_index", "empty_cache"), lambda *_: None)
    vars(torch)["accelerator"] = SimpleNamespace(**{**vars(torch.accelerator), **nothing, **changes})
    daemon.get_current_device_uuid = lambda: "host-memory"
    config = EngineArgs(
        model=model, load_format="rfork", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=1 << 20
    ).create_engine_config()
    address = get_distributed_init_method("127.0.0.1", get_open_port())
    run_daemon(0, 0, config, address, sockets, PrintingQueue())


if __name__ == "__main__":
    main()

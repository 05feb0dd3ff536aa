"""A small model server: forks its module, becomes a seed, and serves HTTP.

``python tests/kube/model_server.py PORT MEBIBYTES [SECONDS [FOLDER]]`` in an injected container; everything
else comes from RFORK_*. Its own loader creates weights with a fixed random seed and takes SECONDS; with a
FOLDER it loads the checkpoint in there instead (see `write_checkpoint`). /health returns 200 once the weights
are loaded; /digest returns their SHA-256 and how they were loaded; /metrics imitates vLLM's.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import rfork
from rfork.settings import InstanceSettings, load
from rfork.shutdown import shutdown_on_signal, wait_for_shutdown

TENSORS = 8


def new_module(mebibytes: int) -> nn.Module:
    """Return a module of this size with arbitrary weights."""
    return nn.ParameterList(
        nn.Parameter(torch.empty((mebibytes << 18) // TENSORS, dtype=torch.float32), requires_grad=False)
        for _ in range(TENSORS)
    )


def fill(module: nn.Module, seed: int) -> None:
    """Fill the module with the weights of this random seed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.uniform_(generator=generator)


def write_checkpoint(folder: Path, mebibytes: int, seed: int) -> str:
    """Write a checkpoint that a server of this size can load, and return its digest."""
    module = new_module(mebibytes)
    fill(module, seed)
    folder.mkdir()
    save_file(module.state_dict(), folder / "model.safetensors")
    return digest_of(module)


def digest_of(module: nn.Module) -> str:
    """Return the SHA-256 of all weights."""
    return hashlib.sha256(b"".join(each.numpy().tobytes() for each in module.parameters())).hexdigest()


def main() -> None:
    """Serve until SIGTERM."""
    port, mebibytes = int(sys.argv[1]), int(sys.argv[2])
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    settings = load(InstanceSettings)
    folder = sys.argv[4] if len(sys.argv) > 4 else None
    status = {"digest": "", "line": ""}

    class DigestHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(status) if self.path == "/digest" else "vllm:num_requests_waiting 0\n"
            self.send_response(200 if status["digest"] else 503)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    ended = shutdown_on_signal()
    server = ThreadingHTTPServer((settings.bind, port), DigestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    module = new_module(mebibytes)

    def make(module: nn.Module) -> None:
        time.sleep(seconds)
        fill(module, 7)

    report = rfork.fork(
        module,
        model=settings.model or "tests",
        checkpoint=folder,
        loader=make if folder is None else None,
    )
    print(report.line(), flush=True)
    status.update(digest=digest_of(module), line=report.line())
    wait_for_shutdown(ended)
    if report.seed is not None:
        report.seed.close(settings.drain_timeout_s)
    server.shutdown()


if __name__ == "__main__":
    main()

"""A server as users have them, small: a module that forks itself, gives itself on, and answers over HTTP.

``python tests/kube/server.py PORT MEBIBYTES [SECONDS]`` in a container that the webhook changed: all else
comes from RFORK_*. Its own loader makes weights of a fixed seed, and takes SECONDS. /health answers 200
once the weights are there; /digest says their SHA-256 and how they came; /metrics looks like vLLM's.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
from torch import nn

import rfork
from rfork.settings import Settings, load
from rfork.signals import stopped_by_signal, wait_until

TENSORS = 8


def main() -> None:
    """Serve until SIGTERM."""
    port, mebibytes = int(sys.argv[1]), int(sys.argv[2])
    seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
    settings = load(Settings)
    told = {"digest": "", "line": ""}

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps(told) if self.path == "/digest" else "vllm:num_requests_waiting 0\n"
            self.send_response(200 if told["digest"] else 503)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    ended = stopped_by_signal()
    server = ThreadingHTTPServer((settings.bind, port), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    module = nn.ParameterList(
        nn.Parameter(torch.empty((mebibytes << 18) // TENSORS, dtype=torch.float32), requires_grad=False)
        for _ in range(TENSORS)
    )

    def make(module: nn.Module) -> None:
        time.sleep(seconds)
        generator = torch.Generator().manual_seed(7)
        for parameter in module.parameters():
            parameter.data.uniform_(generator=generator)

    report = rfork.fork(module, model=settings.model or "tests", loader=make)
    digest = hashlib.sha256(b"".join(parameter.numpy().tobytes() for parameter in module.parameters()))
    print(report.line(), flush=True)
    told.update(digest=digest.hexdigest(), line=report.line())
    wait_until(ended)
    if report.seed is not None:
        report.seed.close(settings.drain_s)
    server.shutdown()


if __name__ == "__main__":
    main()

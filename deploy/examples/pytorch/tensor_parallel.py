r"""A tensor-parallel PyTorch model in two processes, forked rank by rank.

    rfork planner &
    python tensor_parallel.py --make model.safetensors
    torchrun --standalone --nproc-per-node 2 tensor_parallel.py --planner http://127.0.0.1:8700 \
        --checkpoint model.safetensors &
    torchrun --standalone --nproc-per-node 2 tensor_parallel.py --planner http://127.0.0.1:8700

The ranks of the first replica find no seed, and each reads its part of the checkpoint. The second replica has
no checkpoint: each of its ranks forks from the rank with the same part. Parts of equal shape are
distinguished by `rfork.Rank`, so a rank never gets another rank's part. Each process prints its result as a
line of JSON, and is a seed until SIGTERM.

A fork needs no collective: ranks may fork at different times and from different replicas. The fallback of a
rank must not need one either, because other ranks may not fall back.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import time

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rfork

VOCABULARY, WIDTH, HEADS, LAYERS = 256, 128, 4, 3
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6)
TOKENS = 8
BY_COLUMNS = ("query", "key", "value", "up")
BY_ROWS = ("out", "down")


class ParallelLayer(nn.Module):
    """Attention and MLP. Each rank has its share of the heads and of the inner width."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.between = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x`: batch, position, width."""
        inner = self.before(x)
        query, key, value = (
            project(inner).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        heads = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(heads.transpose(1, 2).flatten(2))
        wider: torch.Tensor = nn.functional.gelu(self.up(self.between(x)))
        return x.add(self.down(wider))


class ParallelModel(nn.Module):
    """A small decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.Sequential(*(ParallelLayer() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of the token that follows each position."""
        logits: torch.Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits


def sharded(ranks: int) -> ParallelModel:
    """Build this rank's part of the model with uninitialized memory."""
    with torch.device("meta"):
        model = ParallelModel()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))
    columns = {name: ColwiseParallel() for name in BY_COLUMNS}
    rows = {name: RowwiseParallel() for name in BY_ROWS}
    for layer in model.layers:
        parallelize_module(layer, mesh, {**columns, **rows})
    return model.to_empty(device="cpu").eval()


def read_part(model: nn.Module, checkpoint: str, rank: int, ranks: int) -> None:
    """Fill this rank's part from a file of the complete model, without reading the other parts."""
    with safe_open(checkpoint, framework="pt") as weights, torch.no_grad():
        for name, parameter in model.named_parameters():
            checkpoint_slice, part = weights.get_slice(name), parameter.detach()
            where = [slice(None)] * parameter.dim()
            if isinstance(part, DTensor):
                (placement,) = part.placements
                part = part.to_local()
                if isinstance(placement, Shard):
                    size = parameter.shape[placement.dim] // ranks
                    where[placement.dim] = slice(rank * size, (rank + 1) * size)
            part.copy_(checkpoint_slice[tuple(where)])


@torch.inference_mode()
def generate(model: nn.Module) -> tuple[list[int], str]:
    """Return greedy tokens for a prompt, and a hash of the logits."""
    tokens = torch.tensor([PROMPT])
    digest = hashlib.sha256()
    for _ in range(TOKENS):
        logits = model(tokens)[:, -1]
        digest.update(logits.numpy().tobytes())
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
    return tokens[0, len(PROMPT) :].tolist(), digest.hexdigest()


def serve(options: argparse.Namespace) -> None:
    """Fork or load this rank's part, generate, and seed it until a signal arrives."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    checkpoint: str | None = options.checkpoint
    model = sharded(ranks)
    report = rfork.fork(
        model,
        model=options.name,
        planner=options.planner,
        rank=rfork.Rank(tp=rank, tp_size=ranks),
        loader=(lambda part: read_part(part, checkpoint, rank, ranks)) if checkpoint else None,
    )
    try:
        tokens, logits = generate(model)
        result = {"tokens": tokens, "logits": logits, "weights_id": report.weights_id}
        print(json.dumps({"event": "ready", "rank": rank, "weights": report.line(), **result}), flush=True)
        while True:
            time.sleep(1)  # not longer: a signal during the wait is handled at its end
    finally:
        if report.seed is not None:
            report.seed.close(report.seed.settings.drain_timeout_s)
        dist.destroy_process_group()


def main() -> None:
    """Run one rank, or write a checkpoint."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--make", metavar="FILE", help="write a random model, then exit")
    parser.add_argument("--planner", help="URL of the planner [RFORK_PLANNER]")
    parser.add_argument("--checkpoint", metavar="FILE", help="file to read if no seed exists")
    parser.add_argument("--name", default="tensor-parallel", help="seeds and forks meet under it")
    options = parser.parse_args()
    if options.make is not None:
        torch.manual_seed(0)
        save_file(ParallelModel().state_dict(), options.make)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    serve(options)


if __name__ == "__main__":
    main()

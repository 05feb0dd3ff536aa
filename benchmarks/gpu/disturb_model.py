"""Model of `benchmarks.gpu.disturb`: a decoder that generates a token per step, replayed as one CUDA graph.

Plain torch, so that it runs in any PyTorch image: a Llama's blocks, weights and arithmetic, bfloat16, with a
static key-value cache that is not part of the weights. The weights are random: the output is meaningless,
only the cost counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

EPSILON = 1e-6
WARM_STEPS = 3


@dataclass(frozen=True, slots=True)
class DecoderSizes:
    """Dimensions of the decoder."""

    hidden: int
    intermediate: int
    key_value: int
    heads: int
    layers: int
    vocabulary: int
    context: int


LARGE = DecoderSizes(2048, 8192, 512, 16, 16, 32_000, 1024)
"""2.2 GB of weights."""
TINY = DecoderSizes(256, 1024, 128, 4, 4, 2048, 64)
"""10 MB, for a CPU."""


class DecoderBlock(nn.Module):
    """Attention and a gated feed-forward layer."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.groups = sizes.key_value * sizes.heads // sizes.hidden
        hidden, key_value = sizes.hidden, sizes.key_value
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.qkv = nn.Linear(hidden, hidden + 2 * key_value, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.feed_norm = nn.Parameter(torch.ones(hidden))
        self.gate_up = nn.Linear(hidden, 2 * sizes.intermediate, bias=False)
        self.down = nn.Linear(sizes.intermediate, hidden, bias=False)

    def forward(
        self, hidden_states: torch.Tensor, cache: torch.Tensor, position: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Process one token: hidden [1, hidden], cache [2, groups, context, width], position [1], mask [1,
        context].
        """
        hidden = hidden_states.shape[-1]
        width = hidden // self.heads
        normed = functional.rms_norm(hidden_states, (hidden,), self.input_norm, EPSILON)
        query, key, value = self.qkv(normed).split([hidden, self.groups * width, self.groups * width], -1)
        cache[0].index_copy_(1, position, key.view(self.groups, 1, width))
        cache[1].index_copy_(1, position, value.view(self.groups, 1, width))
        repeat = self.heads // self.groups
        attended = functional.scaled_dot_product_attention(
            query.view(1, self.heads, 1, width),
            cache[0].repeat_interleave(repeat, 0).unsqueeze(0),
            cache[1].repeat_interleave(repeat, 0).unsqueeze(0),
            attn_mask=mask,
        )
        hidden_states = hidden_states + self.out(attended.reshape(1, hidden))
        normed = functional.rms_norm(hidden_states, (hidden,), self.feed_norm, EPSILON)
        gate, up = self.gate_up(normed).chunk(2, -1)
        return hidden_states + torch.as_tensor(self.down(functional.silu(gate) * up))


class Decoder(nn.Module):
    """The weights; equal in every process and on every device of one type."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = nn.ModuleList(DecoderBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.Parameter(torch.ones(sizes.hidden))
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)


def decoder_on(device: torch.device, sizes: DecoderSizes) -> Decoder:
    """Build a bfloat16 decoder on a device, ready to serve."""
    with torch.device("meta"):
        decoder = Decoder(sizes)
    decoder = decoder.to(torch.bfloat16).to_empty(device=device)
    generator = torch.Generator(device).manual_seed(3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)
    return decoder.requires_grad_(False).eval()


def steps_of(decoder: Decoder, device: torch.device) -> tuple[Callable[[], int], bool]:
    """Return a function that generates the next token and waits for it, and whether it replays a captured
    graph.
    """
    sizes = decoder.sizes
    width = sizes.hidden // sizes.heads
    groups = sizes.key_value // width
    shape = (sizes.layers, 2, groups, sizes.context, width)
    cache = torch.zeros(shape, dtype=torch.bfloat16, device=device)
    token = torch.zeros(1, dtype=torch.int64, device=device)
    position = torch.zeros(1, dtype=torch.int64, device=device)
    positions = torch.arange(sizes.context, device=device).unsqueeze(0)

    def step() -> None:
        with torch.inference_mode():
            hidden_states = decoder.embedding(token)
            mask = positions <= position
            for index, block in enumerate(decoder.blocks):
                hidden_states = block(hidden_states, cache[index], position, mask)
            hidden_states = functional.rms_norm(hidden_states, (sizes.hidden,), decoder.norm, EPSILON)
            token.copy_(decoder.head(hidden_states).argmax(-1))
            position.copy_((position + 1) % sizes.context)

    run: Callable[[], None] = step
    graphed = device.type == "cuda"
    if graphed:
        run = _capture(step)

    def next_token() -> int:
        run()
        return int(token.item())  # engines wait for it too: it decides whether the request is complete

    return next_token, graphed


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A captured step. The graph writes to the addresses of the step's tensors and does not own them, so
    `step` is kept as long as the graph may be replayed.
    """

    graph: torch.cuda.CUDAGraph
    step: Callable[[], None]

    def __call__(self) -> None:
        """Replay the graph."""
        self.graph.replay()


def _capture(step: Callable[[], None]) -> CapturedStep:
    """Capture the step as one CUDA graph, after a warm-up on a separate stream, as torch requires."""
    side_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(WARM_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    # As vLLM and SGLang capture: a forbidden call of any thread of this process would make it fail.
    with torch.cuda.graph(graph, capture_error_mode="global"):
        step()
    return CapturedStep(graph, step)

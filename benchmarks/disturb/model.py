"""Model of `benchmarks.disturb`: a small Llama that serves requests, and weights that it rarely uses.

The Llama is float32 with hidden size 256 and 4 layers: a token takes a few milliseconds of one core. The rest
stands for the experts of a mixture that a token does not visit: it makes the image large enough to be worth a
fork, and inference never reads it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import nn

VOCABULARY = 512
PROMPT_TOKENS = 16
IDLE_TENSORS, IDLE_BYTES = 16, 12 << 20
DEVICE_SIZE = 576
"""Rows and columns of the matrix product that is a step on another core."""


class BenchModel(nn.Module):
    """The Llama and its unused weights; identical in every process."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
        torch.manual_seed(2)
        self.llama = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
        self.idle_weights = nn.ParameterList(
            nn.Parameter(torch.randint(0, 256, (IDLE_BYTES,), dtype=torch.uint8), requires_grad=False)
            for _ in range(IDLE_TENSORS)
        )
        self.prompt = torch.arange(PROMPT_TOKENS).reshape(1, -1)

    def generate(self, tokens: int, unit: Callable[[], AbstractContextManager[object]]) -> list[float]:
        """Run one greedy request and return the seconds of each token. Each but the first runs in a `unit()`
        block.
        """
        seconds: list[float] = []
        with torch.inference_mode():
            began = time.perf_counter()
            output = self.llama(self.prompt, use_cache=True)
            seconds.append(time.perf_counter() - began)
            for _ in range(tokens - 1):
                token = output.logits[:, -1:].argmax(-1)
                began = time.perf_counter()
                with unit():
                    output = self.llama(token, past_key_values=output.past_key_values, use_cache=True)
                seconds.append(time.perf_counter() - began)
        return seconds


class DeviceSteps:
    """Steps like those of a device: each is one native call of a few milliseconds, without the interpreter.

    Its tensors belong to no module: they are not part of the image.
    """

    def __init__(self) -> None:
        self._input = torch.rand(DEVICE_SIZE, DEVICE_SIZE)
        self._output = torch.empty_like(self._input)

    def run(self, steps: int, unit: Callable[[], AbstractContextManager[object]]) -> list[float]:
        """Run one request of steps, each in a `unit()` block, and return the seconds of each."""
        seconds: list[float] = []
        for _ in range(steps):
            began = time.perf_counter()
            with unit():
                torch.mm(self._input, self._input, out=self._output)
            seconds.append(time.perf_counter() - began)
        return seconds

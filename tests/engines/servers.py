"""Real engine servers for tests: stock vLLM and SGLang, each in its own venv, always ended.

A server is a context manager that starts and does not wait::

    with VllmServer(folder, log=tmp_path / "seed.log") as seed:
        seed.wait_ready()
        assert "Paris" in seed.complete("The capital of France is", 8).text

The venvs are those of ``make test-engines``, or those of RFORK_TEST_VLLM_PYTHON and RFORK_TEST_SGLANG_PYTHON;
without its venv, a test that builds a server is skipped with a clear reason.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from tests.engines.engine_server import Body as Body
from tests.engines.engine_server import Completion as Completion
from tests.engines.engine_server import EngineServer as EngineServer
from tests.engines.engine_server import ServerDied as ServerDied
from tests.engines.engine_server import engine_python as engine_python
from tests.engines.engine_server import wait_until as wait_until

# Read before any fixture removes RFORK_* from the environment.
SGLANG_DEVICE = os.environ.get("RFORK_TEST_SGLANG_DEVICE") or "cpu"


class VllmLogprobs(BaseModel):
    """Logprobs of a vLLM response."""

    token_logprobs: tuple[float, ...]


class VllmChoice(BaseModel):
    """Choice of a vLLM response."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: VllmLogprobs


class VllmResponse(BaseModel):
    """The fields of vLLM's completion response that are used here."""

    choices: tuple[VllmChoice, ...]


class SglangMeta(BaseModel):
    """Metadata of an SGLang response."""

    output_token_logprobs: tuple[tuple[float, int, str | None], ...]
    """Per token: logprob, token id, text."""


class SglangResponse(BaseModel):
    """The fields of SGLang's completion response that are used here."""

    text: str
    meta_info: SglangMeta


class VllmServer(EngineServer):
    """``vllm serve`` on the CPU: bfloat16 or float32, 256 MiB of KV cache, contexts of 1,024 tokens."""

    engine = "vllm"

    def _command(self) -> Sequence[str | Path]:
        return (
            *(self.python.parent / "vllm", "serve", self.model, "--served-model-name", "model"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", self.dtype),
            *("--max-model-len", "1024", "--max-num-seqs", "8", "--kv-cache-memory-bytes", str(256 << 20)),
            "--enforce-eager",
        )

    def _variables(self) -> dict[str, str]:
        # Bound threads of two servers would share one core.
        return {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def request(self, prompt: str, max_tokens: int, *, ignore_eos: bool = False) -> tuple[str, Body]:
        return "/v1/completions", {
            "model": "model",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": ignore_eos,
            "logprobs": 1,
            "return_token_ids": True,
        }

    def completion(self, response: bytes) -> Completion:
        (choice,) = VllmResponse.model_validate_json(response).choices
        return Completion(text=choice.text, tokens=choice.token_ids, logprobs=choice.logprobs.token_logprobs)


class SglangServer(EngineServer):
    """``python -m sglang.launch_server``, with torch's own kernels, on the CPU or on RFORK_TEST_SGLANG_DEVICE."""

    engine = "sglang"

    def _command(self) -> Sequence[str | Path]:
        return (
            *(self.python, "-m", "sglang.launch_server", "--model-path", self.model, "--device", SGLANG_DEVICE),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
            *("--host", "127.0.0.1", "--port", str(self.port), "--dtype", self.dtype),
            *("--max-total-tokens", "4096", "--context-length", "1024", "--max-running-requests", "8"),
            *(("--disable-cuda-graph",) if SGLANG_DEVICE == "cuda" else ()),
        )

    def _variables(self) -> dict[str, str]:
        return {"SGLANG_USE_CPU_ENGINE": "1"} if SGLANG_DEVICE == "cpu" else {}

    def request(self, prompt: str, max_tokens: int, *, ignore_eos: bool = False) -> tuple[str, Body]:
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": ignore_eos}
        return "/generate", {"text": prompt, "sampling_params": sampling, "return_logprob": True}

    def completion(self, response: bytes) -> Completion:
        payload = SglangResponse.model_validate_json(response)
        chosen = payload.meta_info.output_token_logprobs
        return Completion(
            text=payload.text,
            tokens=tuple(token for _, token, _ in chosen),
            logprobs=tuple(logprob for logprob, _, _ in chosen),
        )

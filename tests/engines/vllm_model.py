"""Runs in vLLM's Python: one model in this process, and commands for it.

``python -m tests.engines.vllm_model FOLDER OPTIONS``: OPTIONS is a JSON object of arguments of vLLM's `LLM`. Each
line of the input is a JSON list, a command and its arguments; its result is a line ``RESULT`` of the output. Ends
with the input.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from torch import nn

from rfork.engines.served_model import ServedModel, served_model
from rfork.engines.vllm.compat import keep_weights_on_cpu
from tests.engines.reference_digests import digest


class Commands:
    """The commands, by name."""

    def __init__(self, folder: str, options: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(
            folder,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=8,
            kv_cache_memory_bytes=256 << 20,
            enforce_eager=True,
            **options,
        )

    def version(self) -> str:
        """Return the version of vLLM."""
        import vllm

        return str(vllm.__version__).partition("+")[0]

    def outcome(self) -> str:
        """Return ``forked`` or ``fallback``; ``none`` for a model that is not served."""
        (served,) = self._llm.apply_model(served_model)
        return served.report.outcome if isinstance(served, ServedModel) else "none"

    def tokens(self, prompts: list[str], count: int) -> list[list[int]]:
        """Return `count` greedy tokens for each prompt."""
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        outputs = self._llm.generate(prompts, greedy, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def digests(self) -> dict[str, str]:
        """Return the SHA-256 of each parameter and buffer, by its name without wrappers for LoRA."""
        (found,) = self._llm.apply_model(_digests)
        return dict(found)

    def reload(self, folder: str) -> None:
        """Update the weights in place from a folder."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})


def _digests(model: nn.Module) -> dict[str, str]:
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name.replace("base_layer.", ""): digest(tensor) for name, tensor in tensors if tensor.numel()}


def main() -> None:
    """Execute commands until the input ends."""
    keep_weights_on_cpu()  # otherwise vLLM's own loader packs weights, so that no tensors are left to compare
    commands = Commands(sys.argv[1], json.loads(sys.argv[2]))
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print("RESULT " + json.dumps(getattr(commands, name)(*arguments)), flush=True)


if __name__ == "__main__":
    main()

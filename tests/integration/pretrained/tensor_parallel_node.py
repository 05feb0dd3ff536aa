"""One rank of a tensor-parallel model of `fork_pretrained`. Run by test_pretrained_tensor_parallel.

It reports how the rank got its weights and serves it until standard input is closed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig

import rfork
from rfork.engines.relocation import tensors_of
from rfork.settings import InstanceSettings

SIZE = 2
SOON_S = 30.0


def logits(model: PreTrainedModel) -> torch.Tensor:
    """Return the output for a prompt. All ranks compute it together."""
    with torch.inference_mode():
        found: torch.Tensor = model(torch.arange(1, 9)[None]).logits
        return found


def placements(model: PreTrainedModel) -> dict[str, str]:
    """Return the placements of each sharded parameter."""
    return {name: str(getattr(each, "placements", "")) for name, each in model.named_parameters()}


def main(rank: int, folder: Path, complete: Path, group: Path, settings: InstanceSettings) -> None:
    """Fork one rank of `folder`, and compare it with what transformers loads from the `complete` folder."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{group}", rank=rank, world_size=SIZE)
    model = rfork.fork_pretrained(folder, name="served", tp=SIZE, settings=settings)
    expected = AutoModelForCausalLM.from_pretrained(
        complete, dtype=model.dtype, distributed_config=DistributedConfig(tp_size=SIZE)
    )
    wanted, found = tensors_of(expected), tensors_of(model)
    report = rfork.fork_report(model)
    seed = report.seed if report is not None else None
    if seed is not None:
        assert seed.wait_registered(SOON_S)
    result = {
        "outcome": report and report.outcome,
        "fallback": report and report.fallback,
        "different": [name for name in wanted | found if not torch.equal(wanted[name], found[name])],
        "placements": placements(model) == placements(expected),
        "logits": torch.equal(logits(expected), logits(model)),
        "serves_boxes": seed is not None and seed.boxes is not None,
    }
    print("RESULT " + json.dumps(result), flush=True)
    sys.stdin.read()
    if seed is not None:
        seed.close()
    os._exit(0)  # destroying the group would wait for the other rank


if __name__ == "__main__":
    index, forked, loaded, rendezvous, values = sys.argv[1:]
    main(int(index), Path(forked), Path(loaded), Path(rendezvous), InstanceSettings.model_validate_json(values))

"""Runs in SGLang's Python: compares the layout of the plug-in's empty model with that of SGLang's loaded one.

``python sglang_layout_probe.py FOLDER PORT`` writes a JSON object: ``{"difference": str | null, "names":
[...]}``.
"""

from __future__ import annotations

import json
import sys

from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import bootstrap
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.server_args import ServerArgs
from torch import nn

from rfork.engines.hidden_state import HiddenState
from rfork.engines.sglang.identity import identity_of
from rfork.engines.sglang.loader import RforkLoader, SglangEngine
from rfork.image.capture import capture
from rfork.image.layout import Layout
from rfork.settings import InstanceSettings


def main(folder: str, port: int) -> None:
    """Build one rank of one model without a scheduler."""
    load_plugins()
    arguments = ServerArgs(
        model_path=folder,
        device="cpu",
        attention_backend="torch_native",
        sampling_backend="pytorch",
        load_format="rfork",
        skip_tokenizer_init=True,
        dtype="float32",
    )
    arguments.resolve_once()
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    model_config, device_config = ModelConfig.from_server_args(arguments), DeviceConfig("cpu", 0)
    bootstrap.init_parallel_runtime(server_args=arguments, device="cpu", dist_port=port)
    bootstrap.init_layer_runtime(model_config=model_config)
    load_config = LoadConfig(load_format="rfork")
    if load_config.load_format is not RforkLoader:
        raise RuntimeError(f"the plug-in is not active: {load_config.load_format}")
    subject = identity_of(model_config, load_config, device_config, InstanceSettings())

    def layout(model: nn.Module) -> Layout:
        HiddenState(model, subject.facts, subject.packages, subject.helper_attributes)
        return capture(model, exclude=subject.exclude).layout

    made = SglangEngine(LoadConfig(), model_config, device_config)
    empty, loaded = layout(made.empty()), layout(made.load())
    names = [spec.name for spec in loaded.tensors]
    print(json.dumps({"difference": empty.first_difference(loaded), "names": names}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))

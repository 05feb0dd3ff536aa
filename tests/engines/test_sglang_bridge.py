"""Two stock SGLang servers without rfork: the client serves the weights of the seed that the planner chose."""

from __future__ import annotations

import json
from pathlib import Path

from rfork.planner_client.client import PlannerClient
from tests.conftest import StartRfork
from tests.engines.conftest import TinyFolder
from tests.engines.model_folders import copy_without_weights
from tests.engines.planner_process import PlannerProcess
from tests.engines.servers import SglangServer, wait_until
from tests.ports import free_port

PROMPTS = ("The capital of France is", "A seed serves chunks,", "fork() copies a process;")
TCP = {"MOONCAKE_PROTOCOL": "tcp", "RFORK_ALLOW_UNAUTHENTICATED_TCP": "1"}
ON_CPU = Path(__file__).parent / "setup" / "stock_on_cpu"


def stock_server(folder: Path, tmp_path: Path, name: str, *arguments: str, port: int | None = None) -> SglangServer:
    """Return a server with SGLang's own R-Fork, over TCP on the loopback interface, without plug-ins."""
    environment = {
        "PYTHONPATH": str(ON_CPU), "MOONCAKE_PROTOCOL": "tcp", "SGLANG_HOST_IP": "127.0.0.1",
        "SGLANG_PLUGINS": "none",
    }  # fmt: skip
    more = (*arguments, "--served-model-name", "tiny")
    return SglangServer(folder, log=tmp_path / f"{name}.log", arguments=more, environment=environment, port=port)


def test_a_stock_client_serves_the_weights_of_its_assigned_seed(
    planner: PlannerProcess, tiny_folder: TinyFolder, tmp_path: Path, rfork_process: StartRfork
) -> None:
    """With a folder without weights and two sidecars, the client's tokens are its seed's, and its lease ends."""
    folder = tiny_folder("llama")
    (tmp_path / "bare").mkdir()
    weightless = copy_without_weights(folder, tmp_path / "bare")
    seed_flags = ("--remote-instance-weight-loader-start-seed-via-transfer-engine",)
    bootstrap = ("--engine-info-bootstrap-port", str(free_port()))
    port, engine_port = str(free_port()), free_port()
    with (
        stock_server(folder, tmp_path, "seed", *seed_flags, *bootstrap) as seed,
        PlannerClient(planner.url) as planner_client,
    ):
        seed.wait_ready()
        rfork_process(
            "sidecar", "--engine", seed.url, "--model", "tiny", "--planner", planner.url,
            "--bind", "127.0.0.1", until="sidecar ready", environment=TCP,
        )  # fmt: skip
        wait_until(
            lambda: len(planner_client.instances(state="serving")) == 1,
            deadline_s=30,
            what="the published seed",
        )
        client_url = f"http://127.0.0.1:{engine_port}"
        sidecar = rfork_process(
            "sidecar", "--client-of-model", "tiny", "--engine", client_url, "--port", port,
            "--planner", planner.url, "--json", until='"event": "ready"', environment=TCP,
        )  # fmt: skip
        client_flags = (
            "--load-format", "remote_instance", "--remote-instance-weight-loader-backend", "transfer_engine",
            "--remote-instance-weight-loader-seed-instance-ip", "127.0.0.1",
            "--remote-instance-weight-loader-seed-instance-service-port", port,
        )  # fmt: skip
        client = stock_server(weightless, tmp_path, "client", *client_flags, port=engine_port)
        with client:
            sidecar.wait_for("seed assigned to SGLang client", deadline_s=240)
            client.wait_ready()
            assert [seed.complete(prompt, 16).tokens for prompt in PROMPTS] == [
                client.complete(prompt, 16).tokens for prompt in PROMPTS
            ]
            sidecar.wait_for("lease released", deadline_s=30)
            (fork,) = planner_client.forks()
            assert fork.finish is not None
            (source,) = planner_client.instances(state="serving")
            assert "forked" == fork.finish.outcome
            assert source.report.instance_id == fork.plan[0].source_id
            weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
            assert 0.9 * weights < fork.finish.bytes_read == source.report.image_bytes
            event = json.loads(sidecar.wait_for("seed assigned to SGLang client").string)
            assert source.report.instance_id == event["source"]
    wait_until(lambda: instance_count(planner) == 0, deadline_s=30, what="the removal of the seed")


def instance_count(planner: PlannerProcess) -> int:
    """Return the number of instances that the planner knows."""
    with PlannerClient(planner.url) as planner_client:
        return len(planner_client.instances())

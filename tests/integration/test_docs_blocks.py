"""Blocks of pages that need more than a shell, read from their pages and run verbatim.

Tests replace only `http://planner:8700` and the like by the address of their own planner, names and folders
of models by those of a small one, and buckets by a folder.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

import rfork
from planner.server import run_in_thread
from rfork.cli.app import app
from rfork.planner_client.client import PlannerClient
from rfork.schema import ScaleUpInfo
from rfork.settings import PlannerSettings
from rfork.storage.versions.version import version_of
from tests.conftest import StartRfork
from tests.docs.commands import simple_commands
from tests.docs.pages import PageBlock
from tests.docs.run_by import blocks_run_by
from tests.unit.planner.builders import seed_report

ROOT = Path(__file__).parents[2]
OWN_BLOCKS = blocks_run_by(__file__)
RUN_HERE = {
    "clone": ("docs/quickstart.md", "git clone"),
    "contribute": ("CONTRIBUTING.md", "git clone"),
    "python": ("README.md", "rfork.fork_pretrained"),
    "launch": ("docs/engines.md", "rfork launch"),
    "artifacts": ("docs/artifacts.md", "rfork cache"),
    "announce": ("docs/kubernetes.md", "/v1/scaleups"),
    "announce hosts": ("docs/ready-sooner.md", "/v1/scaleups"),
    "leave": ("docs/planner.md", "can_exit"),
}
"""The blocks that run here: their page, and a word that identifies them."""
ENGINE = '#!/bin/sh\necho engine: "$@"\n'
MODULE = "import sys\nprint('engine:', *sys.argv[1:])\n"
DRY = '#!/bin/sh\nexec "{make}" --dry-run "$@"\n'


def block(name: str) -> PageBlock:
    """Return the only block with that name."""
    page, word = RUN_HERE[name]
    (found,) = [each for each in OWN_BLOCKS if each.page == page and word in each.text]
    return found


def shell(script: str, folder: Path, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder as its reader would."""
    path = os.pathsep.join((str(folder / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-c", script],
        cwd=folder,
        env={**os.environ, "PATH": path, "HOME": str(folder), "COLUMNS": "200", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def program(folder: Path, name: str, text: str) -> None:
    """Write a program to the PATH of `shell`."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / name).write_text(text)
    (folder / "bin" / name).chmod(0o755)


def test_each_block_that_names_this_file_is_run_here() -> None:
    """Every block that names this file is run, and every entry names an existing block."""
    assert sorted(each.location for each in OWN_BLOCKS) == sorted(block(name).location for name in RUN_HERE)


@pytest.mark.parametrize("name", ["clone", "contribute"])
def test_a_clone_is_ready_to_install(name: str, tmp_path: Path) -> None:
    """This repository is cloned; `make` prints its commands without running them."""
    make = shutil.which("make")
    assert make is not None
    program(tmp_path, "make", DRY.format(make=make))
    repository = tmp_path / "from" / "rfork"
    repository.parent.mkdir()
    repository.symlink_to(ROOT)
    script = re.sub("(?<=git clone )(REPOSITORY|…)", f"--quiet '{repository}'", block(name).text)
    safe = {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": "*"}
    done = shell(script, tmp_path, safe)
    assert 0 == done.returncode, done.stderr
    assert "-m venv .venv" in done.stdout
    assert (tmp_path / "rfork" / "pyproject.toml").is_file()


def test_python_of_the_readme(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A transformers model and a module get their weights, and the module is served."""
    checkpoint = tmp_path / "my-model"
    checkpoint.mkdir()
    torch.manual_seed(0)
    source_module, module = (torch.nn.Linear(64, 64) for _ in range(2))
    save_file(source_module.state_dict(), checkpoint / "model.safetensors")
    served: list[torch.nn.Module] = []
    with run_in_thread(PlannerSettings.model_validate({"port": 0})) as url:
        script = block("python").text.replace("http://planner:8700", url)
        script = script.replace("org/model", str(tiny_model)).replace("/models/my-model", str(checkpoint))
        with rfork.seed(source_module, model="my-model", version=version_of(str(checkpoint)), planner=url) as seed:
            assert seed.wait_registered(10)
            names: dict[str, object] = {"module": module, "serve": served.append}
            exec(compile(script, "README.md", "exec"), names)
    model, forked = names["model"], names["report"]
    assert isinstance(model, torch.nn.Module)
    assert isinstance(forked, rfork.ForkReport)
    for report in (rfork.fork_report(model), forked):
        assert report is not None
        if report.seed is not None:
            report.seed.close()
    assert torch.equal(source_module.weight, module.weight)
    assert [module] == served
    assert capsys.readouterr().out.startswith("forked ")


def test_launch_starts_either_engine(tmp_path: Path) -> None:
    """Each command reaches its engine (a stand-in that prints its arguments), with rfork's flags appended."""
    program(tmp_path, "vllm", ENGINE)
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "launch_server.py").write_text(MODULE)
    done = shell(block("launch").text, tmp_path, {"PYTHONPATH": str(tmp_path)})
    assert 0 == done.returncode, done.stderr
    vllm, sglang = re.findall(r"^engine: (.*)", done.stdout, re.MULTILINE)
    assert "serve meta-llama/Llama-3.1-8B --load-format rfork" == vllm
    assert sglang.startswith("--model-path meta-llama/Llama-3.1-8B --")


def test_artifacts_are_shared_by_the_commands(rfork_process: StartRfork, tmp_path: Path) -> None:
    """Pulled without a source, seeded without an engine, saved, and loaded into an empty cache."""
    kernels = [tmp_path / cache / "triton" / "0" / "HASH" / "k.cubin" for cache in "ab"]
    kernels[0].parent.mkdir(parents=True)
    kernels[0].write_bytes(b"kernel" * 100)
    text = block("artifacts").text
    with run_in_thread(PlannerSettings.model_validate({"port": 0})) as url:
        text = text.replace("http://planner:8700", url).replace("s3://bucket/caches/", f"{tmp_path}/kept/")
        exported = dict(re.findall(r"(RFORK_\w+)=(\S+)", text))
        more = {"RFORK_ARTIFACTS_QUIET_PERIOD_S": "0", "RFORK_NO_SOURCE_TIMEOUT_S": "0.2", "RFORK_TRANSPORTS": "http"}
        for words in simple_commands(text):
            if words[:2] != ["rfork", "cache"]:
                continue
            folder = tmp_path / ("b" if words[2] == "load" else "a")
            folders = ",".join(f"{cache_type}={folder / cache_type}" for cache_type in ("triton", "inductor", "vllm"))
            environment = {**exported, **more, "RFORK_ARTIFACTS_DIRS": folders}
            if words[2] == "seed":
                artifact_server = rfork_process(*words[1:], until="^serving", environment=environment)
                artifact_server.signal(signal.SIGTERM)
                assert 0 == artifact_server.wait()
            else:
                done = CliRunner().invoke(app, words[1:], env=environment)
                assert 0 == done.exit_code, done.output
    assert kernels[0].read_bytes() == kernels[1].read_bytes()


def test_a_scale_up_is_announced_by_curl(tmp_path: Path) -> None:
    """The planner waits for the replicas in the body."""
    with run_in_thread(PlannerSettings.model_validate({"port": 0, "token": "rule"})) as url:
        done = shell(block("announce").text, tmp_path, {"RFORK_PLANNER": url, "OPERATOR": "rule"})
        assert 0 == done.returncode, done.stderr
        assert 8 == ScaleUpInfo.model_validate_json(done.stdout).scaleup.replicas


def test_hosts_are_announced_by_curl(tmp_path: Path) -> None:
    """The planner knows the hosts in the body."""
    with run_in_thread(PlannerSettings.model_validate({"port": 0, "token": "rule"})) as url:
        done = shell(block("announce hosts").text, tmp_path, {"RFORK_PLANNER": url, "OPERATOR": "rule"})
        assert 0 == done.returncode, done.stderr
        assert ("node-1", "node-2") == ScaleUpInfo.model_validate_json(done.stdout).scaleup.hosts


def test_an_instance_leaves_by_curl(tmp_path: Path) -> None:
    """It drains, and the loop ends as soon as the instance may exit; with an unreachable planner the loop
    ends too.
    """
    with run_in_thread(PlannerSettings.model_validate({"port": 0, "token": "rule"})) as url:
        environment = {"RFORK_PLANNER": url, "RFORK_TOKEN": "rule", "ID": "s"}
        with PlannerClient(url, token="rule") as planner:
            planner.report(seed_report("s"))
            planner.report(seed_report("other"))
        done = shell(block("leave").text + "echo left after $try\n", tmp_path, environment)
        assert 0 == done.returncode, done.stderr
        assert "left after 1\n" == done.stdout, done.stderr
        auth_headers = {"Authorization": "Bearer rule"}
        instance_view = httpx.get(f"{url}/v1/instances/s", headers=auth_headers, trust_env=False).json()
    assert "draining" == instance_view["report"]["state"]

"""`rfork plan` with a real planner: its prediction matches what real forks then do."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import cast

import httpx
import pytest

from rfork.planner_client.client import PlannerClient
from rfork.schema import PreviewPage, ScaleUp
from tests.conftest import StartRfork
from tests.plan_gate import PlanGate

READY = r'"event": ?"ready"'
TIMEOUT_S = 60.0


@pytest.mark.slow  # logic: tests/unit/planner/dry_run/test_dry_run.py
def test_forks_read_as_predicted(rfork_process: StartRfork, tiny_model: Path, tmp_path: Path) -> None:
    """Two forks arrive together: each reads half from the seed and half from the other, since the chunks are
    few.
    """
    environment = {"RFORK_PLANNER_SCALEUP_WAIT_S": "8"}
    planner = rfork_process("planner", "--port", "0", "--json", until=READY, environment=environment)
    url = cast(str, json.loads(planner.wait_for(rf"^.*{READY}.*$").group())["url"])
    own = {"RFORK_TRANSPORTS": "http"}
    common = (str(tiny_model), "--name", "tiny", "--planner", url, "--json")
    rfork_process("seed", *common, until=READY, environment=own | {"RFORK_REPLICA": "seed"})
    command = ("plan", "--targets", "2", "--planner", url)
    text_process, json_process = rfork_process(*command), rfork_process(*command, "--json")
    assert 0 == text_process.wait()
    assert 0 == json_process.wait()
    (preview,) = PreviewPage.model_validate_json(json_process.stdout).items
    scaleup = ScaleUp(scaleup_id="up", model="tiny", replicas=2)
    httpx.post(
        f"{url}/v1/scaleups", json=scaleup.model_dump(mode="json"), trust_env=False, timeout=TIMEOUT_S
    ).raise_for_status()
    gates = [PlanGate(tmp_path / f"t{n}") for n in (1, 2)]
    pulls = [
        rfork_process(
            "pull",
            *common,
            environment={**own, "RFORK_REPLICA": f"p{n}", "RFORK_NODE_NAME": f"h{n}", **gate.environment},
        )
        for n, gate in enumerate(gates, 1)
    ]
    for gate, pull in zip(gates, pulls, strict=True):
        gate.wait_reached(pull)
    for gate in gates:
        gate.open()
    assert [0, 0] == [pull.wait() for pull in pulls]
    with PlannerClient(url) as client:
        plans = [fork.plan for fork in client.forks()]
    # By type: an existing seed, or another fork.
    predicted = Counter(share.source_id[:4] == "seed" for each in preview.targets for share in each.shares)
    read = Counter(share.source_id[:4] == "seed" for shares in plans for share in shares)
    assert {True: 2, False: 2} == predicted
    assert predicted == read
    assert "(running)" in text_process.stdout

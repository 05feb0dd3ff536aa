"""Schemathesis against a running planner: every response conforms to its OpenAPI document."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rfork.planner_client.ownership import OWNER_HEADER
from tests.conftest import StartRfork

SEED = "20260101"
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "missing_required_header",
    "unsupported_method",
    "allow_header_conformance",
    "use_after_free",
    "ensure_resource_availability",
    "ignored_auth",
)
"""Excluded: checks that valid data is accepted and invalid data refused. A schema cannot express that chunk
ranges lie within `chunk_count`, and pydantic accepts numbers written as `true` or "1".
"""
CONFIGURATION = """
[[operations]]
include-path = "/v1/scaleups/{scaleup_id}"
checks.ensure_resource_availability.enabled = false
"""
"""A scale-up of no replicas is a withdrawal: it does not exist afterwards."""
OWNER = f"{OWNER_HEADER}: {'o' * 32}"
ENDLESS = "/v1/events"
"""An endless stream has no complete response. tests/unit/planner/test_event_bus.py reads it."""


@pytest.mark.parametrize(
    ("phases", "examples"),
    [
        ("examples,fuzzing,stateful", 3),
        pytest.param("examples,coverage,fuzzing,stateful", 25, marks=pytest.mark.slow),
    ],
)
def test_the_planner_conforms_to_its_openapi_document(
    rfork_process: StartRfork, tmp_path: Path, phases: str, examples: int
) -> None:
    """Valid and invalid requests to each route, alone and in sequence: no 5xx, no undocumented response."""
    environment = {"RFORK_PLANNER_TOKEN": "operator-token", "RFORK_PLANNER_BATCH_WINDOW_S": "0.002"}
    planner = rfork_process("planner", "--port", "0", "--json", until='"event": ?"ready"', environment=environment)
    url = json.loads(planner.wait_for(r'^.*"event": ?"ready".*$').group())["url"]
    configuration = tmp_path / "schemathesis.toml"
    chosen = "\n".join(f"{check}.enabled = true" for check in CHECKS)
    configuration.write_text(f"[checks]\nenabled = false\n{chosen}\n{CONFIGURATION}")
    command = [
        sys.executable, "-m", "schemathesis.cli", "--config-file", str(configuration), "run",
        f"{url}/openapi.json", "--no-color",
        "--header", "Authorization: Bearer operator-token", "--header", OWNER, "--exclude-path", ENDLESS,
        "--max-examples", str(examples), "--phases", phases, "--seed", SEED,
        "--generation-database", "none", "--request-timeout", "10", "--warnings", "off",
    ]  # fmt: skip
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110, check=False)
    assert 0 == run.returncode, run.stdout + run.stderr
    tested = re.search(r"Tested: +(\d+)", run.stdout)
    assert tested is not None, run.stdout
    assert int(tested[1]) >= 19

r"""A small autoscaler: announces how many replicas will start, then starts them, so that they share one plan.

    python autoscaler.py --planner http://127.0.0.1:8700 --model mlp --replicas 2 -- \
        python ../pytorch/module.py fork --planner http://127.0.0.1:8700 --once

Announced replicas are planned together even if they arrive at different times: the first one waits a moment
(RFORK_PLANNER_SCALEUP_WAIT_S) for the last. Without the announcement everything works too, with several
plans. The planner's controller announces Kubernetes workloads; this script is for all others. Needs: pip
install httpx. If the planner requires tokens, set RFORK_TOKEN to an operator token.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import uuid

import httpx


def announce(client: httpx.Client, scaleup: str, model: str, replicas: int) -> None:
    """Announce this number of replicas. Zero withdraws the scale-up."""
    body = {"scaleup_id": scaleup, "model": model, "replicas": replicas, "expires_in_s": 300, "announced_by": "example"}
    scaleup_info = client.post("/v1/scaleups", json=body).raise_for_status().json()
    print(f"announced {replicas}: {scaleup_info['reason']}", flush=True)


def start(command: list[str], replicas: int) -> list[subprocess.Popen[bytes]]:
    """Start all replicas. RFORK_REPLICA identifies each one, so that a restarted replica counts once."""
    return [
        subprocess.Popen(command, env={**os.environ, "RFORK_REPLICA": f"example-{number}"})
        for number in range(replicas)
    ]


def main() -> None:
    """Announce, start, wait."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--planner", default=os.environ.get("RFORK_PLANNER", "http://127.0.0.1:8700"))
    parser.add_argument("--model", required=True, help="model name of the replicas")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="command that starts one replica")
    options = parser.parse_args()
    token = os.environ.get("RFORK_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else None
    scaleup = f"example.{uuid.uuid4().hex[:8]}"
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        with httpx.Client(base_url=options.planner, headers=headers, timeout=10) as client:
            announce(client, scaleup, options.model, options.replicas)
            codes = [replica.wait() for replica in start(command, options.replicas)]
            print(f"replicas exited with {codes}", flush=True)
            client.delete(f"/v1/scaleups/{scaleup}").raise_for_status()
    except httpx.HTTPStatusError as error:
        sys.exit(error.response.text)
    except httpx.HTTPError as error:
        sys.exit(f"planner {options.planner}: {error}")
    sys.exit(max(codes))


if __name__ == "__main__":
    main()

"""Measure what the webhook adds to creating 500 Pods, and what 500 concurrent forks cost the planner.

It runs a real kube-apiserver and etcd (KUBEBUILDER_ASSETS), installs the chart with real helm
(RFORK_TEST_HELM), and runs the chart's planner, webhook and controller as processes, all on this machine.
This process creates the Pods over 32 connections as fast as the API server responds: with the label, so that
the API server calls the webhook, and without it, interleaved. All Pods belong to one Job, so rfork's
controller announces them as one scale-up. No Pod starts, because there is no kubelet.

- "Pods, labelled" and "Pods, plain": p50 and p99 of one creation, and seconds until all exist. "webhook" is the
  bound within which 99 of 100 webhook calls completed, from the API server's own histogram.
- "forks": every labelled Pod requests its fork, all concurrently, once the planner knows of all of them. p50 and
  p99 of one response, which is sent after the last request has arrived; "CPU s" is the planner's own CPU time,
  "plans" is the number of plans that served all of them.

`admission_p99_ms` is the median over rounds of p99 with the label minus p99 without it.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from lightkube import Client, KubeConfig
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Namespace
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import harness
from planner.integrations.kubernetes import names
from rfork.errors import RforkError
from rfork.planner_client.ownership import OWNER_HEADER
from rfork.schema import ForkRequest, InstanceReport, Placement
from tests.kube.control_plane import ControlPlane, control_plane
from tests.kube.installation import Installation, installed

PODS, QUICK_PODS = 500, 100
CONNECTIONS: Final = 32
HEX: Final = "0" * 32
CHUNKS: Final = 64
JOBS: Final = "/apis/batch/v1/namespaces/burst/jobs"
ANNOUNCED_S: Final = 60.0
"""Timeout for the controller to announce created Pods, and to withdraw removed ones."""
OWNER: Final = "o" * 32
"""Secret shared by all instances."""
SEED: Final = InstanceReport(
    instance_id="seed",
    model="burst",
    layout_id=HEX,
    weights_id=HEX,
    image_bytes=CHUNKS << 20,
    chunk_count=CHUNKS,
    state="serving",
    verified=((0, CHUNKS),),
    address="10.0.0.1:18700",
    transports=("http",),
    placement=Placement(host="seed"),
)


@dataclass
class AdmissionRound:
    """Measurements of one contender in one round."""

    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0
    plans: float = 0.0

    @property
    def p50_ms(self) -> float:
        """Median time of a call."""
        return statistics.median(self.latencies) * 1e3

    @property
    def p99_ms(self) -> float:
        """99th percentile of the time of a call."""
        return statistics.quantiles(self.latencies, n=100)[98] * 1e3


def main() -> None:
    """Run the benchmark, print the table and write the requested files. Run the benchmark, print the table
    and write the requested files.
    """
    options = harness.options("admission", __doc__)
    harness.exit_on_sigterm()
    count = QUICK_PODS if options.quick else PODS
    rounds: dict[str, list[AdmissionRound]] = {"Pods, labelled": [], "Pods, plain": [], "forks": []}
    with tempfile.TemporaryDirectory(prefix="rfork-admission-") as folder, ExitStack() as exit_stack:
        plane = exit_stack.enter_context(control_plane(Path(folder, "plane")))
        kubeconfig_admin = Client(KubeConfig.from_file(plane.kubeconfig), trust_env=False)
        kubeconfig_admin.create(Namespace(metadata=ObjectMeta(name="burst")))
        helm = Path(os.environ.get("RFORK_TEST_HELM", "helm"))
        installation = exit_stack.enter_context(installed(plane, kubeconfig_admin, helm, "burst", Path(folder)))
        # The chart's intervals; tests poll four times as often.
        installation.values["planner"]["settings"] = {"scaleup_wait_s": 4}
        installation.values["controller"] |= {"pollIntervalSeconds": 2, "leaseDurationSeconds": 15}
        installation.start("planner")
        installation.start("webhook")
        installation.start("controller")
        for number in range(options.rounds):
            print(f"round {number + 1}/{options.rounds}", file=sys.stderr)
            order = ["Pods, labelled", "Pods, plain"]
            for name in order if number % 2 == 0 else order[::-1]:
                labelled = name == "Pods, labelled"
                created, uids = asyncio.run(_create(plane, count, labelled=labelled))
                rounds[name].append(created)
                if labelled:
                    rounds["forks"].append(asyncio.run(_run_forks(installation, uids)))
                asyncio.run(_delete(plane))
                asyncio.run(_remove_instances(installation, uids))
        waited = asyncio.run(_webhook_p99(plane))
    rows = [_row(name, created, count) for name, created in rounds.items()]
    rows[0] = {**rows[0], "webhook": waited}
    added = [
        one.p99_ms - other.p99_ms for one, other in zip(rounds["Pods, labelled"], rounds["Pods, plain"], strict=True)
    ]
    harness.publish(
        options,
        settings={"pods": count, "connections": CONNECTIONS},
        rows=rows,
        figures={"admission_p99_ms": statistics.median(added), "fork_plans": float(rows[2]["plans"] or 0)},
        plot=("contender", "p99 ms"),
    )


def _row(name: str, created: Sequence[AdmissionRound], count: int) -> harness.Row:
    def middle(of: Callable[[AdmissionRound], float]) -> float:
        return statistics.median(of(each) for each in created)

    row: dict[str, harness.Value] = {
        "contender": f"{count} {name}",
        "p50 ms": round(middle(lambda each: each.p50_ms), 1),
        "p99 ms": round(middle(lambda each: each.p99_ms), 1),
        "all s": round(middle(lambda each: each.seconds), 2),
        "runs": len(created),
    }
    if name == "forks":
        row |= {"CPU s": middle(lambda each: each.cpu_s), "plans": middle(lambda each: each.plans)}
    return row


async def _run_concurrently(
    calls: Sequence[Callable[[], Awaitable[httpx.Response]]],
) -> tuple[AdmissionRound, list[Any]]:
    """Run all calls, `CONNECTIONS` concurrently, and measure each. Raises RforkError if one fails."""
    created, results, waiting = AdmissionRound(), [], list(reversed(calls))

    async def work() -> None:
        while waiting:
            call = waiting.pop()
            began = time.perf_counter()
            response = await call()
            created.latencies.append(time.perf_counter() - began)
            if response.is_error:
                raise RforkError(f"{response.request.url}: {response.status_code} {response.text[:300]}")
            results.append(response.json())

    began = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(CONNECTIONS)))
    created.seconds = time.perf_counter() - began
    return created, results


async def _create(plane: ControlPlane, count: int, *, labelled: bool) -> tuple[AdmissionRound, list[str]]:
    labels = {names.MODEL: "burst"} if labelled else {}
    container = {"name": "server", "image": "none", "command": ["vllm", "serve", "model", "--port", "8000"]}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container], "restartPolicy": "Never"}}
    job = {"metadata": {"name": "burst"}, "spec": {"parallelism": count, "template": template}}
    async with _api(plane) as api:
        made_job = (await api.post(JOBS, json=job)).raise_for_status().json()
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "burst", "controller": True}
        owners = [owner | {"uid": made_job["metadata"]["uid"]}]
        head = {"generateName": "burst-", "labels": labels, "ownerReferences": owners}
        pod = template | {"metadata": head}
        post = "/api/v1/namespaces/burst/pods"
        created, pods = await _run_concurrently([lambda: api.post(post, json=pod) for _ in range(count)])
    changed = sum(names.INJECTED in (each["metadata"].get("annotations") or {}) for each in pods)
    if changed != (count if labelled else 0):
        raise RforkError(f"{changed} of {count} Pods {'with' if labelled else 'without'} the label were changed")
    return created, [each["metadata"]["uid"] for each in pods]


async def _run_forks(installation: Installation, uids: Sequence[str]) -> AdmissionRound:
    """Request a fork for each Pod once the controller has announced all of them."""
    token = installation.secret(f"{installation.release}-planner", "operator-token")
    async with _planner(installation) as planner:
        await _wait_until_expected(planner, len(uids))
        before = await _plans(planner)
        (await planner.put("/v1/instances/seed", json=SEED.model_dump(mode="json"))).raise_for_status()
        # Instances are separate processes, so the cost of one client for all of them must not count.
        requests = [_request(installation, token, uid) for uid in uids]
        cpu_s, began = installation.cpu_s("planner"), time.perf_counter()
        created = AdmissionRound(
            latencies=await asyncio.gather(*(_send_request(installation, each) for each in requests))
        )
        created.seconds = time.perf_counter() - began
        created.cpu_s, created.plans = installation.cpu_s("planner") - cpu_s, await _plans(planner) - before
    return created


async def _remove_instances(installation: Installation, uids: Sequence[str]) -> None:
    """Remove all instances, so that the planner expects none."""
    async with _planner(installation) as planner:
        await _run_concurrently([_removal(planner, uid) for uid in uids])
        await _wait_until_expected(planner, 0)


async def _wait_until_expected(planner: httpx.AsyncClient, count: int) -> None:
    """Wait until the planner expects `count` replicas. Raises RforkError if it never does."""
    until, expected = time.monotonic() + ANNOUNCED_S, -1
    while expected != count:
        if time.monotonic() > until:
            raise RforkError(f"the planner expects {expected} replicas, not {count}")
        await asyncio.sleep(0.1)
        views = (await planner.get("/v1/scaleups")).raise_for_status().json()
        expected = sum(view["scaleup"]["replicas"] - view["arrived_count"] for view in views)


def _planner(installation: Installation) -> httpx.AsyncClient:
    token = installation.secret(f"{installation.release}-planner", "operator-token")
    headers = {"Authorization": f"Bearer {token}", OWNER_HEADER: OWNER}
    return httpx.AsyncClient(base_url=installation.planner, headers=headers, trust_env=False, timeout=60)


def _request(installation: Installation, token: str, uid: str) -> bytes:
    target = SEED.model_copy(
        update={
            "instance_id": f"{uid}-main-tp0of1-pp0of1-ep0of1-dp0-00000000",
            "weights_id": None,
            "state": "loading",
            "verified": (),
            "placement": Placement(host=uid),
        }
    )
    body = ForkRequest(fork_id=uid, instance=target).model_dump_json().encode()
    head = (
        f"POST /v1/forks HTTP/1.1\r\nHost: 127.0.0.1:{installation.planner_port}\r\n"
        f"Authorization: Bearer {token}\r\n{OWNER_HEADER}: {OWNER}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def _send_request(installation: Installation, request: bytes) -> float:
    """Return the seconds until the complete response arrived. Raises RforkError if it contains no plan."""
    began = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", installation.planner_port)
    writer.write(request)
    response = await reader.read(-1)
    seconds = time.perf_counter() - began
    writer.close()
    if not response.startswith(b"HTTP/1.1 200") or b'"source_id"' not in response:
        raise RforkError(f"no plan: {response[:300]!r}")
    return seconds


def _removal(planner: httpx.AsyncClient, uid: str) -> Callable[[], Awaitable[httpx.Response]]:
    name = f"{uid}-main-tp0of1-pp0of1-ep0of1-dp0-00000000"

    async def remove() -> httpx.Response:
        (await planner.delete(f"/v1/instances/{name}")).raise_for_status()
        return httpx.Response(200, json={})

    return remove


async def _plans(planner: httpx.AsyncClient) -> float:
    """Return the number of plans that the planner has made."""
    return sum(
        sample.value
        for family in text_string_to_metric_families((await planner.get("/metrics")).text)
        for sample in family.samples
        if sample.name == "rfork_planner_plan_batch_size_count"
    )


async def _delete(plane: ControlPlane) -> None:
    async with _api(plane) as api:
        (await api.delete(f"{JOBS}/burst")).raise_for_status()
        pods = "/api/v1/namespaces/burst/pods"
        (await api.delete(pods, params={"gracePeriodSeconds": 0})).raise_for_status()
        while (await api.get(pods, params={"limit": 1})).json()["items"]:
            await asyncio.sleep(0.1)


async def _webhook_p99(plane: ControlPlane) -> str:
    """Return the bound within which 99 of 100 webhook calls completed, measured by the API server."""
    async with _api(plane) as api:
        text = (await api.get("/metrics")).text
    buckets: dict[float, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if (
                sample.name == "apiserver_admission_webhook_admission_duration_seconds_bucket"
                and sample.labels.get("name") == "pods.rfork.dev"
            ):
                bound = float(sample.labels["le"])
                buckets[bound] = buckets.get(bound, 0.0) + sample.value
    total_count = max(buckets.values(), default=0.0)
    bound = min((bound for bound, value in buckets.items() if value >= 0.99 * total_count), default=float("inf"))
    return f"< {bound * 1e3:g} ms"


def _api(plane: ControlPlane) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=plane.ca)
    context.load_cert_chain(plane.folder / "admin.pem")
    return httpx.AsyncClient(
        base_url=plane.url,
        verify=context,
        timeout=30,
        limits=httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS),
    )


if __name__ == "__main__":
    try:
        main()
    except RforkError as error:
        raise SystemExit(str(error)) from None
    except pytest.skip.Exception as error:
        raise SystemExit(f"not run: {error}") from None

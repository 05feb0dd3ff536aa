"""Scriptable planner and engines for the scaler's tests, and metrics pages of vLLM and SGLang."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final

from planner.integrations.keda.engine_metrics import EngineUnreachable
from planner.integrations.keda.signals import MetricPage, parse_metrics
from planner.integrations.planner_api import PlannerUnavailable
from rfork.schema import (
    ForkInfo,
    ForkState,
    InstanceInfo,
    InstanceReport,
    InstanceState,
    ModelInfo,
    Placement,
    Rank,
    ScaleUp,
    ScaleUpInfo,
)

MODEL: Final = "org/llama"

VLLM: Final = """\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 8123.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="org/llama"} 4.0
vllm:num_requests_running{engine="1",model_name="org/llama"} 3.0
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="org/llama"} 12.0
vllm:num_requests_waiting{engine="1",model_name="org/llama"} 8.0
# HELP vllm:num_requests_waiting_by_reason Number of waiting requests by reason.
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="org/llama",reason="capacity"} 12.0
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="org/llama"} 0.75
vllm:kv_cache_usage_perc{engine="1",model_name="org/llama"} 0.25
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.001",model_name="org/llama"} 0.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="+Inf",model_name="org/llama"} 15.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="org/llama"} 15.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="org/llama"} 3.4180908203125
"""
OLD_VLLM: Final = """\
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{model_name="org/llama"} 2.0
# HELP vllm:gpu_cache_usage_perc GPU KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:gpu_cache_usage_perc gauge
vllm:gpu_cache_usage_perc{model_name="org/llama"} 0.0625
"""
SGLANG: Final = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="org/llama",pp_rank="0",tp_rank="0"} 9.0
# HELP sglang:token_usage The token usage.
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="org/llama",pp_rank="0",tp_rank="0"} 0.28
# HELP sglang:num_queue_reqs The number of requests in the waiting queue.
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="org/llama",pp_rank="0",tp_rank="0"} 5.0
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="org/llama"} 8.128902e+06
"""
SGLANG_PRIORITIES: Final = """\
sglang:num_queue_reqs{dp_rank="0",model_name="m",pp_rank="0",priority="",tp_rank="0"} 5.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",pp_rank="0",priority="1",tp_rank="0"} 3.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",pp_rank="0",priority="7",tp_rank="0"} 2.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",pp_rank="0",priority="",tp_rank="1"} 5.0
sglang:num_queue_reqs{dp_rank="1",model_name="m",pp_rank="0",priority="",tp_rank="2"} 1.0
"""


def engine(waiting: float) -> str:
    """Return the page of a vLLM server with this many queued requests."""
    return f'vllm:num_requests_waiting{{engine="0",model_name="{MODEL}"}} {waiting}\n'


def instance(
    host: str, state: InstanceState = "serving", *, model: str = MODEL, rank: Rank | None = None
) -> InstanceInfo:
    """Return one rank of a replica on `host`, as the planner lists it."""
    rank = rank or Rank()
    report = InstanceReport(
        instance_id=f"{host.replace(':', '-')}-{rank.key}-dp{rank.dp}-0a1b2c3d",
        model=model,
        rank=rank,
        layout_id="a" * 32,
        weights_id="1" * 32,
        image_bytes=12 << 20,
        chunk_count=12,
        state=state,
        verified=((0, 12),) if state == "serving" else (),
        address=f"[{host}]:18700" if ":" in host else f"{host}:18700",
        transports=("http",),
        placement=Placement(host=f"node-of-{host}", pod=f"default/{host}"),
    )
    return InstanceInfo(report=report, age_s=0.5)


def scaleup(replicas: int, arrived: int = 0, *, model: str = MODEL, by: str = "u") -> ScaleUpInfo:
    """Return an announced scale-up."""
    request = ScaleUp(scaleup_id=by, model=model, replicas=replicas, announced_by=by)
    return ScaleUpInfo(
        scaleup=request,
        arrived_count=arrived,
        expires_in_s=60,
        seeds=1,
        image_bytes=12 << 20,
        reason="they fork",
    )


def fork(number: int, state: ForkState = "running", *, model: str = MODEL) -> ForkInfo:
    """Return a fork as the planner lists it."""
    return ForkInfo(
        fork_id=f"fork-{number}",
        instance_id=f"i-{number}",
        model=model,
        rank=Rank(),
        state=state,
        age_s=1,
        chunk_count=12,
        image_bytes=12 << 20,
    )


class ScriptedPlannerApi:
    """A planner with lists set by the test. Counts requests."""

    def __init__(self) -> None:
        self.instance_views: tuple[InstanceInfo, ...] = ()
        self.fork_views: tuple[ForkInfo, ...] = ()
        self.scaleup_views: tuple[ScaleUpInfo, ...] = ()
        self.unavailable_reason = ""
        self.requests: list[str] = []

    async def instances(self, *, model: str | None = None) -> tuple[InstanceInfo, ...]:
        await self._record_request(f"instances of {model}")
        return tuple(view for view in self.instance_views if model in (None, view.report.model))

    async def forks(self) -> tuple[ForkInfo, ...]:
        await self._record_request("forks")
        return self.fork_views

    async def models(self) -> tuple[ModelInfo, ...]:
        raise NotImplementedError

    async def scaleups(self) -> tuple[ScaleUpInfo, ...]:
        await self._record_request("scaleups")
        return self.scaleup_views

    async def announce(self, scaleup: ScaleUp) -> ScaleUpInfo:
        raise NotImplementedError

    async def withdraw(self, scaleup_id: str) -> None:
        raise NotImplementedError

    async def remove(self, instance_id: str) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        pass

    async def _record_request(self, resource: str) -> None:
        self.requests.append(resource)
        await asyncio.sleep(0)
        if self.unavailable_reason:
            raise PlannerUnavailable(self.unavailable_reason)


class FakeEngines:
    """Engines by URL. Other URLs are unreachable."""

    def __init__(self, pages: Mapping[str, str] | None = None) -> None:
        self.pages = dict(pages or {})
        self.requests: list[str] = []

    async def read(self, host: str, *, scheme: str, port: int, path: str) -> MetricPage:
        url = f"{scheme}://{host}:{port}{path}"
        self.requests.append(url)
        await asyncio.sleep(0)
        if host not in self.pages:
            raise EngineUnreachable(f"did not respond at {url}")
        return parse_metrics(self.pages[host].encode())

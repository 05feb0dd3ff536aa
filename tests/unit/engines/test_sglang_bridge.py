"""The sidecar's view of a stock engine's endpoints, without sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import save

from planner.app import create_app
from rfork.engines.sglang_bridge.engine import EngineDescription, StockEngine, Version, WeightInfo
from rfork.engines.sglang_bridge.identity import (
    STOCK_PREFIX,
    client_report,
    instance_id,
    layout_id,
    seed_report,
    version_of,
    weights_id,
)
from rfork.engines.sglang_bridge.publisher import Publisher
from rfork.engines.sglang_bridge.sidecar import InfoClient
from rfork.errors import (
    LeaseRejected,
    RforkError,
    SettingsError,
    SourceCorrupt,
    SourceTimeout,
    SourceUnavailable,
)
from rfork.planner_client.client import PlannerClient
from rfork.planner_client.heartbeat import Heartbeat
from rfork.schema import ForkRequest, Lease, Placement, Route
from rfork.settings import InstanceSettings, PlannerSettings, TlsSettings
from tests.fake_sglang_server import TENSORS, FakeSglangEndpoints
from tests.unit.planner.app_transport import AppTransport

SETTINGS = InstanceSettings(planner="http://p", node_name="node", no_source_timeout_s=0.0)
VERSION = Version("/models/m", "default")
DESCRIPTION = EngineDescription("m", 1, 1, 1, "bfloat16", "", "", VERSION)
INFO = WeightInfo("10.0.0.7:15001", TENSORS)
RequestHandler = Callable[[httpx.Request], httpx.Response]


def engine_at(handler: RequestHandler, token: str | None = None) -> StockEngine:
    """Return an engine client whose requests go to `handler`."""
    return StockEngine("http://e:30000/", token=token, transport=httpx.MockTransport(handler))


def engine_with_endpoints(endpoints: FakeSglangEndpoints, token: str | None = None) -> StockEngine:
    """Return an engine client for an engine with these endpoints."""

    def handler(request: httpx.Request) -> httpx.Response:
        status, body = endpoints.respond(str(request.url), request.headers.get("Authorization"))
        return httpx.Response(status, json=body)

    return engine_at(handler, token)


def raising(error: Exception) -> RequestHandler:
    """Return a handler that raises the error."""

    def handler(request: httpx.Request) -> httpx.Response:
        raise error

    return handler


@pytest.mark.parametrize("old", [False, True])
def test_an_engine_is_queried_by_new_or_old_endpoint_names(old: bool) -> None:
    """Older releases have only the old names, which newer ones log as deprecated."""
    endpoints = FakeSglangEndpoints()
    endpoints.only_legacy_paths = old
    engine = engine_with_endpoints(endpoints)
    assert engine.healthy()
    assert replace(DESCRIPTION, dtype="auto") == engine.describe()
    assert WeightInfo("127.0.0.1:15001", TENSORS) == engine.info(0)
    assert old == any(path.startswith("/get_") for path in endpoints.requested_paths)


def test_an_engine_with_an_api_key_receives_it() -> None:
    """Without the right key, the error names the variable to set."""
    endpoints = FakeSglangEndpoints()
    endpoints.key = "secret"
    assert INFO.tensors == engine_with_endpoints(endpoints, token="secret").info(0).tensors
    with pytest.raises(SettingsError) as caught:
        engine_with_endpoints(endpoints).info(0)
    assert "set RFORK_SIDECAR_ENGINE_API_KEY to its --api-key" == caught.value.hint


def test_an_engine_that_serves_no_weights_gets_a_hint_how_to_start_it() -> None:
    """It was not started as a seed, or has no Mooncake."""
    with pytest.raises(SettingsError) as caught:
        engine_with_endpoints(FakeSglangEndpoints(ranks=0)).info(0)
    flag = "--remote-instance-weight-loader-start-seed-via-transfer-engine"
    assert f"start it with {flag}; an engine that was loaded as a client never serves weights" == caught.value.hint


@pytest.mark.parametrize(
    ("handler", "error_type"),
    [
        (raising(httpx.ConnectError("refused")), SourceUnavailable),
        (raising(httpx.ReadTimeout("")), SourceTimeout),
        (lambda _: httpx.Response(500), SourceUnavailable),
        (lambda _: httpx.Response(200, text="<html>"), SourceCorrupt),
        (lambda _: httpx.Response(200, json={"rank": 0}), SourceCorrupt),
        (
            lambda _: httpx.Response(
                200, json={"rank": 0, "remote_instance_transfer_engine_info": ["s", {"w": [0, 1, 2]}]}
            ),
            SourceCorrupt,
        ),
        (
            lambda _: httpx.Response(200, json={"rank": 1, "remote_instance_transfer_engine_info": ["s", {}]}),
            SourceCorrupt,
        ),
        (
            lambda _: httpx.Response(200, json={"rank": 0, "remote_instance_transfer_engine_info": ["s", {}]}),
            SourceCorrupt,
        ),
    ],
)
def test_an_invalid_response_is_the_engines_fault(handler: RequestHandler, error_type: type[RforkError]) -> None:
    """A response that a seed could not have sent is never forwarded to a client."""
    with pytest.raises(error_type):
        engine_at(handler).info(0)


def test_an_unreachable_engine_is_not_healthy() -> None:
    """Refused, silent and unready engines are not healthy."""
    handlers = [
        raising(httpx.ConnectError("")),
        raising(httpx.ReadTimeout("")),
        lambda _: httpx.Response(503),
    ]
    assert [False, False, False] == [engine_at(handler).healthy() for handler in handlers]


@pytest.mark.parametrize("url", ["e:30000", "ftp://e", "http://", "http://e:x", ""])
def test_an_invalid_url_is_rejected(url: str) -> None:
    """The error is raised before any connection."""
    with pytest.raises(SettingsError):
        StockEngine(url)


def test_seeds_match_by_what_a_client_compares_and_by_dtype() -> None:
    """Addresses, sessions and the order of names are ignored; sizes count, and so does what sizes do not show."""
    moved = {name: (address + 64, count, size) for name, (address, count, size) in sorted(TENSORS.items())[::-1]}
    same = layout_id(DESCRIPTION, INFO)
    assert same == layout_id(DESCRIPTION, WeightInfo("10.0.0.8:1", moved))
    halved = {name: (address, count * 2, size // 2) for name, (address, count, size) in TENSORS.items()}
    others = {
        layout_id(replace(DESCRIPTION, dtype="float16"), INFO),
        layout_id(replace(DESCRIPTION, quantization="fp8"), INFO),
        layout_id(replace(DESCRIPTION, tp_size=2), INFO),
        layout_id(replace(DESCRIPTION, ep_size=2), INFO),
        layout_id(DESCRIPTION, WeightInfo("s", {**TENSORS, "more": (1, 1, 2)})),
        layout_id(DESCRIPTION, WeightInfo("s", halved)),
    }
    assert 6 == len(others)
    assert same not in others


def test_weights_are_identified_by_name_and_version() -> None:
    """Folders differ between hosts, so a path counts only after an update has changed it."""
    other_path = Version("/mnt/m", "default")
    same = weights_id("m", VERSION, VERSION)
    assert same == weights_id("m", other_path, other_path)
    others = {
        weights_id("n", VERSION, VERSION),
        weights_id("m", VERSION, Version("/models/m", "2")),
        weights_id("m", VERSION, Version("/models/m2", "default")),
    }
    assert 3 == len(others)
    assert same not in others


@pytest.mark.parametrize("session", ["10.0.0.7:15001", "[fd00::7]:15001", "høst name:1", "x" * 256])
def test_a_seeds_report_is_valid_for_any_session(session: str) -> None:
    """The planner accepts its id, and other memory has another id."""
    info = WeightInfo(session, TENSORS)
    report = seed_report(
        SETTINGS, model="m", version="v", rank=0, description=DESCRIPTION, info=info,
        weights="0" * 32, generation=0, address="h:1",
    )  # fmt: skip
    other = WeightInfo(session, {"other.weight": (1, 1, 2)})
    assert STOCK_PREFIX == report.instance_id[:7]
    assert f"{STOCK_PREFIX}m" == report.model
    assert 2080 == report.image_bytes
    assert report.instance_id != instance_id(SETTINGS, 0, other)


def _route() -> Route:
    return Route(
        source_id="sglang:s", address="s:9", placement=Placement(host="s"), transports=("t",), generation=0,
        chunks=((0, 1),), lease=Lease(token="t", expires_in_s=30.0),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("handler", "error_type"),
    [
        (raising(httpx.ConnectError("refused")), SourceUnavailable),
        (raising(httpx.ReadTimeout("")), SourceTimeout),
        (lambda _: httpx.Response(403), LeaseRejected),
        (lambda _: httpx.Response(410), SourceUnavailable),
        (lambda _: httpx.Response(200, text="<html>"), SourceCorrupt),
    ],
)
def test_another_sidecar_is_blamed_for_its_own_faults(handler: RequestHandler, error_type: type[RforkError]) -> None:
    """A rejected lease is the fault of the requester only."""
    with pytest.raises(error_type):
        InfoClient(TlsSettings(), httpx.MockTransport(handler))(_route(), 0)


def test_an_unpublished_seed_sends_nothing() -> None:
    """This holds for any token."""
    planner = PlannerClient("http://p", transport=AppTransport(create_app(PlannerSettings())))
    publisher = Publisher(
        engine_with_endpoints(FakeSglangEndpoints()),
        planner,
        SETTINGS,
        model=None,
        address=lambda: "h:1",
        poll_interval_s=1.0,
    )
    with pytest.raises(SourceUnavailable):
        publisher.serve_info("sglang:gone", "token")


class DelayedAckTransport(AppTransport):
    """In-memory planner whose heartbeat responses are delayed until `deliver` is set."""

    def __init__(self) -> None:
        super().__init__(create_app(PlannerSettings(batch_window_s=0)))
        self.report_received, self.deliver = threading.Event(), threading.Event()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if request.method == "PUT":
            self.report_received.set()
            self.deliver.wait(30)
        return response


def test_a_lease_may_arrive_before_the_seed_has_its_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner issues leases on a seed that has not received the heartbeat response yet."""
    transport, wait_connected = DelayedAckTransport(), Heartbeat.wait_connected

    def deliver_then_wait(heartbeat: Heartbeat, timeout_s: float) -> bool:
        transport.deliver.set()
        return wait_connected(heartbeat, timeout_s)

    monkeypatch.setattr(Heartbeat, "wait_connected", deliver_then_wait)
    planner = PlannerClient("http://p", transport=transport)
    publisher = Publisher(
        engine_with_endpoints(FakeSglangEndpoints(INFO.session)),
        planner,
        SETTINGS,
        model=None,
        address=lambda: "h:1",
        poll_interval_s=1.0,
    )
    publisher.poll()
    try:
        assert transport.report_received.wait(30)
        (seed,) = [view.report for view in planner.instances()]
        target = client_report(SETTINGS, seed, "fork")
        (route,) = planner.request_plan(ForkRequest(fork_id="fork", instance=target, faults=())).routes
        assert (0, INFO) == publisher.serve_info(seed.instance_id, route.lease.token)
    finally:
        transport.deliver.set()
        publisher.stop()


WEIGHTS = "1" * 32
FIRST = Version("/models/m", "default")


@pytest.mark.parametrize(
    ("stated", "now", "expected"),
    [
        ("v1", FIRST, "v1"),
        (None, FIRST, f"weights:{WEIGHTS}"),
        ("v1", Version("/models/m", "step-5"), f"weights:{WEIGHTS}"),
    ],
)
def test_a_stock_engine_has_its_stated_version_until_an_update(stated: str | None, now: Version, expected: str) -> None:
    """A stated version holds until the weights are updated; files invisible to the sidecar have none."""
    assert expected == version_of(stated, WEIGHTS, FIRST, now)


def test_a_stock_engine_has_the_version_of_its_files(tmp_path: Path) -> None:
    """Two folders under one name are two versions."""
    versions = []
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(save({"weight": torch.full((4,), float(ord(name)))}))
        here = Version(str(folder), "default")
        versions.append(version_of(None, WEIGHTS, here, here))
    assert 2 == len({version for version in versions if version.startswith("files:")})

"""The http transport over loopback: the contract, any client, what a source does."""

from __future__ import annotations

import http.client
import socket
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from safetensors.torch import load_file

from rfork.errors import PortInUse
from rfork.image.safetensors_header import header
from rfork.settings import Settings
from rfork.transport.http import HttpTransport
from rfork.transport.http.conversation import SLICE_BYTES
from tests.fake_device import FakeCopies, on_device
from tests.integration.http_transport.pairs import (
    AUTHORIZATION,
    LARGE,
    SIZES,
    connected_to,
    conversations,
    pair,
    request,
    url_of,
)
from tests.transport_contract import CONTRACT, MIXED, TOKEN, FakeGate, Pair, content, image_of


@contextmanager
def staged_pair(copies: FakeCopies, sizes: tuple[int, ...]) -> Iterator[Pair]:
    """A pair whose tensors lie, on both sides, on a device."""
    transport, gate = HttpTransport(Settings()), FakeGate()
    source, target = on_device(image_of(sizes, seed=1), copies), on_device(image_of(sizes), copies)
    made = Pair(transport, gate, source, target, transport.export(source, gate))
    try:
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("check", CONTRACT, ids=[check.__name__ for check in CONTRACT])
def test_http_keeps_the_contract(check: Callable[[Pair], None]) -> None:
    """Every check of the contract holds over http."""
    with pair(MIXED) as made:
        check(made)


@pytest.mark.parametrize("check", CONTRACT, ids=[check.__name__ for check in CONTRACT])
def test_http_keeps_the_contract_between_devices(check: Callable[[Pair], None]) -> None:
    """Every check of the contract holds where source and target are reached by copies only, step by step."""
    copies = FakeCopies()
    with staged_pair(copies, MIXED) as made:
        check(made)
    assert [] == copies.under_way


def test_curl_saves_a_live_seed_as_safetensors(tmp_path: Path) -> None:
    """What curl saves from a live seed is a file that safetensors loads, with the seed's bytes."""
    with pair() as made:
        saved = tmp_path / "model.safetensors"
        command = ["curl", "-sS", "--fail", "-H", f"Authorization: Bearer {TOKEN}", "-o", str(saved)]
        subprocess.run([*command, url_of(made.exporter.endpoint())], check=True, timeout=60)
        tensors = load_file(saved)
        parts = b"".join(tensors[f"tensor.{index}"].numpy().tobytes() for index in range(len(SIZES)))
        assert content(made.source) == parts


def test_curl_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """curl --continue-at asks for an open-ended range and gets the rest of the file."""
    with pair() as made:
        whole = header(made.source.layout) + content(made.source)
        saved = tmp_path / "model.safetensors"
        saved.write_bytes(whole[:10_000])
        command = [
            "curl",
            "-sS",
            "--fail",
            "-C",
            "-",
            "-H",
            f"Authorization: Bearer {TOKEN}",
            "-o",
            str(saved),
        ]
        subprocess.run([*command, url_of(made.exporter.endpoint())], check=True, timeout=60)
        assert whole == saved.read_bytes()


@pytest.mark.parametrize(
    ("asked", "begin", "end"),
    [("bytes=0-99", 0, 100), ("bytes=5000-9000", 5000, 9001), ("bytes=-77", -77, None)],
)
def test_httpx_reads_ranges(asked: str, begin: int, end: int | None) -> None:
    """Ranges over header and data are what a plain file would give."""
    with pair() as made, httpx.Client(headers=AUTHORIZATION) as client:
        whole = header(made.source.layout) + content(made.source)
        answer = client.get(url_of(made.exporter.endpoint()), headers={"Range": asked})
        assert (206, whole[begin:end]) == (answer.status_code, answer.content)


def test_urllib_reads_the_whole_file() -> None:
    """urllib, which closes each connection, gets header and image."""
    with pair() as made:
        asked = urllib.request.Request(url_of(made.exporter.endpoint()), headers=AUTHORIZATION)
        with urllib.request.urlopen(asked, timeout=30) as answer:
            assert header(made.source.layout) + content(made.source) == answer.read()


def test_one_connection_serves_many_requests() -> None:
    """GET, HEAD and refusals follow one another on one connection."""
    with pair() as made:
        place = urlsplit(url_of(made.exporter.endpoint()))
        client = http.client.HTTPConnection(place.netloc, timeout=30)
        client.connect()
        used = client.sock
        size = str(len(header(made.source.layout)) + sum(SIZES))
        seen = []
        for method, fields in (
            ("HEAD", AUTHORIZATION),
            ("GET", AUTHORIZATION | {"Range": "bytes=0-9"}),
            ("GET", {"Authorization": "Bearer forged"}),
            ("GET", {}),
            ("GET", AUTHORIZATION | {"Range": "bytes=99999999-"}),
            ("DELETE", AUTHORIZATION),
            ("GET", AUTHORIZATION | {"Range": "bytes=0-9"}),
        ):
            client.request(method, place.path, headers=fields)
            answer = client.getresponse()
            seen.append((answer.status, answer.headers["Content-Length"] == size, len(answer.read()) == 10))
        assert [
            (200, True, False), (206, False, True), (403, False, False), (401, False, False),
            (416, False, False), (405, False, False), (206, False, True),
        ] == seen  # fmt: skip
        assert used is client.sock
        client.close()


def test_weights_that_change_cut_a_body_short() -> None:
    """A client in mid-body when the weights change gets fewer bytes than it was promised."""
    with pair(sizes=LARGE) as made:

        def change(nbytes: int) -> None:
            made.gate.changed = len(made.gate.admitted) >= 4

        made.gate.before_slice = change
        asked = urllib.request.Request(url_of(made.exporter.endpoint()), headers=AUTHORIZATION)
        with urllib.request.urlopen(asked, timeout=30) as answer, pytest.raises(http.client.IncompleteRead):
            answer.read()


def test_nothing_is_fetched_from_a_device_before_it_is_admitted() -> None:
    """Where the third slice is refused, what was copied is the first two, and no copy is under way."""
    copies = FakeCopies()
    with staged_pair(copies, LARGE) as made:

        def change(nbytes: int) -> None:
            made.gate.changed = len(made.gate.admitted) >= 4

        made.gate.before_slice = change
        asked = urllib.request.Request(url_of(made.exporter.endpoint()), headers=AUTHORIZATION)
        with urllib.request.urlopen(asked, timeout=30) as answer, pytest.raises(http.client.IncompleteRead):
            answer.read()
        made.exporter.close()
        expected = 2 * SLICE_BYTES - len(header(made.source.layout))
        assert (expected, []) == (copies.begun_bytes, copies.under_way)


def test_closing_cuts_readers_and_leaves_no_thread() -> None:
    """`close` returns with a reader in mid-body, twice, and no thread of the server is left."""
    made = Pair.over(HttpTransport(Settings()), LARGE)
    with connected_to(made.exporter.endpoint()) as stranger:
        stranger.sendall(request(**AUTHORIZATION))
        assert b"HTTP/1.1 200 OK" == stranger.recv(15)
        made.exporter.close()
        made.exporter.close()
        assert [] == conversations()


def test_a_port_in_use_is_named() -> None:
    """A taken port is one clear error that names the setting."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        transport = HttpTransport(Settings(http_port=holder.getsockname()[1]))
        with pytest.raises(PortInUse) as raised:
            transport.export(image_of((10,)), FakeGate())
    assert "RFORK_HTTP_PORT" in raised.value.hint

"""The http transport over loopback: the contract, generic clients, and the source's behaviour."""

from __future__ import annotations

import http.client
import socket
import subprocess
import urllib.request
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from safetensors.torch import load_file

from rfork.errors import PortInUse
from rfork.image.safetensors_header import header
from rfork.settings import InstanceSettings
from rfork.transport.http import HttpTransport
from rfork.transport.http.connection import SLICE_BYTES
from tests.fake_libcuda.fake_gpu import FakeGpu
from tests.fake_libcuda.images import device_image
from tests.integration.http_transport.pairs import (
    AUTHORIZATION,
    LARGE,
    SIZES,
    connection_threads,
    file_url_of,
    open_connection,
    pair,
    request,
    url_of,
)
from tests.transport_contract import CONTRACT, MIXED, TOKEN, FakeGate, TransportPair, content, image_of


@pytest.mark.parametrize("check", CONTRACT, ids=[check.__name__ for check in CONTRACT])
def test_http_keeps_the_contract(check: Callable[[TransportPair], None]) -> None:
    """Every check of the contract holds over http."""
    with pair(MIXED) as made:
        check(made)


def test_curl_saves_a_live_seed_as_safetensors(tmp_path: Path) -> None:
    """curl saves a live seed as a file that safetensors loads, with the seed's bytes."""
    with pair() as made:
        saved = tmp_path / "model.safetensors"
        command = ["curl", "-sS", "--fail", "-H", f"Authorization: Bearer {TOKEN}", "-o", str(saved)]
        subprocess.run([*command, file_url_of(made.exporter.endpoint())], check=True, timeout=60)
        tensors = load_file(saved)
        parts = b"".join(tensors[f"tensor.{index}"].numpy().tobytes() for index in range(len(SIZES)))
        assert content(made.source) == parts


def test_curl_resumes_a_download(tmp_path: Path) -> None:
    """curl --continue-at requests an open-ended range and gets the rest of the file."""
    with pair() as made:
        file_bytes = header(made.source.layout) + content(made.source)
        saved = tmp_path / "model.safetensors"
        saved.write_bytes(file_bytes[:10_000])
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
        subprocess.run([*command, file_url_of(made.exporter.endpoint())], check=True, timeout=60)
        assert file_bytes == saved.read_bytes()


@pytest.mark.parametrize(
    ("range_header", "begin", "end"),
    [("bytes=0-99", 0, 100), ("bytes=5000-9000", 5000, 9001), ("bytes=-77", -77, None)],
)
def test_httpx_reads_ranges(range_header: str, begin: int, end: int | None) -> None:
    """Ranges over header and data return what a plain file would."""
    with pair() as made, httpx.Client(headers=AUTHORIZATION) as client:
        file_bytes = header(made.source.layout) + content(made.source)
        response = client.get(file_url_of(made.exporter.endpoint()), headers={"Range": range_header})
        assert 206 == response.status_code
        assert file_bytes[begin:end] == response.content


def test_urllib_reads_the_complete_file() -> None:
    """urllib, which closes each connection, gets header and image."""
    with pair() as made:
        http_request = urllib.request.Request(file_url_of(made.exporter.endpoint()), headers=AUTHORIZATION)
        with urllib.request.urlopen(http_request, timeout=30) as response:
            assert header(made.source.layout) + content(made.source) == response.read()


def test_one_connection_serves_many_requests() -> None:
    """GET, HEAD and refusals can follow each other on one connection."""
    with pair() as made:
        location = urlsplit(file_url_of(made.exporter.endpoint()))
        client = http.client.HTTPConnection(location.netloc, timeout=30)
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
            client.request(method, location.path, headers=fields)
            response = client.getresponse()
            seen.append((response.status, response.headers["Content-Length"] == size, len(response.read()) == 10))
        assert [
            (200, True, False), (206, False, True), (403, False, False), (401, False, False),
            (416, False, False), (405, False, False), (206, False, True),
        ] == seen  # fmt: skip
        assert used is client.sock
        client.close()


def test_weights_that_change_cut_a_body_short() -> None:
    """A client whose body is interrupted by a weight change gets fewer bytes than promised."""
    with pair(sizes=LARGE) as made:

        def change(nbytes: int) -> None:
            made.gate.weights_changed = len(made.gate.admitted) >= 4

        made.gate.before_slice = change
        http_request = urllib.request.Request(url_of(made.exporter.endpoint()), headers=AUTHORIZATION)
        with (
            urllib.request.urlopen(http_request, timeout=30) as response,
            pytest.raises(http.client.IncompleteRead),
        ):
            response.read()


def test_nothing_is_fetched_from_a_device_before_it_is_admitted(fake_gpu: FakeGpu) -> None:
    """If the third slice is refused, only the first two were copied, and no copy is running."""
    gate, image = FakeGate(), device_image(fake_gpu, LARGE)

    def change(nbytes: int) -> None:
        gate.weights_changed = len(gate.admitted) >= 4

    gate.before_slice = change
    with closing(HttpTransport(InstanceSettings()).export(image, gate)) as exporter:
        http_request = urllib.request.Request(url_of(exporter.endpoint()), headers=AUTHORIZATION)
        with (
            urllib.request.urlopen(http_request, timeout=30) as response,
            pytest.raises(http.client.IncompleteRead),
        ):
            response.read()
    assert 2 * SLICE_BYTES == fake_gpu.copied_bytes
    assert 0 == fake_gpu.queued_copies


def test_closing_cuts_readers_and_leaves_no_thread() -> None:
    """`close` returns while a reader is in mid-body, also when called twice, and leaves no server thread."""
    made = TransportPair.create(HttpTransport(InstanceSettings()), LARGE)
    with open_connection(made.exporter.endpoint()) as connection:
        connection.sendall(request(**AUTHORIZATION))
        assert b"HTTP/1.1 200 OK" == connection.recv(15)
        made.exporter.close()
        made.exporter.close()
        assert [] == connection_threads()


def test_a_port_in_use_is_named() -> None:
    """A port in use is one clear error that names the setting."""
    with socket.create_server(("127.0.0.1", 0)) as holder:
        transport = HttpTransport(InstanceSettings(http_port=holder.getsockname()[1]))
        with pytest.raises(PortInUse) as raised:
            transport.export(image_of((10,)), FakeGate())
    assert "RFORK_HTTP_PORT" in raised.value.hint

"""The http transport over loopback: the contract, any client, bad servers, bad clients, dead processes."""

from __future__ import annotations

import http.client
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import trustme
from safetensors.torch import load_file

from rfork.errors import (
    LeaseRefused,
    PortInUse,
    RforkError,
    SourceBusy,
    SourceChanged,
    SourceCorrupt,
    SourceGone,
    SourceStalled,
)
from rfork.image.chunks import MIB
from rfork.image.safetensors_header import header
from rfork.settings import Settings
from rfork.transport.base import Endpoint
from rfork.transport.http import HttpTransport, stream
from rfork.transport.http.answer import ImageFile
from rfork.transport.http.conversation import SLICE_BYTES
from rfork.transport.http.server import LOBBY, HttpExporter
from rfork.transport.tls import client_context
from tests.fake_device import FakeCopies, on_device
from tests.transport_contract import CONTRACT, MIXED, TOKEN, FakeGate, Pair, content, image_of, soon

ROOT = Path(__file__).parents[2]
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}
SIZES = (3 * MIB, 1000, 77)
LARGE = (40 * MIB,)


@contextmanager
def pair(sizes: tuple[int, ...] = SIZES, **settings: float) -> Iterator[Pair]:
    made = Pair.over(HttpTransport(Settings.model_validate(settings)), sizes)
    try:
        yield made
    finally:
        made.close()


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


def url_of(endpoint: Endpoint) -> str:
    return endpoint.parameters["url"]


def connected_to(endpoint: Endpoint) -> socket.socket:
    place = urlsplit(url_of(endpoint))
    return socket.create_connection((place.hostname, place.port), timeout=30)


def received_from(connection: socket.socket) -> bytes:
    """All that comes until the other side ends the connection."""
    received = bytearray()
    try:
        while data := connection.recv(1 << 20):
            received += data
    except ConnectionResetError:
        pass
    return bytes(received)


def request(**fields: str) -> bytes:
    lines = ["GET /v1/image HTTP/1.1", "Host: seed", *(f"{name}: {value}" for name, value in fields.items())]
    return "\r\n".join([*lines, "", ""]).encode()


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


# Any client.


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


# TLS.


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> trustme.CA:
    """Settings under which servers show a certificate and clients trust its authority; mTLS by that."""
    made = trustme.CA()
    shown = made.issue_cert("127.0.0.1")
    shown.private_key_pem.write_to_path(tmp_path / "key.pem")
    for part in shown.cert_chain_pems:
        part.write_to_path(tmp_path / "certificate.pem", append=True)
    made.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("certificate", "key", "ca"):
        monkeypatch.setenv(f"RFORK_TLS_{name.upper()}", str(tmp_path / f"{name}.pem"))
    return made


def test_mutual_tls_gives_the_right_bytes(authority: trustme.CA) -> None:
    """With a certificate on both sides, many small and large tensors arrive as they are."""
    with pair(sizes=(3 * MIB, *(1000,) * 300, 5)) as made:
        made.connect().read(0, made.source.layout.image_bytes, soon())
        assert content(made.source) == content(made.target)
        assert "https" == urlsplit(url_of(made.exporter.endpoint())).scheme


def test_a_server_without_ca_takes_any_client(authority: trustme.CA, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a certificate but no authority the server is plain TLS: clients need show nothing."""
    with monkeypatch.context() as server_side:
        server_side.delenv("RFORK_TLS_CA")
        made = Pair.over(HttpTransport(Settings()), SIZES)
    monkeypatch.delenv("RFORK_TLS_CERTIFICATE")
    monkeypatch.delenv("RFORK_TLS_KEY")
    made.connect().read(0, 1000, soon())
    made.close()
    assert content(made.source, 0, 1000) == content(made.target, 0, 1000)


def test_mutual_tls_keeps_out_who_shows_nothing(
    authority: trustme.CA, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client without a certificate gets no byte, and the server goes on."""
    with pair() as made:
        with monkeypatch.context() as bare:
            bare.delenv("RFORK_TLS_CERTIFICATE")
            bare.delenv("RFORK_TLS_KEY")
            with pytest.raises(SourceGone):
                made.connect().read(0, 1000, soon())
        made.connect().read(0, 1000, soon())
        assert content(made.source, 0, 1000) == content(made.target, 0, 1000)


def test_a_server_of_another_authority_is_not_trusted(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A target that trusts another authority does not even show its token."""
    with pair() as made:
        trustme.CA().cert_pem.write_to_path(tmp_path / "other.pem")
        monkeypatch.setenv("RFORK_TLS_CA", str(tmp_path / "other.pem"))
        with pytest.raises(SourceGone, match="certificate"):
            made.connect()


def test_unusable_tls_files_make_it_unavailable(authority: trustme.CA, tmp_path: Path) -> None:
    """`availability` names the file that cannot be used."""
    (tmp_path / "key.pem").write_text("not a key")
    availability = HttpTransport(Settings()).availability()
    assert not availability.usable
    assert "RFORK_TLS_CERTIFICATE" in availability.reason


# Bad servers.


@contextmanager
def server(*answers: bytes | None) -> Iterator[Endpoint]:
    """Gives each connection the next answer once a request came, then closes; None: stays silent."""
    with ExitStack() as open_sockets, socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            for answer in answers:
                try:
                    connection = open_sockets.enter_context(listener.accept()[0])
                except OSError:
                    return
                connection.recv(4096)
                if answer is not None:
                    connection.sendall(answer)
                    connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve)
        thread.start()
        yield Endpoint("http", {"url": f"http://127.0.0.1:{port}/file"})
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def partial(first: int, last: int, body: bytes, *fields: str) -> bytes:
    length = f"Content-Length: {last - first + 1}"
    lines = ["HTTP/1.1 206 Partial Content", f"Content-Range: bytes {first}-{last}/*", length, *fields]
    return "\r\n".join([*lines, "", ""]).encode() + body


CUT = partial(0, 999, b"x" * 10)


@pytest.mark.parametrize(
    ("answers", "error"),
    [
        ((CUT, partial(10, 999, b"y" * 20)), SourceGone),
        ((b"", b""), SourceGone),
        ((b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000,), SourceCorrupt),
        ((partial(1, 1000, b"x" * 1000),), SourceCorrupt),
        ((partial(0, 998, b"x" * 999),), SourceCorrupt),
        ((partial(0, 999, b"x" * 1001),), SourceCorrupt),
        ((partial(0, 999, b"x" * 1000, "Content-Encoding: gzip"),), SourceCorrupt),
        ((partial(0, 999, b"x" * 1000, "Transfer-Encoding: chunked"),), SourceCorrupt),
        ((b"SSH-2.0-OpenSSH_9.2\r\n",), SourceCorrupt),
        ((b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",), SourceCorrupt),
        ((b"HTTP/1.1 302 Found\r\nLocation: http://elsewhere/\r\n\r\n",), SourceCorrupt),
        ((b"HTTP/1.1 401 Unauthorized\r\n\r\n",), LeaseRefused),
        ((b"HTTP/1.1 409 Conflict\r\n\r\n",), SourceBusy),
        ((b"HTTP/1.1 410 Gone\r\n\r\n",), SourceChanged),
        ((b"HTTP/1.1 412 Precondition Failed\r\n\r\n",), SourceChanged),
        ((b"HTTP/1.1 429 Too Many Requests\r\n\r\n",), SourceBusy),
        ((b"HTTP/1.1 500 Internal Server Error\r\n\r\n",), SourceGone),
        ((b"HTTP/1.1 503 Service Unavailable\r\n\r\n",), SourceBusy),
        ((None,), SourceStalled),
    ],
)
def test_a_bad_answer_has_its_error(answers: tuple[bytes | None, ...], error: type[RforkError]) -> None:
    """Each wrong answer is blamed on the right party."""
    target = image_of((1000,))
    with server(*answers) as endpoint:
        reader = HttpTransport(Settings(stall_s=0.3)).connect(endpoint, target, lambda: "", soon())
        with pytest.raises(error):
            reader.read(0, 1000, soon())
        reader.close()


def test_a_read_goes_on_after_a_dropped_connection() -> None:
    """A body that is cut short once is continued from the byte it reached."""
    target = image_of((1000,))
    with server(CUT, partial(10, 999, b"y" * 990)) as endpoint:
        reader = HttpTransport(Settings()).connect(endpoint, target, lambda: "", soon())
        reader.read(0, 1000, soon())
        reader.close()
    assert b"x" * 10 + b"y" * 990 == content(target)


def test_a_connection_that_is_replaced_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """With whom, why, and how much was still to come."""
    caplog.set_level(logging.INFO, logger="rfork.transport.http.client")
    with server(CUT, partial(10, 999, b"y" * 990)) as endpoint:
        reader = HttpTransport(Settings()).connect(endpoint, image_of((1000,)), lambda: "", soon())
        reader.read(0, 1000, soon())
        reader.close()
        place = urlsplit(url_of(endpoint)).netloc
    told = [record.getMessage().rpartition(" seconds=")[0] for record in caplog.records]
    because = "closed with 990 bytes to come"
    assert [f"connection replaced source={place} because={because} missing=990"] == told


def test_a_file_that_changes_between_reads_is_noticed() -> None:
    """Without an etag in the endpoint, all answers must have that of the first."""
    first = partial(0, 499, b"x" * 500, 'ETag: "a"')
    second = partial(500, 999, b"y" * 500, 'ETag: "b"')
    with server(first, second, second) as endpoint:
        reader = HttpTransport(Settings()).connect(endpoint, image_of((1000,)), lambda: "", soon())
        reader.read(0, 500, soon())
        with pytest.raises(SourceChanged):
            reader.read(500, 1000, soon())
        reader.close()


def test_a_reason_is_passed_on() -> None:
    """The server's own line of text is in the error."""
    refusal = b"HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nContent-Length: 11\r\n\r\nnot for you"
    with server(refusal) as endpoint:
        reader = HttpTransport(Settings()).connect(endpoint, image_of((1000,)), lambda: "", soon())
        with pytest.raises(LeaseRefused, match="not for you"):
            reader.read(0, 1000, soon())
        reader.close()


def test_nobody_listening_is_a_source_gone(free_port: int) -> None:
    """A refused connection gives SourceGone at once, on connecting."""
    endpoint = Endpoint("http", {"url": f"http://127.0.0.1:{free_port}/v1/image"})
    with pytest.raises(SourceGone):
        HttpTransport(Settings()).connect(endpoint, image_of((10,)), lambda: "", soon())


def test_a_source_that_took_over_the_port_is_another(free_port: int) -> None:
    """A source that restarted on its port is SourceChanged for readers of the one before."""
    transport = HttpTransport(Settings(http_port=free_port))
    before = Pair.over(transport, SIZES)
    reader = before.connect()
    reader.read(0, 10, soon())
    before.exporter.close()
    after = Pair.over(transport, SIZES)
    with pytest.raises(SourceChanged):
        reader.read(10, 20, soon())
    before.close()
    after.close()


# Bad clients.


def conversations() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("rfork-http")]


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x00\xff" + os.urandom(200), b"400"),
        (b"\x00" * 5000, b"400"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n" + b"x: y\r\n" * 5000, b"431"),
        (b"GET /v1/image HTTP/2.0\r\nHost: a\r\n\r\n", b"505"),
        (request(**{"Content-Length": "5"}) + b"hello", b"400"),
        (request(**{"Transfer-Encoding": "chunked"}), b"400"),
    ],
)
def test_garbage_is_answered_and_closed(sent: bytes, status: bytes) -> None:
    """What is no request has its status and ends the connection; the next reader is served."""
    with pair() as made:
        with connected_to(made.exporter.endpoint()) as stranger:
            stranger.sendall(sent)
            assert b"HTTP/1.1 " + status == received_from(stranger)[:12]
        made.connect().read(0, 1000, soon())
        assert content(made.source, 0, 1000) == content(made.target, 0, 1000)


@pytest.mark.parametrize("sent", [b"", b"GET /v1/im", request(**AUTHORIZATION)[:-2]])
def test_a_request_that_does_not_end_is_cut(sent: bytes) -> None:
    """A connection that says nothing, or half a head, is closed without a word after `stall_s`."""
    with pair(stall_s=0.2) as made, connected_to(made.exporter.endpoint()) as stranger:
        stranger.sendall(sent)
        assert b"" == received_from(stranger)


def test_a_client_that_does_not_read_is_cut() -> None:
    """A reader that takes no byte for `stall_s` loses its connection, and its thread ends."""
    with pair(sizes=LARGE, stall_s=0.2) as made, connected_to(made.exporter.endpoint()) as stranger:
        stranger.sendall(request(**AUTHORIZATION))
        assert b"HTTP/1.1 200 OK" == stranger.recv(15)
        for thread in conversations():
            if thread.name == "rfork-http":
                thread.join(30)
        assert ["rfork-http-accept"] == [thread.name for thread in conversations()]
        assert len(received_from(stranger)) < sum(LARGE)


def test_a_reader_that_stands_still_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """One that was let in; of a stranger nothing is said."""
    caplog.set_level(logging.INFO, logger="rfork.transport.http.server")
    for sent in (b"GET", request(**AUTHORIZATION)):
        with pair(sizes=LARGE, stall_s=0.2) as made, connected_to(made.exporter.endpoint()) as reader:
            reader.sendall(sent)
            reader.recv(15)
            for thread in conversations():
                if thread.name == "rfork-http":
                    thread.join(30)
    told = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert ["connection given up"] == told


def test_sending_goes_on_after_it_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """No system call lasts longer than SEND_S; what could not be sent in one is sent in the next."""
    full, sendmsg = threading.Semaphore(0), socket.socket.sendmsg

    def noted(connected: socket.socket, views: Sequence[memoryview]) -> int:
        try:
            return sendmsg(connected, views)
        except BlockingIOError:
            full.release()
            raise

    monkeypatch.setattr(stream, "SEND_S", 0.01)
    monkeypatch.setattr(socket.socket, "sendmsg", noted)
    sent = bytes(range(256)) * (LARGE[0] // 256)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        sending = stream.PlainStream(listener.accept()[0])

    def send() -> None:
        sending.send([sent], 30)
        sending.close()

    thread = threading.Thread(target=send)
    thread.start()
    for _ in range(3):
        full.acquire(timeout=30)
    received = received_from(here)
    thread.join()
    here.close()
    assert sent == received


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
def test_silent_strangers_keep_no_reader_out(secure: bool, request: pytest.FixtureRequest) -> None:
    """With 300 silent connections open, a good reader gets the whole image."""
    if secure:
        request.getfixturevalue("authority")
    with pair() as made, ExitStack() as strangers:
        for _ in range(300):
            strangers.enter_context(connected_to(made.exporter.endpoint()))
        made.connect().read(0, made.source.layout.image_bytes, soon())
        assert content(made.source) == content(made.target)
        assert len(conversations()) <= LOBBY + 2


def test_with_all_places_taken_readers_are_told_so() -> None:
    """One more connection than there are places gets 503, which a reader calls SourceBusy."""
    source = image_of(SIZES, seed=1)
    file = ImageFile(source, header(source.layout), FakeGate())
    exporter = HttpExporter(
        file, bind="127.0.0.1", ports=[0], advertise="127.0.0.1", tls=None, stall_s=10, most_connections=1
    )
    transport = HttpTransport(Settings())
    first = transport.connect(exporter.endpoint(), image_of(SIZES), lambda: TOKEN, soon())
    first.read(0, 10, soon())
    second = transport.connect(exporter.endpoint(), image_of(SIZES), lambda: TOKEN, soon())
    with pytest.raises(SourceBusy):
        second.read(0, 10, soon())
    first.read(10, 20, soon())
    first.close()
    second.close()
    exporter.close()


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


# Processes that stop and die.

SEED = """
import threading
from rfork.settings import Settings
from rfork.transport.http import HttpTransport
from tests.transport_contract import FakeGate, image_of
exporter = HttpTransport(Settings()).export(image_of((40 << 20, 1000), seed=1), FakeGate())
parameters = exporter.endpoint().parameters
print(parameters["url"], parameters["data_offset"], parameters["etag"], flush=True)
threading.Event().wait()
"""


@pytest.fixture
def seed() -> Iterator[tuple[subprocess.Popen[str], Endpoint]]:
    """A seed in a process of its own, of the image that `image_of((40 << 20, 1000), seed=1)` gives."""
    with subprocess.Popen(
        [sys.executable, "-c", SEED], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            if process.stdout is None:
                raise RuntimeError("the seed has no output")
            url, data_offset, etag = process.stdout.readline().split()
            yield process, Endpoint("http", {"url": url, "data_offset": data_offset, "etag": etag})
        finally:
            process.kill()


def test_another_process_gives_the_right_bytes(seed: tuple[subprocess.Popen[str], Endpoint]) -> None:
    """An image read from another process is that process's image."""
    target = image_of((40 << 20, 1000))
    reader = HttpTransport(Settings()).connect(seed[1], target, lambda: TOKEN, soon())
    reader.read(0, target.layout.image_bytes, soon())
    reader.close()
    assert content(image_of((40 << 20, 1000), seed=1)) == content(target)


def test_a_stopped_process_is_stalled(seed: tuple[subprocess.Popen[str], Endpoint]) -> None:
    """SIGSTOP gives SourceStalled after `stall_s`, well before the deadline; SIGCONT mends it."""
    process, endpoint = seed
    target = image_of((40 << 20, 1000))
    reader = HttpTransport(Settings(stall_s=0.5)).connect(endpoint, target, lambda: TOKEN, soon())
    reader.read(0, 1000, soon())
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(SourceStalled, match="sent nothing"):
        reader.read(0, target.layout.image_bytes, soon(600))
    with pytest.raises(SourceStalled, match="deadline"):
        reader.read(0, target.layout.image_bytes, time.monotonic() + 0.2)
    process.send_signal(signal.SIGCONT)
    reader.read(0, 5 * MIB, soon())
    reader.close()
    assert content(image_of((40 << 20, 1000), seed=1), 0, 5 * MIB) == content(target, 0, 5 * MIB)


def test_a_killed_process_is_gone(seed: tuple[subprocess.Popen[str], Endpoint]) -> None:
    """SIGKILL gives SourceGone, for a connection that is open and for a new one."""
    process, endpoint = seed
    target = image_of((40 << 20, 1000))
    reader = HttpTransport(Settings()).connect(endpoint, target, lambda: TOKEN, soon())
    reader.read(0, 1000, soon())
    process.kill()
    process.wait(30)
    with pytest.raises(SourceGone):
        reader.read(0, target.layout.image_bytes, soon())
    with pytest.raises(SourceGone):
        HttpTransport(Settings()).connect(endpoint, target, lambda: TOKEN, soon())
    reader.close()


def test_a_process_killed_in_mid_read_is_gone(seed: tuple[subprocess.Popen[str], Endpoint]) -> None:
    """SIGKILL while a read is under way ends it with SourceGone, not with a wait."""
    process, endpoint = seed
    target = image_of((40 << 20, 1000))
    reader = HttpTransport(Settings()).connect(endpoint, target, lambda: TOKEN, soon())
    begun = threading.Event()
    raised: list[type[RforkError]] = []

    def read_on() -> None:
        try:
            while True:
                reader.read(0, target.layout.image_bytes, soon(600))
                begun.set()
        except SourceGone as error:
            raised.append(type(error))

    thread = threading.Thread(target=read_on)
    thread.start()
    assert begun.wait(60)
    process.kill()
    thread.join(60)
    reader.close()
    assert [SourceGone] == raised


def test_http_speaks_the_oldest_tls_it_should() -> None:
    """Nothing below TLS 1.2 is offered to a server."""
    assert ssl.TLSVersion.TLSv1_2 == client_context(Settings().tls).minimum_version

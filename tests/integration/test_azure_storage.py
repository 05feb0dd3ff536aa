"""Azure Blob Storage as a store, on Azurite, Microsoft's emulator, if installed."""

from __future__ import annotations

import base64
import hashlib
import hmac
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from email.utils import formatdate
from pathlib import Path

import pytest

from rfork.errors import StorageAccessDenied, StorageChanged, StorageNotFound
from rfork.settings import StorageSettings
from rfork.storage.blob import BlobEntry, BlobStore, read_range
from rfork.storage.location import Location
from rfork.storage.registry import open_store
from tests.s3_stores import MIB, get, put, random_bytes

AZURITE = shutil.which("azurite-blob")
pytestmark = pytest.mark.skipif(
    AZURITE is None, reason="NO azurite-blob ON PATH (npm install azurite): az:// IS TESTED IN MEMORY ONLY"
)

ACCOUNT = "devstoreaccount1"
# Every Azurite has this key; its documentation lists it.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
SETTINGS = StorageSettings(staging_bytes=16 * MIB, max_attempts=2)


@pytest.fixture
def azurite(free_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Azurite with the container ``models``, and the environment for it."""
    process = subprocess.Popen(
        [
            str(AZURITE), "--silent", "--disableTelemetry", "--skipApiVersionCheck",
            "--location", str(tmp_path), "--blobPort", str(free_port),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )  # fmt: skip
    listening = threading.Event()

    def read() -> None:
        for line in process.stdout or ():
            if "successfully listen" in line:
                listening.set()

    reader = threading.Thread(target=read)
    reader.start()
    try:
        assert listening.wait(30)
        _make_container(f"http://127.0.0.1:{free_port}")
        monkeypatch.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
        monkeypatch.setenv("AZURITE_BLOB_STORAGE_URL", f"http://127.0.0.1:{free_port}")
        yield
    finally:
        process.kill()
        process.wait()
        reader.join()
        if process.stdout is not None:
            process.stdout.close()


def _make_container(url: str) -> None:
    date = formatdate(usegmt=True)
    signed = "\n".join(
        [
            *("PUT", *[""] * 11, f"x-ms-date:{date}", "x-ms-version:2021-08-06"),
            *(f"/{ACCOUNT}/{ACCOUNT}/models", "restype:container"),
        ]
    )
    digest = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    request = urllib.request.Request(
        f"{url}/{ACCOUNT}/models?restype=container",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": "2021-08-06",
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}",
        },
    )
    with urllib.request.urlopen(request) as response:
        assert 201 == response.status


@pytest.fixture
def store(azurite: None) -> Iterator[BlobStore]:
    """A folder of the container."""
    with closing(open_store(Location.parse("az://models/llama"), SETTINGS)) as opened:
        yield opened


def test_azure_operations(store: BlobStore) -> None:
    """Blobs are written, listed, read, kept if they exist where requested, and removed."""
    sizes = (0, 1, 2 * MIB, 9 * MIB)
    for size in sizes:
        put(store, f"blob {size}", random_bytes(size))
        put(store, f"blob {size}", b"another", replace=False)
        assert random_bytes(size) == get(store, f"blob {size}")
    names = sorted(f"blob {size}" for size in sizes)
    assert [BlobEntry(name, int(name.split()[1])) for name in names] == list(store.list())
    store.remove("blob 0")
    assert names[1:] == [entry.name for entry in store.list("blob")]


def test_azure_errors(store: BlobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing, replaced and interrupted blobs and denied access are reported as such."""

    def interrupted() -> None:
        with store.write("gone") as writer:
            writer.write([memoryview(bytes(9 * MIB))])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    with pytest.raises(StorageNotFound, match="gone: no such object"):
        store.open("gone")
    put(store, "blob", b"abc")
    with closing(store.open("blob")) as blob:
        put(store, "blob", b"xyz")
        with pytest.raises(StorageChanged, match="was replaced"):
            read_range(blob, 0, 3)
    with (
        closing(open_store(Location.parse("az://nothing/"), SETTINGS)) as other,
        pytest.raises(StorageNotFound, match="no such bucket"),
    ):
        list(other.list())
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"wrong").decode())
    with (
        closing(open_store(Location.parse("az://models/llama"), SETTINGS)) as other,
        pytest.raises(StorageAccessDenied, match="access denied"),
    ):
        other.open("blob")

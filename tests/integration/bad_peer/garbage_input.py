"""Malformed requests, and requests that start but never finish."""

from __future__ import annotations

import random
import struct

CONNECTIONS = 300


HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HTTP2_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
PARTIAL_REQUESTS = {
    "silent": b"",
    "half a head": b"GET /v1/image HT",
    "a preface": HTTP2_PREFACE,
    "settings": HTTP2_PREFACE + HTTP2_SETTINGS,
}


def frame(frame_type: int, flags: int, stream: int, body: bytes) -> bytes:
    """Return an HTTP/2 frame (RFC 9113, section 4.1)."""
    return struct.pack("!I", len(body))[1:] + bytes([frame_type, flags]) + struct.pack("!I", stream) + body


TLS_CLIENT_HELLO = bytes.fromhex("16030100c0010000bc0303") + bytes(181)
RANDOM = random.Random(7)
GARBAGE = {
    "random bytes": RANDOM.randbytes(1 << 16),
    "zeros": bytes(1 << 20),
    "no line end": b"A" * (10 << 20),
    "a TLS hello": TLS_CLIENT_HELLO,
    "huge headers": b"GET /v1/image HTTP/1.1\r\nHost: a\r\n" + b"X-A: " + b"a" * (4 << 20) + b"\r\n\r\n",
    "many headers": b"GET /v1/image HTTP/1.1\r\nHost: a\r\n" + b"A: b\r\n" * 500_000 + b"\r\n",
    "two lengths": b"GET /v1/image HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 0\r\n\r\n"
    b"GET /v1/image HTTP/1.1\r\nHost: a\r\n\r\n",
    "length and chunked": b"POST /v1/image HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/image HTTP/1.1\r\nHost: a\r\n\r\n",
    "a negative length": b"GET /v1/image HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n" * 100,
    "a huge length": b"GET /v1/image HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"9" * 8000 + b"\r\n\r\n",
    "a thousand requests": b"GET /v1/image HTTP/1.1\r\nHost: a\r\n\r\n" * 1000,
    "junk frames": HTTP2_PREFACE + HTTP2_SETTINGS + RANDOM.randbytes(1 << 16),
    "a frame too long": HTTP2_PREFACE + HTTP2_SETTINGS + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(1 << 20),
    "a thousand pings": HTTP2_PREFACE + HTTP2_SETTINGS + frame(6, 0, 0, bytes(8)) * 1000,
    "a flood of settings": HTTP2_PREFACE + HTTP2_SETTINGS * 20_000,
    "headers without end": HTTP2_PREFACE
    + HTTP2_SETTINGS
    + frame(1, 0, 1, bytes(16)).join([b""] * 2)
    + frame(9, 0, 1, b"\x00\x01a\x01b" * 1000) * 500,
    "streams opened and reset": HTTP2_PREFACE
    + HTTP2_SETTINGS
    + b"".join(frame(1, 4, n, b"\x82") + frame(3, 0, n, bytes(4)) for n in range(1, 20_000, 2)),
    "window of zero": HTTP2_PREFACE + HTTP2_SETTINGS + frame(8, 0, 0, bytes(4)) * 100,
}

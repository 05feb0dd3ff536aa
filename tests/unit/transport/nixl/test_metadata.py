"""The structure of NIXL's metadata is checked before NIXL loads it."""

from __future__ import annotations

import struct

import pytest

from rfork.errors import SourceCorrupt
from rfork.transport.nixl.metadata import HEADER, check_metadata

NAME = "an-agent"


def field(name: bytes, value: bytes) -> bytes:
    """Return one field in NIXL's format."""
    return name + struct.pack("<Q", len(value)) + value + b"|"


def number(name: bytes, value: int) -> bytes:
    """Return one field with a number."""
    return field(name, struct.pack("<Q", value))


def metadata(
    *, backends: int = 1, sections: int = 1, regions: int = 2, backend: bytes = b"UCX", memory: int = 0, size: int = 35
) -> bytes:
    """Return metadata of one backend and one section with two regions; the numbers may be wrong."""
    return b"".join(
        [
            HEADER,
            field(b"Agent", NAME.encode()),
            number(b"Conns", backends),
            field(b"t", b"UCX"),
            field(b"c", b"an address | with a separator"),
            field(b"", b"MemSection"),
            number(b"nixlSecElms", sections),
            field(b"bknd", backend),
            field(b"nixlDList", b"nixlSDList"),
            field(b"t", struct.pack("<I", memory)),
            number(b"n", regions),
            field(b"", bytes(size)),
            field(b"", bytes(size)),
        ]
    )


@pytest.mark.parametrize("memory", [0, 1])
def test_valid_metadata_is_accepted(memory: int) -> None:
    """Regions in host memory or on a GPU."""
    check_metadata(metadata(memory=memory), NAME)


@pytest.mark.parametrize(
    "malformed",
    [
        b"",
        HEADER,
        metadata(backends=0),
        metadata(backends=2),
        metadata(backends=2**64 - 1),
        metadata(sections=0),
        metadata(sections=2),
        metadata(sections=2**63),
        metadata(regions=1),
        metadata(regions=3),
        metadata(regions=2**62),
        metadata(backend=b"POSIX"),
        metadata(memory=4),
        metadata(size=23),
        metadata() + b"|",
        metadata().replace(b"nixlSDList", b"nixlXDList"),
        metadata().replace(struct.pack("<Q", 35), struct.pack("<Q", 2**64 - 1), 1),
    ],
)
def test_malformed_metadata_is_corrupt(malformed: bytes) -> None:
    """Wrong counts, lengths, names and types."""
    with pytest.raises(SourceCorrupt):
        check_metadata(malformed, NAME)


def test_truncated_metadata_is_corrupt() -> None:
    """At every byte."""
    valid = metadata()
    for end in range(len(valid)):
        with pytest.raises(SourceCorrupt):
            check_metadata(valid[:end], NAME)


def test_metadata_of_another_agent_is_corrupt() -> None:
    """Reads name the agent that the source described."""
    with pytest.raises(SourceCorrupt, match="another agent"):
        check_metadata(metadata(), "another")

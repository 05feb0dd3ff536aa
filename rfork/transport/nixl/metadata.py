"""Checks another agent's metadata before NIXL loads it: a wrong length or count makes NIXL loop or crash.

The format is NIXL's own: fields with a name, a length of 8 bytes, the value and a separator. What UCX put into
them, its addresses and keys, is opaque: NIXL passes it to UCX, which trusts it.
"""

from __future__ import annotations

import struct
from typing import Final

from rfork.errors import SourceCorrupt

HEADER: Final = b"nixlSerDes|"
SEPARATOR: Final = b"|"
MAX_BACKENDS: Final = 16
MAX_SECTIONS: Final = 64
MEMORY_TYPES: Final = frozenset({0, 1})
"""Memory types of a section: host and GPU."""
REGION_BYTES: Final = 24
"""Address, length and device of a region, before its keys."""


class MetadataParser:
    """Reads the fields of metadata in order. Raises SourceCorrupt for anything unexpected."""

    def __init__(self, metadata: bytes) -> None:
        self._metadata = metadata
        self._at = 0
        self.expect(HEADER)

    def expect(self, text: bytes) -> None:
        """Skip this text."""
        if not self._metadata.startswith(text, self._at):
            raise SourceCorrupt(f"nixl's metadata lacks {text[:20]!r} at byte {self._at}")
        self._at += len(text)

    def field(self, name: bytes) -> bytes:
        """Return the value of the next field, which has this name."""
        self.expect(name)
        begin = self._at + 8
        (length,) = struct.unpack("<Q", self._metadata[self._at : begin].ljust(8, b"\xff"))
        if begin + length > len(self._metadata):
            raise SourceCorrupt(f"nixl's metadata ends within {name!r}")
        self._at = begin + int(length)
        self.expect(SEPARATOR)
        return self._metadata[begin : begin + length]

    def count(self, name: bytes, limit: int) -> int:
        """Return the next field as a number of at most `limit`."""
        value = self.field(name)
        number = int.from_bytes(value, "little")
        if len(value) != 8 or number > limit:
            raise SourceCorrupt(f"nixl's metadata has an invalid number {name!r}")
        return number

    def end(self) -> None:
        """Check that nothing follows."""
        if self._at != len(self._metadata):
            raise SourceCorrupt("nixl's metadata has more bytes than it describes")


def check_metadata(metadata: bytes, agent: str) -> None:
    """Check the structure of an agent's metadata. Raises SourceCorrupt."""
    parser = MetadataParser(metadata)
    if parser.field(b"Agent") != agent.encode():
        raise SourceCorrupt("nixl's metadata is that of another agent")
    backends: set[bytes] = set()
    for _ in range(parser.count(b"Conns", MAX_BACKENDS)):
        backends.add(parser.field(b"t"))
        parser.field(b"c")
    if parser.field(b"") != b"MemSection":
        raise SourceCorrupt("nixl's metadata has no memory section")
    for _ in range(parser.count(b"nixlSecElms", MAX_SECTIONS)):
        if parser.field(b"bknd") not in backends or parser.field(b"nixlDList") != b"nixlSDList":
            raise SourceCorrupt("nixl's metadata has an unknown list of regions")
        memory_type = parser.field(b"t")
        if len(memory_type) != 4 or int.from_bytes(memory_type, "little") not in MEMORY_TYPES:
            raise SourceCorrupt("nixl's metadata has an unknown type of memory")
        # Each region has a field, so a wrong number ends at the end of the bytes.
        for _ in range(parser.count(b"n", len(metadata))):
            if len(parser.field(b"")) < REGION_BYTES:
                raise SourceCorrupt("nixl's metadata has an incomplete region")
    parser.end()

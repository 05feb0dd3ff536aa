"""Protocol of nixl on a channel's control streams, and the description of the source's agent.

The reader sends requests; the source replies once to each, in order, with the result or with `encode_error`::

    {"operation": "describe", "page": n}             {"page": text, "pages": total}
    {"operation": "acquire", "token", "begin", "end", "release"}
                                                     {"released", "granted": bytes}
    {"operation": "release"}                         {"released": 1}

*Describe* starts an agent for this reader. *Granted* are the first bytes of the requested range: the reader
reads them directly from the source's memory, and they do not change until they are released or the stream
closes. A stream has at most one granted range; an `acquire` with `release` 1 releases it and requests the next.
Its reply, even an error, has `released` 1 if the release is confirmed: only then does the reader trust the bytes.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rfork.errors import SourceCorrupt
from rfork.image.chunks import MIB
from rfork.transport.nixl.agent import DeviceMemory, FabricProtocol

SLICE_BYTES: Final[dict[FabricProtocol, int]] = {"tcp": 64 * MIB, "rdma": 256 * MIB, "backend": 256 * MIB}
"""Maximum bytes granted at once."""
PAGE_CHARS: Final = 48_000
MAX_PAGES: Final = 2048
PROBE_BYTES: Final = 16

VERSION: Final = "version"
"""Endpoint parameter: the release of NIXL."""
BACKEND: Final = "backend"
"""Endpoint parameter: the name of NIXL's backend."""
PROTOCOL: Final = "protocol"
"""Endpoint parameter: rdma, tcp, or backend if another backend than UCX decides."""

Address = Annotated[int, Field(ge=0, lt=2**64)]


class AgentDescription(BaseModel):
    """Everything that a reader needs to read from the agent which the source has started for it."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")

    agent: Annotated[str, Field(min_length=1, max_length=64)]
    metadata: bytes
    probe: Address
    """Address of `PROBE_BYTES` bytes that prove that this source is read."""
    nonce: bytes
    devices: list[tuple[Address, Address, Annotated[int, Field(ge=0, lt=1024)]]] = []
    """Regions on GPUs: address, length and index of the GPU."""

    def memory(self) -> list[DeviceMemory]:
        """Return the regions on GPUs."""
        return [DeviceMemory(*region) for region in self.devices]


@dataclass(frozen=True, slots=True)
class PagedDescription:
    """A description in pages that fit into control messages."""

    pages: Sequence[str]

    @classmethod
    def of(cls, description: AgentDescription) -> PagedDescription:
        """Split a description into pages."""
        text = base64.b64encode(description.model_dump_json().encode()).decode()
        return cls([text[at : at + PAGE_CHARS] for at in range(0, len(text), PAGE_CHARS)])

    def joined(self) -> AgentDescription:
        """Return the description. Raises SourceCorrupt if it is malformed."""
        try:
            return AgentDescription.model_validate_json(base64.b64decode("".join(self.pages), validate=True))
        except (binascii.Error, ValidationError, ValueError) as error:
            raise SourceCorrupt(f"the source's description of its agent is malformed: {type(error).__name__}") from None

"""Source side: one agent for each reader, and grants of ranges over its control streams.

Over RDMA bytes are read without this process. But it authorizes, meters and fences each range, and the reader
reports when it has finished; and when a channel ends, its agent is destroyed, which revokes the reader's keys.
"""

from __future__ import annotations

import secrets
import threading
import time
from typing import Final

import torch

from rfork.errors import (
    LeaseRejected,
    RforkError,
    SourceBusy,
    SourceCorrupt,
    SourceWeightsChanged,
    TransportUnavailable,
)
from rfork.image.memory import Image
from rfork.logs import logger
from rfork.thread_priority import lower_thread_priority
from rfork.transport.base import AccessGate, ControlStream, Endpoint, StatelessExporter
from rfork.transport.nixl import protocol
from rfork.transport.nixl.agent import Fabric, NixlAgent
from rfork.transport.nixl.library import library_state
from rfork.transport.nixl.protocol import AgentDescription, PagedDescription
from rfork.transport.same_host.connection import Message, decode, encode, encode_error, get_int, get_str

RECEIVE_TIMEOUT_S: Final = 3600.0
"""Long, because a reader may be silent: its control streams close with its channel, and the channel with its
lease.
"""
MAX_READERS: Final = 64
"""Each has an agent: a thread, about ten descriptors, and a registration of the image."""

log = logger(__name__)


class ReaderSlot:
    """A reader's channel: its address, its control streams, and its agent once it has requested one."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.lock = threading.Lock()
        self.streams: set[ControlStream] = set()
        self.revoked = False
        self.agent: NixlAgent | None = None
        self.description: PagedDescription | None = None
        self.probe = torch.frombuffer(bytearray(secrets.token_bytes(protocol.PROBE_BYTES)), dtype=torch.uint8)
        """Registered memory, kept alive here."""

    def revoke(self) -> None:
        """Close the streams and destroy the agent: nothing reads after that. Waits for a registration."""
        self.revoked = True
        for stream in tuple(self.streams):
            stream.close()
        with self.lock:
            if self.agent is not None:
                self.agent.close()


class NixlExporter(StatelessExporter):
    """One image, readable by the readers that have an open channel. Runs on the source.

    Limits of NIXL: a reader that has an agent of this source can read the complete image without a grant, and
    write it, until its channel ends. Within a host and over TCP, so can it with all memory of this process.

    Raises MissingExtra or TransportUnavailable if no agent can be started here.
    """

    def __init__(self, image: Image, gate: AccessGate, fabric: Fabric, *, idle_timeout_s: float, nice: int) -> None:
        # Fails here rather than for each reader, and loads the libraries before the inference engine serves.
        NixlAgent(fabric).close()
        self._image: Image | None = image
        self._image_bytes = image.layout.image_bytes
        self._gate = gate
        self._fabric = fabric
        self._idle_timeout_s, self._nice = idle_timeout_s, nice
        self._lock = threading.Lock()
        self._slots: dict[str, ReaderSlot] = {}  # by channel
        self._closed = False
        parameters = {
            protocol.VERSION: library_state().version,
            protocol.BACKEND: fabric.backend,
            protocol.PROTOCOL: fabric.protocol,
        }
        self._endpoint = Endpoint("nixl", parameters, tuple(image.segments(0, image.layout.image_bytes)))
        if fabric.protocol == "tcp":
            log.warning(
                "nixl over plain TCP: while a fork reads, every process on its host can read and write all memory of "
                "this process",
                hint="unset RFORK_ALLOW_UNAUTHENTICATED_TCP unless these hosts are fully trusted",
            )

    def endpoint(self) -> Endpoint:
        """Return the library's version and the addresses of the image; the keys are sent on the control stream."""
        return self._endpoint

    def authorize_peer(self, channel_id: str, address: str) -> None:
        """See `Exporter.authorize_peer`. Raises SourceBusy if there are too many readers."""
        with self._lock:
            if self._closed:
                raise SourceBusy("nixl no longer serves this image")
            if len(self._slots) >= MAX_READERS:
                raise SourceBusy(f"nixl has {MAX_READERS} readers already")
            self._slots[channel_id] = ReaderSlot(address)

    def revoke_peer(self, channel_id: str) -> None:
        """Destroy the reader's agent; see `Exporter.revoke_peer`."""
        with self._lock:
            slot = self._slots.pop(channel_id, None)
        if slot is not None:
            slot.revoke()

    def run_control_stream(self, channel_id: str, stream: ControlStream) -> None:
        """See `Exporter.run_control_stream`."""
        lower_thread_priority(self._nice)
        with self._lock:
            slot = self._slots.get(channel_id)
        if slot is None:
            stream.close()
            return
        slot.streams.add(stream)
        try:
            if slot.revoked:  # concurrently with `add`
                return
            while True:
                request = decode(stream.receive(time.monotonic() + RECEIVE_TIMEOUT_S))
                try:
                    self._respond(slot, stream, request)
                except SourceCorrupt:
                    raise
                except (LeaseRejected, SourceBusy, SourceWeightsChanged, TransportUnavailable) as error:
                    stream.send(encode(encode_error(error)))
        except RforkError as error:
            log.debug("reader disconnected", transport="nixl", reason=str(error))
        finally:
            stream.close()
            slot.streams.discard(stream)

    def close(self) -> None:
        """Destroy all agents; reads in progress fail. Idempotent."""
        with self._lock:
            self._closed = True
            slots = list(self._slots.values())
            self._slots.clear()
        for slot in slots:
            slot.revoke()
        self._image = None

    def _respond(self, slot: ReaderSlot, stream: ControlStream, request: Message) -> None:
        operation = get_str(request, "operation")
        if operation == "describe":
            pages = self._description(slot).pages
            page = get_int(request, "page")
            if not 0 <= page < len(pages):
                raise SourceCorrupt("a reader requested an unknown page")
            stream.send(encode({"page": pages[page], "pages": len(pages)}))
        elif operation == "acquire":
            self._grant_ranges(stream, request)
        else:
            raise SourceCorrupt(f"unknown request {operation[:40]!r}")

    def _description(self, slot: ReaderSlot) -> PagedDescription:
        """Return the description of the reader's agent; start the agent first, if there is none.

        Raises TransportUnavailable if that fails.
        """
        with slot.lock:
            image = self._image
            if slot.revoked or image is None:
                raise SourceBusy("the reader's channel is closed")
            if slot.description is None:
                started_at = time.monotonic()
                agent = NixlAgent(self._fabric)
                try:
                    slot.description = self._export(agent, slot, image)
                except BaseException:
                    agent.close()
                    raise
                slot.agent = agent
                log.debug("agent started", transport="nixl", seconds=round(time.monotonic() - started_at, 3))
            return slot.description

    def _export(self, agent: NixlAgent, slot: ReaderSlot, image: Image) -> PagedDescription:
        agent.register(image)
        agent.register_regions([(slot.probe.data_ptr(), slot.probe.numel())])
        if self._fabric.protocol == "tcp":
            agent.packet_filter.allow("reader", slot.address)
        description = AgentDescription(
            agent=agent.name,
            metadata=agent.metadata(),
            probe=slot.probe.data_ptr(),
            nonce=bytes(slot.probe.tolist()),
            devices=[(region.address, region.length, region.device) for region in agent.memory.on_devices],
        )
        paged = PagedDescription.of(description)
        if len(paged.pages) > protocol.MAX_PAGES:
            raise TransportUnavailable(
                f"the keys of the image's memory have {len(description.metadata)} bytes",
                hint="use RFORK_TRANSPORTS=http, or load the model into fewer, larger allocations",
            )
        return paged

    def _grant_ranges(self, stream: ControlStream, request: Message) -> None:
        """Grant ranges one after the other, until the reader releases one without requesting another.

        A refusal of the next range still confirms the release of the previous one: its guard has ended.
        """
        released = 0
        while get_str(request, "operation") == "acquire":
            if request.get("release", 0) != released:
                raise SourceCorrupt("a reader requested another range before releasing its range, or released none")
            try:
                request = self._grant_range(stream, request, released)
            except (LeaseRejected, SourceBusy, SourceWeightsChanged) as error:
                stream.send(encode({**encode_error(error), "released": released}))
                return
            released = 1
        if get_str(request, "operation") != "release":
            raise SourceCorrupt("a reader sent another request before releasing its range")
        stream.send(encode({"released": 1}))

    def _grant_range(self, stream: ControlStream, request: Message, released: int) -> Message:
        """Grant the first bytes of a range until the reader sends its next request, which releases them.

        Return that request: it arrived while the bytes were granted, so the reader has read them. Raises if the
        read is aborted or times out. No guard is kept while the range waits for the egress budget.
        """
        token, begin, end = get_str(request, "token"), get_int(request, "begin"), get_int(request, "end")
        if not 0 <= begin < end <= self._image_bytes:
            raise SourceCorrupt(f"a reader requested [{begin}, {end}), which is not within the image")
        fork_id = self._gate.authorize(token, begin, end)
        size = min(end - begin, protocol.SLICE_BYTES[self._fabric.protocol])
        granted_end = begin + self._gate.acquire_bytes(size, fork_id)
        with self._gate.read_guard(token, begin, granted_end, stream.close):
            try:
                stream.send(encode({"released": released, "granted": granted_end - begin}))
                return decode(stream.receive(time.monotonic() + self._idle_timeout_s))
            except BaseException:
                # Close before the guard ends: a later release must not be accepted.
                stream.close()
                raise

"""Control of the fake driver library: device memory for tests, faults, and records of what the program did."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from ctypes import c_char_p, c_int, c_long, c_longlong, c_size_t, c_ulonglong
from enum import IntEnum, IntFlag
from typing import Any, Final, Literal

import torch

from tests.fake_libcuda.build import library_path

GRANULARITY: Final = 2 << 20
MAX_DEVICES: Final = 16
MAX_STREAMS: Final = 1 << 20
WAIT_S: Final = 30
RESOURCES: Final = ("ipc", "memory", "mapping", "reservation", "pinned", "stream", "event")
"""Types of resources that a program must release: opened legacy handles, references of allocation handles, mappings,
address reservations, ranges of pinned memory, streams, events.
"""

_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    # Name: result, arguments.
    "fake_allocate": (c_ulonglong, c_size_t, c_int, c_size_t),
    "fake_free": (c_int, c_ulonglong),
    "fake_write": (c_int, c_ulonglong, c_char_p, c_size_t),
    "fake_read": (c_int, c_ulonglong, c_char_p, c_size_t),
    "fake_device_of": (c_int, c_ulonglong),
    "fake_set_devices": (None, c_int),
    "fake_set_version": (None, c_int),
    "fake_set_peer_access": (None, c_int),
    "fake_set_capturing": (None, c_int),
    "fake_set_paused": (None, c_int),
    "fake_set_handle_types": (None, c_int),
    "fake_set_read_only": (None, c_int),
    "fake_set_hidden_access": (None, c_int),
    "fake_set_delay_us": (None, c_int),
    "fake_set_seed": (None, c_ulonglong),
    "fake_set_uuid": (None, c_int, c_char_p),
    "fake_set_attribute": (None, c_int, c_int, c_int),
    "fake_fail_copies": (None, c_int),
    "fake_fail_open": (None, c_int, c_int),
    "fake_violation_count": (c_int,),
    "fake_violation": (c_char_p, c_int),
    "fake_forbidden_call_count": (c_int,),
    "fake_forbidden_call": (c_char_p, c_int),
    "fake_pageable_copies": (c_long,),
    "fake_completed_copies": (c_long,),
    "fake_copied_bytes": (c_long,),
    "fake_queued_copies": (c_long,),
    "fake_wait_busy_streams": (c_int, c_int, c_int, c_int),
    "fake_exports": (c_long,),
    "fake_flushes": (c_long, c_int),
    "fake_contexts": (c_int, c_int),
    "fake_thread_depth": (c_int,),
    "fake_thread_capture_mode": (c_int,),
    "fake_open_handles": (c_long, c_char_p),
    "fake_reset": (None,),
    "fake_forget_contexts": (None,),
    "fake_constant": (c_longlong, c_char_p),
}


class CopyFailure(IntEnum):
    """Time at which copies fail with error 700."""

    NEVER = 0
    AT_QUEUE = 1
    AT_QUERY = 2


class OpenFailure(IntFlag):
    """Types of handles that cannot be opened."""

    DESCRIPTOR = 1
    FABRIC = 8
    LEGACY = 16


class FakeGpu:
    """Devices of the fake driver in this process. All instances control the same library.

    Tensors in device memory are CPU tensors to torch, at addresses that the host cannot access.
    """

    def __init__(self) -> None:
        self.path = str(library_path())
        self.library = ctypes.CDLL(self.path)
        for name, (result, *arguments) in _SIGNATURES.items():
            function = getattr(self.library, name)  # cached, unlike library[name]
            function.restype, function.argtypes = result, arguments
        self.max_pageable_copies = 0
        """Number of copies from or to pageable host memory above which `check` fails."""
        self._allocated: set[int] = set()
        self._devices: set[int] = set()

    def allocate(
        self,
        nbytes: int,
        device: int = 0,
        kind: Literal["legacy", "expandable"] = "legacy",
        piece: int = GRANULARITY,
    ) -> torch.Tensor:
        """Return zeroed bytes in device memory: of cuMemAlloc (`legacy`), or mapped in adjacent pieces of `piece`
        bytes into a larger reservation, as torch's expandable segments are.
        """
        address = int(self.library.fake_allocate(nbytes, device, piece if kind == "expandable" else 0))
        if not address:
            raise MemoryError(f"the fake device {device} cannot allocate {nbytes} bytes")
        self._allocated.add(address)
        self._devices.add(device)
        return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)

    def free(self, tensor: torch.Tensor) -> None:
        """Free memory of `allocate`. Any access to the tensor afterwards crashes, as before."""
        address = tensor.untyped_storage().data_ptr()
        if not self.library.fake_free(address):
            raise ValueError("the tensor is not in device memory, or it was freed")
        self._allocated.discard(address)

    def free_all(self) -> None:
        """Free all memory that this instance allocated."""
        while self._allocated:
            self.library.fake_free(self._allocated.pop())

    def write(self, tensor: torch.Tensor, data: bytes) -> None:
        """Write to the contiguous memory of a tensor, without the driver."""
        if not self.library.fake_write(tensor.data_ptr(), data, len(data)):
            raise ValueError("the range is not in device memory")

    def read(self, tensor: torch.Tensor) -> bytes:
        """Return the contiguous memory of a tensor, without the driver."""
        data = ctypes.create_string_buffer(tensor.nbytes)
        if not self.library.fake_read(tensor.data_ptr(), data, tensor.nbytes):
            raise ValueError("the range is not in device memory")
        return data.raw

    def device_of(self, memory: torch.Tensor | torch.UntypedStorage) -> torch.device:
        """Return the device of memory, freed device memory included."""
        if memory.device.type != "cpu":
            return memory.device
        device = self.library.fake_device_of(memory.data_ptr())
        return torch.device("cpu") if device < 0 else torch.device("cuda", device)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """Within the context, another thread captures a CUDA graph in global mode."""
        self.library.fake_set_capturing(1)
        try:
            yield
        finally:
            self.library.fake_set_capturing(0)

    @contextlib.contextmanager
    def paused_copies(self) -> Iterator[None]:
        """Within the context, copies stay queued."""
        self.library.fake_set_paused(1)
        try:
            yield
        finally:
            self.library.fake_set_paused(0)

    def wait_until_queued(self, streams: int = 1) -> None:
        """Wait until copies are queued on this many streams. Used within `paused_copies`."""
        if not self.library.fake_wait_busy_streams(streams, MAX_STREAMS, WAIT_S):
            raise TimeoutError(f"no copies were queued on {streams} streams")

    def wait_until_idle(self) -> None:
        """Wait until no copy is queued."""
        if not self.library.fake_wait_busy_streams(0, 0, WAIT_S):
            raise TimeoutError("copies did not run")

    @contextlib.contextmanager
    def failing_copies(self, when: CopyFailure) -> Iterator[None]:
        """Within the context, copies fail with error 700; afterwards the devices have recovered."""
        self.library.fake_fail_copies(when)
        try:
            yield
        finally:
            self.library.fake_fail_copies(CopyFailure.NEVER)

    @contextlib.contextmanager
    def failing_open(
        self, code: int, types: OpenFailure = OpenFailure.DESCRIPTOR | OpenFailure.FABRIC | OpenFailure.LEGACY
    ) -> Iterator[None]:
        """Within the context, opening handles of these types fails with this code."""
        self.library.fake_fail_open(code, types)
        try:
            yield
        finally:
            self.library.fake_fail_open(0, types)

    def set_devices(self, count: int) -> None:
        """Set the number of visible devices."""
        self.library.fake_set_devices(count)

    def set_uuid(self, device: int, uuid: bytes) -> None:
        """Set the 16 bytes that identify a device in all processes."""
        if len(uuid) != 16:
            raise ValueError(f"a UUID has 16 bytes, not {len(uuid)}")
        self.library.fake_set_uuid(device, uuid)

    def set_attribute(self, device: int, name: str, value: int) -> None:
        """Set an attribute of a device by its name in cuda.h without the prefix CU_DEVICE_ATTRIBUTE_."""
        self.library.fake_set_attribute(device, self.constant(f"CU_DEVICE_ATTRIBUTE_{name}"), value)

    def set_peer_access(self, enabled: bool) -> None:
        """Set if devices can address each other's memory."""
        self.library.fake_set_peer_access(enabled)

    def set_version(self, version: int) -> None:
        """Set the driver's version, as 1000 * major + 10 * minor."""
        self.library.fake_set_version(version)

    def set_handle_types(self, types: OpenFailure) -> None:
        """Set the types of handles of mapped memory."""
        self.library.fake_set_handle_types(types)

    def set_read_only_mappings(self, supported: bool) -> None:
        """Set if memory can be mapped read-only."""
        self.library.fake_set_read_only(supported)

    def set_hidden_access(self, enabled: bool) -> None:
        """Set if memory of GPUs that this process does not see can be opened: so it is with CUDA_VISIBLE_DEVICES,
        but not in a container without the GPU.
        """
        self.library.fake_set_hidden_access(enabled)

    def set_seed(self, seed: int, delay_us: int = 200) -> None:
        """Set the order and delays of the copies that follow."""
        self.library.fake_set_seed(seed)
        self.library.fake_set_delay_us(delay_us)

    def reset(self) -> None:
        """Forget records, errors and retained contexts, and restore all settings. Memory and streams stay."""
        self.library.fake_reset()
        self.library.fake_forget_contexts()

    @property
    def violations(self) -> list[str]:
        """Actions at which a GPU would have failed or corrupted data."""
        return self._texts("fake_violation")

    @property
    def forbidden_calls(self) -> list[str]:
        """Calls that would have invalidated the capture of another thread."""
        return self._texts("fake_forbidden_call")

    @property
    def pageable_copies(self) -> int:
        """Number of copies from or to host memory that was not pinned."""
        return int(self.library.fake_pageable_copies())

    @property
    def completed_copies(self) -> int:
        """Number of copies that have run without an error."""
        return int(self.library.fake_completed_copies())

    @property
    def copied_bytes(self) -> int:
        """Number of bytes of the completed copies."""
        return int(self.library.fake_copied_bytes())

    @property
    def queued_copies(self) -> int:
        """Number of copies that have not run."""
        return int(self.library.fake_queued_copies())

    @property
    def exports(self) -> int:
        """Number of handles that were created for other processes."""
        return int(self.library.fake_exports())

    @property
    def open_handles(self) -> dict[str, int]:
        """Number of resources that the program has not released, for each type of `RESOURCES` that has any."""
        counts = {name: int(self.library.fake_open_handles(name.encode())) for name in RESOURCES}
        return {name: count for name, count in counts.items() if count}

    @property
    def contexts(self) -> set[int]:
        """Devices whose primary context was retained."""
        return {device for device in range(MAX_DEVICES) if self.library.fake_contexts(device)}

    @property
    def flushes(self) -> dict[int, int]:
        """Number of flushes of RDMA writes for each device that had any."""
        counts = {device: int(self.library.fake_flushes(device)) for device in range(MAX_DEVICES)}
        return {device: count for device, count in counts.items() if count}

    @property
    def thread_depth(self) -> int:
        """Number of contexts on the calling thread's stack."""
        return int(self.library.fake_thread_depth())

    @property
    def thread_capture_mode(self) -> int:
        """Capture mode of the calling thread."""
        return int(self.library.fake_thread_capture_mode())

    def check(self) -> None:
        """Raise AssertionError if the program broke a rule, copied pageable host memory more often than
        `max_pageable_copies`, or created a context on a device without memory of this instance.
        """
        assert [] == self.violations, self.violations
        assert [] == self.forbidden_calls, self.forbidden_calls
        assert self.max_pageable_copies >= self.pageable_copies
        assert set() == self.contexts - self._devices

    def constant(self, name: str) -> int:
        """Return a constant of cuda.h, or the size of a type (`sizeof CUuuid`)."""
        value = int(self.library.fake_constant(name.encode()))
        if value < 0:
            raise KeyError(name)
        return value

    def _texts(self, name: str) -> list[str]:
        count, text = getattr(self.library, f"{name}_count")(), getattr(self.library, name)
        return [text(index).decode() for index in range(count)]

"""Physical limits: as many bytes over one loopback socket, and as much untouched memory written."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import threading
import time

from benchmarks.memory_reserve import MemoryReserve

STEP = 4 << 20


def socket_seconds(size: int) -> float:
    """Return the seconds to send `size` bytes between two threads over a local TCP connection."""
    memory = memoryview(bytearray(STEP))
    for offset in range(0, STEP, 4096):
        memory[offset] = 1
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sender = threading.Thread(target=_send, args=(listening, size), daemon=True)
        sender.start()
        with socket.create_connection(listening.getsockname()) as receiving:
            began, left = time.perf_counter(), size
            while left:
                left -= receiving.recv_into(memory, min(left, STEP))
            seconds = time.perf_counter() - began
        sender.join()
    return seconds


def _send(listening: socket.socket, size: int) -> None:
    block = memoryview(bytes(STEP))
    with listening.accept()[0] as sending:
        for begin in range(0, size, STEP):
            sending.sendall(block[: min(STEP, size - begin)])


def memory_seconds(size: int) -> float:
    """Return the seconds to write `size` bytes of new memory with all cores, as every loader has to.

    The kernel clears each page before it is written for the first time.
    """
    cores = len(os.sched_getaffinity(0))
    part = -(-size // cores)
    reserve = MemoryReserve()
    reserve.acquire(size)
    reserve.release()
    with mmap.mmap(-1, part * cores, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        start_barrier = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        threads = [
            threading.Thread(target=ctypes.memset, args=(start_barrier + core * part, 1, part)) for core in range(cores)
        ]
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - began

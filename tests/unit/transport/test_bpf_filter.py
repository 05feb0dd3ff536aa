"""The packet filter of an engine's ports: the packets that the program passes."""

from __future__ import annotations

import os
import struct
from ipaddress import ip_address
from pathlib import Path

import pytest

from rfork.errors import SourceBusy
from rfork.transport.bpf_filter import (
    MAX_ADDRESSES,
    Instruction,
    PacketFilter,
    build_bpf,
    duplicate_of,
)

IP_HEADER = 0xFFF00000
MAX_PROGRAM_LENGTH = 4096
"""BPF_MAXINSNS: the kernel's limit."""


def packet(source: str) -> bytes:
    """Return the IP header of a packet from this address."""
    address = ip_address(source)
    if address.version == 4:
        return bytes([0x45]) + bytes(11) + address.packed + bytes(4)
    return bytes([0x60]) + bytes(7) + address.packed + bytes(16)


def passes(steps: tuple[Instruction, ...], header: bytes) -> bool:
    """Interpret a program on a packet like the kernel."""
    register, at = 0, 0
    while True:
        code, if_true, if_false, operand = steps[at]
        at += 1
        match code:
            case 0x30:
                register = header[operand - IP_HEADER]
            case 0x20:
                register = struct.unpack_from("!I", header, operand - IP_HEADER)[0]
            case 0x74:
                register >>= operand
            case 0x05:
                at += operand
            case 0x15:
                at += if_true if register == operand else if_false
            case 0x06:
                return operand != 0
            case _:
                raise ValueError(f"unknown instruction {code:#x}")


HOSTS = ["10.0.0.1", "10.0.0.2", "192.168.7.255", "fd00::1", "fd00::2", "2001:db8:1:2:3:4:5:6"]
UNLISTED_HOSTS = [
    "10.0.0.3",
    "1.0.0.10",
    "127.0.0.1",
    "fd00::3",
    "fd00:0:0:1::1",
    "::1",
    "2001:db8:1:2:3:4:5:7",
]


@pytest.mark.parametrize("allowed", [[], HOSTS[:1], HOSTS[:3], HOSTS[3:4], HOSTS[3:], HOSTS, HOSTS[::-1]])
def test_only_allowed_addresses_pass(allowed: list[str]) -> None:
    """Packets from allowed IPv4 and IPv6 addresses pass; all others are dropped."""
    steps = build_bpf([ip_address(host) for host in allowed])
    accepted = [host for host in HOSTS + UNLISTED_HOSTS if passes(steps, packet(host))]
    assert sorted(allowed) == sorted(accepted)


@pytest.mark.parametrize("family", ["10.0.{}.{}", "fd00::{:x}:{:x}"])
def test_the_largest_program_is_within_the_kernel_limit(family: str) -> None:
    """With the maximum number of addresses, each of them passes and all jumps are in range."""
    hosts = [family.format(number // 256, number % 256) for number in range(MAX_ADDRESSES)]
    steps = build_bpf([ip_address(host) for host in hosts])
    assert len(steps) <= MAX_PROGRAM_LENGTH
    assert all(passes(steps, packet(host)) for host in hosts)
    assert not passes(steps, packet(family.format(9, 9)))


def test_the_number_of_hosts_is_limited() -> None:
    """A host beyond the limit is rejected; a host that is already allowed may open more channels."""
    packet_filter = PacketFilter()
    for number in range(MAX_ADDRESSES):
        packet_filter.allow(f"channel-{number}", f"10.0.0.{number}")
    packet_filter.allow("another", "10.0.0.5")
    with pytest.raises(SourceBusy, match="at most 128 hosts"):
        packet_filter.allow("one too many", "10.0.1.0")
    packet_filter.deny("channel-7")
    packet_filter.allow("the next", "10.0.1.0")


@pytest.mark.parametrize("address", ["", "unix", "10.0.0", "example.org"])
def test_an_invalid_address_is_rejected(address: str) -> None:
    """A reader without a valid address gets no channel."""
    with pytest.raises(SourceBusy, match="needs an IP address"):
        PacketFilter().allow("channel", address)


def test_duplicating_a_file_leaks_no_descriptor(tmp_path: Path) -> None:
    """If another thread reused the descriptor for a file, the duplicate is closed."""

    def count_descriptors() -> int:
        """Count only descriptors of this file: others may be closed at any time by the garbage collector."""
        return sum(os.path.realpath(link) == str(path) for link in Path("/proc/self/fd").iterdir())

    path = (tmp_path / "file").resolve()
    with path.open("w") as file:
        with pytest.raises(OSError, match="non-socket"):
            duplicate_of(file.fileno())
        assert 1 == count_descriptors()

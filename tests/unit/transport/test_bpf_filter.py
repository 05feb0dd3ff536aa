"""The filter before an engine's ports: which packets the program passes."""

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
"""BPF_MAXINSNS: what the kernel takes."""


def packet(source: str) -> bytes:
    """The IP header of a packet from this address."""
    address = ip_address(source)
    if address.version == 4:
        return bytes([0x45]) + bytes(11) + address.packed + bytes(4)
    return bytes([0x60]) + bytes(7) + address.packed + bytes(16)


def passes(steps: tuple[Instruction, ...], header: bytes) -> bool:
    """Run a program on a packet as the kernel does."""
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
                raise ValueError(f"no instruction {code:#x}")


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
def test_only_those_inside_pass(allowed: list[str]) -> None:
    """Packets of the addresses that were let in pass, of either family; all others are dropped."""
    steps = build_bpf([ip_address(host) for host in allowed])
    accepted = [host for host in HOSTS + UNLISTED_HOSTS if passes(steps, packet(host))]
    assert sorted(allowed) == sorted(accepted)


@pytest.mark.parametrize("family", ["10.0.{}.{}", "fd00::{:x}:{:x}"])
def test_the_longest_program_is_one_that_the_kernel_takes(family: str) -> None:
    """With as many addresses as it lets in, each passes, and the jumps still reach."""
    hosts = [family.format(number // 256, number % 256) for number in range(MAX_ADDRESSES)]
    steps = build_bpf([ip_address(host) for host in hosts])
    assert (True, True, False) == (
        len(steps) <= MAX_PROGRAM_LENGTH,
        all(passes(steps, packet(host)) for host in hosts),
        passes(steps, packet(family.format(9, 9))),
    )


def test_no_more_hosts_than_there_is_room_for() -> None:
    """One too many is told to go elsewhere; a host that is in already may have more channels."""
    ports = PacketFilter()
    for number in range(MAX_ADDRESSES):
        ports.allow(f"channel-{number}", f"10.0.0.{number}")
    ports.allow("another", "10.0.0.5")
    with pytest.raises(SourceBusy, match="at once"):
        ports.allow("one too many", "10.0.1.0")
    ports.deny("channel-7")
    ports.allow("the next", "10.0.1.0")


@pytest.mark.parametrize("address", ["", "unix", "10.0.0", "example.org"])
def test_what_is_no_address_is_not_let_in(address: str) -> None:
    """A reader whose address cannot be told gets no channel."""
    with pytest.raises(SourceBusy, match="is none"):
        PacketFilter().allow("channel", address)


def test_what_is_no_socket_leaves_no_descriptor(tmp_path: Path) -> None:
    """A descriptor that another thread closed and had anew for a file: its duplicate is closed again."""

    def opened() -> int:
        """Not all descriptors are counted: others may close at any time, as what is garbage does."""
        return sum(os.path.realpath(link) == str(path) for link in Path("/proc/self/fd").iterdir())

    path = (tmp_path / "file").resolve()
    with path.open("w") as file:
        with pytest.raises(OSError, match="non-socket"):
            duplicate_of(file.fileno())
        assert 1 == opened()

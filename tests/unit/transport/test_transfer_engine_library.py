"""What is said about the three Mooncake wheels and the machine under them."""

from __future__ import annotations

from pathlib import Path

import pytest

from rfork.transport.transfer_engine.library import WHEELS, import_hint, rdma_devices

NON_CUDA = ["mooncake-transfer-engine-non-cuda"]


@pytest.mark.parametrize(
    ("error", "wheels", "expected"),
    [
        ("No module named 'mooncake'", [], "rfork[mooncake]"),
        ("libibverbs.so.1: cannot open shared object file", NON_CUDA, "apt-get install libibverbs1"),
        ("libnuma.so.1: cannot open shared object file", NON_CUDA, "apt-get install libnuma1"),
        ("libcudart.so.12: cannot open shared object file", ["mooncake-transfer-engine"], "another CUDA"),
        ("undefined symbol: x", NON_CUDA, "reinstall the wheel: mooncake-transfer-engine-non-cuda"),
    ],
)
def test_import_errors_name_what_to_install(error: str, wheels: list[str], expected: str) -> None:
    """The hint names the extra, the Debian package or the wrong wheel."""
    assert expected in import_hint(error, wheels)


def test_rdma_devices_are_those_of_the_kernel(tmp_path: Path) -> None:
    """Devices are the entries of /sys/class/infiniband, sorted; none where it does not exist."""
    for name in ("mlx5_1", "mlx5_0"):
        (tmp_path / name).mkdir()
    assert (("mlx5_0", "mlx5_1"), ()) == (rdma_devices(tmp_path), rdma_devices(tmp_path / "missing"))


def test_every_wheel_has_its_extra() -> None:
    """The three wheels map to the three extras."""
    assert ["mooncake", "mooncake-cuda12", "mooncake-cuda13"] == sorted(WHEELS.values())

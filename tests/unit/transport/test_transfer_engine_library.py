"""What is said about the three Mooncake wheels and the machine under them."""

from __future__ import annotations

import pytest

from rfork.errors import VersionMismatch
from rfork.transport.transfer_engine.library import WHEELS, LibraryState, import_hint, require_cuda

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


def test_every_wheel_has_its_extra() -> None:
    """The three wheels map to the three extras."""
    assert ["mooncake", "mooncake-cuda12", "mooncake-cuda13"] == sorted(WHEELS.values())


NONE, TWELVE, THIRTEEN = "mooncake-transfer-engine-non-cuda", *sorted(set(WHEELS) - set(NON_CUDA))


@pytest.mark.parametrize(
    ("state", "torch_cuda", "said", "hint"),
    [
        (
            LibraryState((NONE,)),
            "12.8",
            f"{NONE} cannot read GPU memory",
            f"pip uninstall -y {NONE}, then pip install 'rfork[mooncake-cuda12]'",
        ),
        (
            LibraryState((NONE,)),
            "13.0",
            f"{NONE} cannot read GPU memory",
            f"pip uninstall -y {NONE}, then pip install 'rfork[mooncake-cuda13]'",
        ),
        (
            LibraryState((TWELVE,), cuda=True),
            "13.0",
            f"{TWELVE} is for CUDA 12, and torch for CUDA 13",
            f"pip uninstall -y {TWELVE}, then pip install 'rfork[mooncake-cuda13]'",
        ),
        (
            LibraryState((THIRTEEN,), cuda=True),
            "12.8",
            f"{THIRTEEN} is for CUDA 13, and torch for CUDA 12",
            f"pip uninstall -y {THIRTEEN}, then pip install 'rfork[mooncake-cuda12]'",
        ),
        (
            LibraryState((NONE,)),
            None,
            f"{NONE} cannot read GPU memory",
            f"pip uninstall -y {NONE}, then pip install 'rfork[mooncake-cuda12]' or 'rfork[mooncake-cuda13]'",
        ),
    ],
)
def test_a_wheel_that_does_not_fit(state: LibraryState, torch_cuda: str | None, said: str, hint: str) -> None:
    """It says what to remove and which extra fits the CUDA of torch."""
    with pytest.raises(VersionMismatch) as raised:
        require_cuda(state, torch_cuda)
    assert (said, hint) == (str(raised.value), raised.value.hint)


@pytest.mark.parametrize(
    ("state", "torch_cuda"),
    [
        (LibraryState((TWELVE,), cuda=True), "12.8"),
        (LibraryState((THIRTEEN,), cuda=True), "13.0"),
        (LibraryState((), cuda=True), "13.0"),
    ],
    ids=["12", "13", "built from source"],
)
def test_a_wheel_that_fits(state: LibraryState, torch_cuda: str) -> None:
    """A wheel for torch's CUDA is taken, and one that nobody knows but that has CUDA."""
    require_cuda(state, torch_cuda)

"""Selection of the hash backend: wrong hashes are never used, and every device has a backend."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch

from rfork.image.digest import HashBackend, hash_on_host, leaf_hasher, self_test

CPU = torch.device("cpu")


def test_hashing_on_the_host_passes_the_self_test() -> None:
    """The fallback computes the hashes that the kernel must match."""
    self_test(hash_on_host, CPU)


def test_wrong_hashes_fail_the_self_test() -> None:
    """One wrong bit in one hash is enough."""

    def wrong_hashes(pieces: Sequence[torch.Tensor], leaf_bytes: int) -> bytes:
        hashes = bytearray(hash_on_host(pieces, leaf_bytes))
        hashes[-1] ^= 1
        return bytes(hashes)

    with pytest.raises(RuntimeError, match="wrong hashes"):
        self_test(wrong_hashes, CPU)


def test_a_device_has_one_hash_backend() -> None:
    """Every call returns the same backend; on the CPU it uses no kernel."""
    backend = leaf_hasher(CPU)
    assert backend is leaf_hasher(torch.device("cpu"))
    assert not backend.wait_until_ready()


class FailingKernelModule(ModuleType):
    """A kernel module whose import raises an error."""

    def __init__(self, error: Exception) -> None:
        super().__init__("rfork.image.xxh3_triton")
        self._error = error

    def __getattr__(self, name: str) -> None:
        if name == "leaf_hashes":
            raise self._error
        raise AttributeError(name)


@pytest.mark.parametrize(
    ("error", "is_logged"),
    [
        (ImportError("no triton"), False),
        (RuntimeError("0 active drivers"), True),
        (OSError("read-only"), True),
    ],
)
def test_a_kernel_that_cannot_be_imported_falls_back(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, is_logged: bool
) -> None:
    """The host is used whatever the import raises; a missing Triton is not logged as a warning."""
    monkeypatch.setitem(sys.modules, "rfork.image.xxh3_triton", FailingKernelModule(error))
    backend = HashBackend(torch.device("cuda"))
    data = torch.zeros(5000, dtype=torch.uint8)
    assert not backend.wait_until_ready()
    assert hash_on_host([data], 2048) == backend([data], 2048)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert is_logged == any("hash kernel failed" in message for message in warnings)

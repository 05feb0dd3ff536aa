"""What callers give, looked at before anything is opened: one clear line where it cannot be used."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rfork.errors import SettingsError
from rfork.schema import Rank


def check_device(device: torch.device | str) -> None:
    """Raises SettingsError for a device that this process cannot have tensors on."""
    try:
        found = torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError) as error:  # torch raises each of them
        why = str(error).partition("\n")[0]
        raise SettingsError(f"device {str(device)!r} cannot be used: {why}") from None
    if found.type == "meta":
        raise SettingsError("tensors on the meta device have no memory to load into")


def check_load(rank: object, dtype: object) -> None:
    """Raise SettingsError for arguments of `load` that are of another type than it takes."""
    if rank is not None and not isinstance(rank, Rank):
        raise SettingsError(
            f"rank is a Rank, not a {type(rank).__name__}", hint="e.g. rank=rfork.Rank(tp=0, tp_size=2)"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise SettingsError(f"dtype is a torch.dtype, not a {type(dtype).__name__}")


def unique_names(names: Iterable[str] | None) -> frozenset[str] | None:
    """The names, once each; None stays None: all. Raises SettingsError for one name instead of several."""
    if isinstance(names, (str, bytes)):
        raise SettingsError(f"names are several: give [{names!r}] instead of {names!r}")
    return None if names is None else frozenset(names)

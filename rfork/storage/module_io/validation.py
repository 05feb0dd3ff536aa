"""Validates arguments before anything is opened, with a one-line error."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rfork.errors import SettingsError
from rfork.schema import Rank


def check_device(device: torch.device | str) -> None:
    """Raise SettingsError for a device on which this process cannot have tensors."""
    try:
        found = torch.empty(0, device=device).device
    except (AssertionError, RuntimeError, TypeError) as error:  # torch may raise any of them
        why = str(error).partition("\n")[0]
        raise SettingsError(f"device {str(device)!r} cannot be used: {why}") from None
    if found.type == "meta":
        raise SettingsError("tensors on the meta device have no memory to load into")


def check_load(rank: object, dtype: object) -> None:
    """Raise SettingsError for arguments of `load` with a wrong type."""
    if rank is not None and not isinstance(rank, Rank):
        raise SettingsError(
            f"rank must be a Rank, not a {type(rank).__name__}", hint="e.g. rank=rfork.Rank(tp=0, tp_size=2)"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise SettingsError(f"dtype must be a torch.dtype, not a {type(dtype).__name__}")


def unique_names(names: Iterable[str] | None) -> frozenset[str] | None:
    """Return the names without duplicates; None (all) stays None. Raises SettingsError for a plain string."""
    if isinstance(names, (str, bytes)):
        raise SettingsError(f"names must be a list: use [{names!r}] instead of {names!r}")
    return None if names is None else frozenset(names)

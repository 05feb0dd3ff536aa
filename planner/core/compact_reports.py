"""Instance reports that share their equal parts, because a planner keeps one of each of thousands of ranks.

A parsed report takes 6 kB, most of it for strings, ranks and sets of field names that all ranks of a model have in
common.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any, Final, TypeVar, cast

from rfork.schema import InstanceReport, Placement, WireModel

MAX_SHARED: Final = 1024
"""Parts that are kept; the least recently used are forgotten, and no longer shared."""
MAX_RANGES: Final = 4
"""Ranges of chunks that are shared: of a complete instance it is one, and long lists are no other's."""

ModelT = TypeVar("ModelT", bound=WireModel)


def compact_report(report: InstanceReport, known: InstanceReport | None) -> InstanceReport:
    """Return the instance's `known` report if it equals the new one, otherwise the new one with shared parts."""
    if known is not None and report == known:
        return known
    values: dict[str, Any] = {name: _shared_value(value) for name, value in report.__dict__.items()}
    for name in ("rank", "storage", "transports"):
        values[name] = _shared_part(values[name])
    if len(report.verified) <= MAX_RANGES:
        values["verified"] = _shared_part(report.verified)
    values["placement"] = _compact_placement(report.placement)
    # An instance's own names are no other's.
    for name in ("instance_id", "address", "replica"):
        values[name] = getattr(report, name)
    return _with_values(report, values)


def _compact_placement(placement: Placement) -> Placement:
    return _with_values(placement, {name: _shared_value(value) for name, value in placement.__dict__.items()})


def _with_values(model: ModelT, values: dict[str, Any]) -> ModelT:
    """Return a copy with these values of its fields, which shares the names of its fields with other models."""
    return cast(ModelT, type(model).model_construct(_fields_set(frozenset(model.model_fields_set)), **values))


def _shared_value(value: Any) -> Any:
    return sys.intern(value) if type(value) is str else value


@lru_cache(MAX_SHARED, typed=True)
def _shared_part(part: Any) -> Any:
    """Return the first part that is equal to this one."""
    return part


@lru_cache(MAX_SHARED)
def _fields_set(names: frozenset[str]) -> set[str]:
    """Return one set of these names for all models: a model that cannot be changed does not change it."""
    return set(names)

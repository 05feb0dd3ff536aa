"""Reads tensors by name from storage: single ones, all together, or as a stream."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType

import torch
from typing_extensions import Self

from rfork import settings as options
from rfork.errors import CheckpointError
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage.formats.detect import open_source
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.module_io.load import check_device, restore_snapshot, unique_names
from rfork.storage.tensorizer.file_set import resolve_template
from rfork.storage.tensors import StoredTensor, TensorSource


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors at a URI by name; each is read on access. A context manager."""

    def __init__(self, source: TensorSource) -> None:
        """Take ownership of the source."""
        self._source = source

    @property
    def uri(self) -> str:
        """Location."""
        return self._source.uri

    @property
    def specs(self) -> Mapping[str, StoredTensor]:
        """Dtype, shape and bytes of each tensor, without reading it."""
        return self._source.specs

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._source[name]

    def __contains__(self, name: object) -> bool:
        return name in self._source.specs

    def __iter__(self) -> Iterator[str]:
        return iter(self._source.specs)

    def __len__(self) -> int:
        return len(self._source.specs)

    def close(self) -> None:
        """Close the files."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_tensors(
    uri: str | Path,
    *,
    rank: Rank | None = None,
    key: bytes | None = None,
    password: str | None = None,
    settings: StorageSettings | None = None,
) -> LazyTensors:
    """Open the tensors at a URI or path for reading single ones; only headers are read in advance.

    ::

        with rfork.open_tensors("s3://bucket/model/") as tensors:
            embedding = tensors["model.embed_tokens.weight"]

    `uri` is a Hugging Face folder, a safetensors file, a snapshot or a ``.tensors`` file; `rank` selects a
    rank's file in a folder; `key` (32 bytes) or `password` decrypt a ``.tensors`` file; `settings` default to
    those of the environment. Runs in the calling process. Snapshots are not verified, because their digests
    do not cover single tensors.

    Raises CheckpointError if none of these exists, if one is inconsistent, or if it is not encrypted although
    `key` or `password` is given; SettingsError for an invalid URI; StorageError subclasses.
    """
    return LazyTensors(open_source(uri, settings, rank, key=key, password=password))


def iter_tensors(
    uri: str | Path,
    names: Iterable[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    rank: Rank | None = None,
    key: bytes | None = None,
    password: str | None = None,
    settings: StorageSettings | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over names and tensors (all, or those in `names`) in order of arrival, as engines'
    ``load_weights`` expect.

    Reads a few blocks ahead (`StorageSettings.staging_bytes`), and none after the iterator is closed. The
    caller owns the tensors; floating-point ones are converted to `dtype`. Nothing is opened before the first
    tensor is requested. Snapshots are not verified: use `load_tensors` for that. `device` is the device of
    the tensors; `uri`, `rank`, `key`, `password` and `settings` are as for `open_tensors`. Runs in the
    calling process.

    Raises CheckpointError if a name is not stored, SettingsError, StorageError subclasses.
    """
    names = unique_names(names)
    check_device(device)
    with closing(open_source(uri, settings, rank, key=key, password=password)) as source:
        for name, tensor in source.stream(names, device):
            yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def load_tensors(
    uri: str | Path,
    names: Iterable[str] | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    rank: Rank | None = None,
    key: bytes | None = None,
    password: str | None = None,
    settings: StorageSettings | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Load all tensors at a URI, or those in `names`, by name, like ``safetensors.torch.load_file`` for any
    store.

    All bytes are in memory when this returns. Tensors that are adjacent in storage share an allocation,
    except floating-point ones that are converted to `dtype`.

    A snapshot is verified, each chunk against its digest, if it is loaded completely and unchanged: not if
    `names` are given, if a dtype is converted, or if its manifest is missing.

    `device` is the device of the tensors; `progress` receives byte counts; `uri`, `rank`, `key`, `password`
    and `settings` are as for `open_tensors`. Runs in the calling process.

    Raises CheckpointError if a name is not stored, SettingsError, StorageCorrupt and other StorageErrors.
    """
    names = unique_names(names)
    check_device(device)
    chosen = settings or options.load(StorageSettings)
    with closing(open_source(uri, chosen, rank, key=key, password=password)) as source:
        wanted = _selected(source, names)
        converted = {
            name: torch.empty(spec.shape, dtype=dtype, device=device)
            for name in (wanted if dtype is not None else ())
            if (spec := source.specs[name]).dtype.is_floating_point and spec.dtype is not dtype
        }
        if names is None and not converted:
            verified = restore_snapshot(source, resolve_template(str(uri), rank or Rank()), device, chosen, progress)
            if verified is not None:
                return {name: verified[name] for name in wanted}
        rest = [name for name in wanted if name not in converted]
        if isinstance(source, SafetensorsSource):
            found = source.load(rest if names is not None or converted else None, device, progress)
        else:
            found = {
                name: torch.empty(spec.shape, dtype=spec.dtype, device=device)
                for name in rest
                if (spec := source.specs[name])
            }
            source.read_into(found, progress)
        source.read_into(converted, progress)
        return {name: converted[name] if name in converted else found[name] for name in wanted}


def _selected(source: TensorSource, names: frozenset[str] | None) -> Collection[str]:
    stored = source.locations if isinstance(source, SafetensorsSource) else source.specs
    if names is None:
        return stored.keys()
    if unknown := sorted(names - stored.keys()):
        raise CheckpointError(f"{source.uri} lacks {unknown[0]} ({len(unknown)} in total)")
    return [name for name in stored if name in names]

"""Tensors by name straight from storage: one by one, all at once, or as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from rfork import settings as options
from rfork.errors import CheckpointError
from rfork.schema import Rank
from rfork.settings import StorageSettings
from rfork.storage.formats.detect import open_source
from rfork.storage.formats.safetensors_source import SafetensorsSource
from rfork.storage.module_io.restore import restore_snapshot
from rfork.storage.module_io.validation import check_device, unique_names
from rfork.storage.tensorizer.file_set import of_rank
from rfork.storage.tensors import StoredTensor, TensorSource


class LazyTensors(Mapping[str, torch.Tensor]):
    """What is stored at a URI, by name: each tensor is read when it is asked for. A context manager."""

    def __init__(self, source: TensorSource) -> None:
        """Takes over the source."""
        self._source = source

    @property
    def uri(self) -> str:
        """Where they lie."""
        return self._source.uri

    @property
    def specs(self) -> Mapping[str, StoredTensor]:
        """Type, shape and bytes of each, without a read."""
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
    """Open what lies at a URI or path for reads of single tensors; only headers are read before.

    ::

        with rfork.open_tensors("s3://bucket/model/") as tensors:
            embedding = tensors["model.embed_tokens.weight"]

    `uri` names a Hugging Face folder, safetensors, a snapshot or a ``.tensors``; `rank` says whose file of a
    folder it is; `key` (32 bytes) or `password` open an encrypted ``.tensors``; `settings` are those of the
    environment where none are given. Runs in the process that calls it. Nothing of a snapshot is verified
    here, as single tensors are not what its digests are of.

    Raises CheckpointError where there is none of these, or one contradicts itself, or is not encrypted though
    `key` or `password` is given; SettingsError for what is no URI; StorageError kinds.
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
    """Names and tensors (all, or those of `names`) in order of arrival, as engines' ``load_weights`` want.

    A few blocks are read ahead (`StorageSettings.memory`), and none once the iterator is closed. The tensors
    are the caller's own; floating ones are converted to `dtype`. Nothing is opened before the first one is
    asked for. Of a snapshot nothing is verified: `load_tensors` does that. `device` is where they are put;
    `uri`, `rank`, `key`, `password` and `settings` are as for `rfork.open`. Runs in the process that calls
    it.

    Raises CheckpointError where a name is not stored, SettingsError, StorageError kinds.
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
    """All tensors at a URI, or those of `names`, by name: as ``safetensors.torch.load_file``, of any store.

    Every byte is in memory when this returns. Tensors that lie side by side in storage share an allocation,
    but those whose type is changed: floating ones, to `dtype`.

    A snapshot is verified, each chunk against its digest, where all of it is wanted as it is: not where
    `names` are given, or a type is changed, or where its manifest is not beside it.

    `device` is where they are put; `progress` is told bytes as they come; `uri`, `rank`, `key`, `password`
    and `settings` are as for `rfork.open`. Runs in the process that calls it.

    Raises CheckpointError where a name is not stored, SettingsError, StorageCorrupt and other StorageErrors.
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
            verified = restore_snapshot(source, of_rank(str(uri), rank or Rank()), device, chosen, progress)
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
        raise CheckpointError(f"{source.uri} lacks {unknown[0]} ({len(unknown)} such)")
    return [name for name in stored if name in names]

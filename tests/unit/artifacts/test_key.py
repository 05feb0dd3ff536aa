"""Compatibility keys, their model names, and the folders of caches."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest

from rfork.artifacts.cache_types import cache_dirs
from rfork.artifacts.client import other_keys
from rfork.artifacts.key import ArtifactKey, local_key, name_of, parse_name, prefix_of
from rfork.errors import SettingsError
from rfork.schema import ModelName
from rfork.settings import ArtifactSettings, load

KEY = ArtifactKey(gpu="NVIDIA-H100", sm="9.0", driver="550.54.15", torch="2.13.0", engine="vllm-0.32.0")
VARIABLES = (
    "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE", "DG_JIT_CACHE_DIR", "SGLANG_DG_CACHE_DIR", "SGLANG_CACHE_DIR",
    "VLLM_CACHE_ROOT", "TVM_FFI_CACHE_DIR",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_folders_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/u")


def test_a_name_contains_its_key() -> None:
    """A list of instances shows which machines artifacts are for, without requesting any bytes."""
    assert KEY == parse_name(name_of("Qwen/Qwen3-8B", KEY))


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "a+artifacts 0123 gpu=x", "a+artifacts "])
def test_other_names_have_no_key(name: str) -> None:
    """Examples are a model's own name, and a name whose hash does not match its key."""
    assert None is parse_name(name)


def test_the_longest_name_is_valid_for_the_planner() -> None:
    """For any model and values it has at most 512 characters, and two long models have different names."""
    from pydantic import TypeAdapter

    long = ArtifactKey.parse(dict.fromkeys(ArtifactKey.__dataclass_fields__, "v" * 500))
    names = [name_of("m" * 500 + end, long) for end in "ab"]
    assert names == [TypeAdapter(ModelName).validate_python(name) for name in names]
    assert 2 == len(set(names))
    assert names[0].startswith(prefix_of("m" * 500 + "a"))


@pytest.mark.parametrize("field", list(ArtifactKey.__dataclass_fields__))
def test_each_value_changes_the_key(field: str) -> None:
    """Machines that differ in one value do not share compiled code."""
    other = replace(KEY, **{field: "other"})
    assert KEY.id != other.id
    assert (f"{field}: here {getattr(KEY, field)}, there other",) == KEY.differences(other)


def test_the_most_similar_other_key_is_named() -> None:
    """One difference explains more than five."""
    near, far = replace(KEY, driver="560.1"), ArtifactKey()
    description = other_keys([name_of("m", far), name_of("m", near), "m", name_of("m", KEY)], KEY)
    assert "only for another machine (and 1 more): driver: here 550.54.15, there 560.1" == description


def test_the_local_key_is_stable() -> None:
    """It is equal on each call and contains the versions of Python and torch."""
    key = local_key()
    assert key == local_key()
    assert key.torch[0].isdigit()
    assert key.python.startswith("CPython-3")


@pytest.mark.parametrize(
    ("type_name", "expected"),
    [
        ("triton", "/home/u/.triton/cache"),
        ("flashinfer", "/home/u/.cache/flashinfer"),
        ("deep_gemm", "/home/u/.deep_gemm"),
        ("sglang_deep_gemm", "/home/u/.cache/deep_gemm"),
        ("vllm", "/home/u/.cache/vllm/torch_compile_cache"),
        ("sglang", "/home/u/.cache/sglang/torch_compile_cache"),
        ("tvm_ffi", "/home/u/.cache/tvm-ffi"),
    ],
)
def test_cache_folders_have_the_defaults_of_their_libraries(type_name: str, expected: str) -> None:
    """These are the folders without any variable set."""
    assert [Path(expected)] == [
        cache_dir.folder for cache_dir in cache_dirs(load(ArtifactSettings, kinds=(type_name,)))
    ]


@pytest.mark.parametrize(
    ("variable", "type_name", "expected"),
    [
        ("TRITON_CACHE_DIR", "triton", "/x"),
        ("TRITON_HOME", "triton", "/x/.triton/cache"),
        ("TORCHINDUCTOR_CACHE_DIR", "inductor", "/x"),
        ("FLASHINFER_WORKSPACE_BASE", "flashinfer", "/x/.cache/flashinfer"),
        ("DG_JIT_CACHE_DIR", "deep_gemm", "/x"),
        ("SGLANG_DG_CACHE_DIR", "sglang_deep_gemm", "/x"),
        ("SGLANG_CACHE_DIR", "sglang", "/x/torch_compile_cache"),
        ("VLLM_CACHE_ROOT", "vllm", "/x/torch_compile_cache"),
        ("XDG_CACHE_HOME", "vllm", "/x/vllm/torch_compile_cache"),
        ("TVM_FFI_CACHE_DIR", "tvm_ffi", "/x"),
        ("RFORK_ARTIFACTS_DIRS", "triton", "/x"),
    ],
)
def test_variables_of_other_packages_move_the_folders(
    variable: str, type_name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that was moved by its own variable is found without configuring rfork."""
    monkeypatch.setenv(variable, "triton=/x" if variable.startswith("RFORK") else "/x")
    assert [Path(expected)] == [cache_dir.folder for cache_dir in cache_dirs(load(ArtifactSettings, kinds=type_name))]


def test_a_custom_cache_is_a_name_and_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its format is unknown, so it is accepted only at the same path."""
    monkeypatch.setenv("RFORK_ARTIFACTS_KINDS", "tilelang")
    monkeypatch.setenv("RFORK_ARTIFACTS_DIRS", "tilelang=/x/tl")
    assert [("tilelang", Path("/x/tl"), True)] == [
        (cache_dir.cache_type.name, cache_dir.folder, cache_dir.cache_type.path_bound)
        for cache_dir in cache_dirs(load(ArtifactSettings))
    ]


def test_an_unknown_cache_type_is_an_error() -> None:
    """The error lists the known ones."""
    with pytest.raises(SettingsError, match="unknown cache type 'triten'"):
        cache_dirs(load(ArtifactSettings, kinds="triten"))


def test_settings_work_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only caches that are located in the home directory raise an error."""

    def unknown_user(uid: int) -> NoReturn:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown_user)
    assert [] == cache_dirs(load(ArtifactSettings))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/x")
    assert [Path("/x")] == [cache_dir.folder for cache_dir in cache_dirs(load(ArtifactSettings, kinds="triton"))]
    with pytest.raises(SettingsError, match="deep_gemm"):
        cache_dirs(load(ArtifactSettings, kinds="deep_gemm"))


def test_a_folder_of_an_unknown_user_is_an_error() -> None:
    """The error is one line that names the cache, not a RuntimeError."""
    with pytest.raises(SettingsError, match=r"triton: ~no-such-user/x"):
        cache_dirs(load(ArtifactSettings, kinds="triton", dirs="triton=~no-such-user/x"))

"""Keys and kinds: what names say, and where others' variables move folders to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rfork.artifacts.cache_types import cache_dirs
from rfork.artifacts.client import other_keys
from rfork.artifacts.key import ArtifactKey, local_key, name_of, parse_name, prefix_of
from rfork.errors import SettingsError
from rfork.schema.types import ModelName
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


def test_a_name_says_its_key() -> None:
    """Whoever lists instances sees what artifacts are for without asking for one byte of them."""
    assert KEY == parse_name(name_of("Qwen/Qwen3-8B", KEY))


@pytest.mark.parametrize("name", ["Qwen/Qwen3-8B", "a+artifacts 0123 gpu=x", "a+artifacts "])
def test_other_names_have_no_key(name: str) -> None:
    """A model's own, or one whose hash is not that of what it says."""
    assert None is parse_name(name)


def test_the_longest_name_is_one_that_the_planner_takes() -> None:
    """Whatever model and values: at most 512 characters, and two long models do not share one."""
    from pydantic import TypeAdapter

    long = ArtifactKey.parse(dict.fromkeys(ArtifactKey.__dataclass_fields__, "v" * 500))
    names = [name_of("m" * 500 + end, long) for end in "ab"]
    assert names == [TypeAdapter(ModelName).validate_python(name) for name in names]
    assert (2, True) == (len(set(names)), names[0].startswith(prefix_of("m" * 500 + "a")))


@pytest.mark.parametrize("field", list(ArtifactKey.__dataclass_fields__))
def test_each_value_makes_another_key(field: str) -> None:
    """No two machines that differ in one of them use one another's code."""
    other = replace(KEY, **{field: "other"})
    assert KEY.id != other.id
    assert (f"{field}: here {getattr(KEY, field)}, there other",) == KEY.differences(other)


def test_of_other_keys_the_nearest_is_named() -> None:
    """One value that differs says more than five."""
    near, far = replace(KEY, driver="560.1"), ArtifactKey()
    description = other_keys([name_of("m", far), name_of("m", near), "m", name_of("m", KEY)], KEY)
    assert "only for another machine (and 1 more): driver: here 550.54.15, there 560.1" == description


def test_here_has_one_key() -> None:
    """It is the same each time, and says which Python and torch this is."""
    key = local_key()
    assert (key, True, True) == (local_key(), key.torch[0].isdigit(), key.python.startswith("CPython-3"))


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
def test_caches_lie_where_their_owners_put_them(type_name: str, expected: str) -> None:
    """Without any variable."""
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
def test_the_variables_of_others_hold_here_too(
    variable: str, type_name: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever moved a cache need not say so twice."""
    monkeypatch.setenv(variable, "triton=/x" if variable.startswith("RFORK") else "/x")
    assert [Path(expected)] == [cache_dir.folder for cache_dir in cache_dirs(load(ArtifactSettings, kinds=type_name))]


def test_a_kind_of_ones_own_is_a_name_and_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of it, so it is only taken where it lies at the same place."""
    monkeypatch.setenv("RFORK_ARTIFACTS_KINDS", "tilelang")
    monkeypatch.setenv("RFORK_ARTIFACTS_DIRS", "tilelang=/x/tl")
    assert [("tilelang", Path("/x/tl"), True)] == [
        (cache_dir.cache_type.name, cache_dir.folder, cache_dir.cache_type.path_bound)
        for cache_dir in cache_dirs(load(ArtifactSettings))
    ]


def test_a_kind_that_nobody_knows_is_an_error() -> None:
    """It names those there are."""
    with pytest.raises(SettingsError, match="'triten' is not known"):
        cache_dirs(load(ArtifactSettings, kinds="triten"))


def test_a_user_without_a_home_has_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Off, nothing is missing; kinds that lie elsewhere do without; for the others it is said."""

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert [] == cache_dirs(load(ArtifactSettings))
    monkeypatch.setenv("TRITON_CACHE_DIR", "/x")
    assert [Path("/x")] == [cache_dir.folder for cache_dir in cache_dirs(load(ArtifactSettings, kinds="triton"))]
    with pytest.raises(SettingsError, match="deep_gemm"):
        cache_dirs(load(ArtifactSettings, kinds="deep_gemm"))


def test_a_folder_of_nobody_is_an_error() -> None:
    """One line that names the kind, and no RuntimeError."""
    with pytest.raises(SettingsError, match=r"triton: ~no-such-user/x"):
        cache_dirs(load(ArtifactSettings, kinds="triton", folders="triton=~no-such-user/x"))

"""Compatibility key of a JIT cache, which two instances must share. Runs on both sides."""

from __future__ import annotations

import hashlib
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Final

import torch
from typing_extensions import Self

DOMAIN: Final = b"rfork-artifacts-v1\n"
KEY_SEPARATOR: Final = "+artifacts "
"""Separates the model and the key in a model name of artifacts."""
ENGINES: Final = ("vllm", "sglang", "flashinfer-python", "deep_gemm", "apache-tvm-ffi")
MAX_VALUE_CHARS: Final = 32
MAX_ENGINE_CHARS: Final = 64
MAX_MODEL_CHARS: Final = 96
NONE: Final = "none"
_PLAIN: Final = re.compile(r"[^A-Za-z0-9._+-]+")
_ISA: Final = re.compile(
    r"(?:avx|sse|ssse|amx|fma|bmi|f16c|aes|vaes|v?pclmul|gfni|sha|adx|movbe|movdir|popcnt|abm|rdrand|rdseed|xsave|"
    r"mmx|3dnow|fsgsbase|rdpid|clwb|clflushopt|prfchw|serialize|cldemote|waitpkg|enqcmd|lahf|cx16|rdtscp).*"
)
"""Flags of x86 CPUs that `-march=native` compiles for. Other flags depend on the kernel version."""

VERSION: Final = "artifacts"
"""Version of all images of artifacts: the name contains the key, and images of one key are interchangeable."""


@dataclass(frozen=True)
class ArtifactKey:
    """Everything that compiled code depends on, as short strings; ``none`` if a value does not exist here.

    `cpu` is the architecture, its vector level, the C library, and a hash of the instructions that
    ``-march=native`` compiles for, which TorchInductor uses for C++.
    """

    gpu: str = NONE
    sm: str = NONE
    driver: str = NONE
    cuda: str = NONE
    torch: str = NONE
    triton: str = NONE
    python: str = NONE
    engine: str = NONE
    cpu: str = NONE

    @property
    def id(self) -> str:
        """16 hexadecimal digits, equal for equal keys."""
        lines = "".join(f"{name}={value}\n" for name, value in asdict(self).items())
        return hashlib.sha256(DOMAIN + lines.encode()).hexdigest()[:16]

    @property
    def description(self) -> str:
        """The complete key on one line: ``gpu=…,sm=…``."""
        return ",".join(f"{name}={value}" for name, value in asdict(self).items())

    @classmethod
    def parse(cls, values: Mapping[str, str]) -> Self:
        """Return a key from its values by name. Missing values are ``none``, unknown names are ignored."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: _key_value(value, _max_chars(name)) for name, value in values.items() if name in known})

    def differences(self, other: Self) -> tuple[str, ...]:
        """Return a description of each value that differs: ``driver: here 550.54, there 560.1``."""
        there = asdict(other)
        return tuple(
            f"{name}: here {value}, there {there[name]}" for name, value in asdict(self).items() if value != there[name]
        )


def local_key(engine: str | None = None) -> ArtifactKey:
    """Return the key of this process: its GPUs, driver, Python and installed packages.

    `engine` (name and version) replaces the installed engines. Initialises CUDA if available, so an engine
    that forks its workers must call this in a separate process (`rfork cache`).
    """
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    gpu_properties = [torch.cuda.get_device_properties(index) for index in gpus]
    found = [f"{name}-{version}" for name in ENGINES if (version := _version(name)) is not None]
    return ArtifactKey(
        gpu=_key_value("+".join(sorted({one.name for one in gpu_properties})) or NONE),
        sm=_key_value("+".join(sorted({f"{one.major}.{one.minor}" for one in gpu_properties})) or NONE),
        driver=_key_value(_driver()),
        cuda=_key_value(torch.version.cuda or torch.version.hip or NONE),
        torch=_key_value(torch.__version__),
        triton=_key_value(_version("triton") or NONE),
        python=_key_value(f"{platform.python_implementation()}-{platform.python_version()}"),
        engine=_key_value(engine or "+".join(found) or NONE, MAX_ENGINE_CHARS),
        cpu=_key_value(_cpu(_flags())),
    )


def name_of(model: str, key: ArtifactKey) -> str:
    """Return the model name under which artifacts of `model` with this key are served, at most 512 characters."""
    return f"{prefix_of(model)}{key.id} {key.description}"


def prefix_of(model: str) -> str:
    """Return the prefix of the names of all artifacts of a model."""
    short = model
    if len(model) > MAX_MODEL_CHARS:
        short = f"{model[: MAX_MODEL_CHARS - 17]}~{hashlib.sha256(model.encode()).hexdigest()[:16]}"
    return short + KEY_SEPARATOR


def parse_name(name: str) -> ArtifactKey | None:
    """Return the key in a model name of artifacts, or None for any other name."""
    _, separator, key_text = name.rpartition(KEY_SEPARATOR)
    key_id, _, description = key_text.partition(" ")
    if not separator or not description:
        return None
    pairs = (pair.partition("=") for pair in description.split(","))
    key = ArtifactKey.parse({name: value for name, _, value in pairs})
    return key if key.id == key_id else None


def _key_value(text: str, max_chars: int = MAX_VALUE_CHARS) -> str:
    """Return the text without separator characters. A long value keeps its start and ends with a hash."""
    plain = _PLAIN.sub("-", text).strip("-") or NONE
    if len(plain) <= max_chars:
        return plain
    return f"{plain[: max_chars - 9]}+{hashlib.sha256(plain.encode()).hexdigest()[:8]}"


def _max_chars(name: str) -> int:
    return MAX_ENGINE_CHARS if name == "engine" else MAX_VALUE_CHARS


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str:
    """Return the version of the NVIDIA kernel driver."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return NONE
    match = re.search(r"\d+\.\d+(?:\.\d+)*", text)
    return match.group() if match else NONE


def _flags() -> list[str]:
    """Return the CPU's feature flags as named by the kernel."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        name, _, flags = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return flags.split()
    return []


def _cpu(flags: list[str]) -> str:
    x86 = platform.machine() in ("x86_64", "AMD64", "i686")
    isa = sorted(flag for flag in flags if not x86 or _ISA.fullmatch(flag))
    instructions = hashlib.sha256(" ".join(isa).encode()).hexdigest()[:8]
    level = torch.backends.cpu.get_cpu_capability()
    return "-".join((platform.machine(), level, platform.libc_ver()[1] or NONE, instructions))

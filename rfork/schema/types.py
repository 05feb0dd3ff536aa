"""Field types of the wire models, all bounded, so that the planner can store and forward them.

Does not import torch: the planner runs without it.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, BeforeValidator, Field

MAX_CHUNKS: Final = 1 << 20
"""Chunks of an image: 4 TB in chunks of 4 MiB, for one rank."""
MAX_RANGES: Final = 4096
"""Ranges in one list of chunks."""
MAX_SOURCES: Final = 4096
MAX_TRANSPORTS: Final = 64
"""Sources whose transport a fork reports: those with most bytes."""
MAX_RATES: Final = 64
"""Sources whose rate a fork reports: the fastest."""
MAX_KEY_CHARS: Final = 1 << 17
"""Total length of the names of all sources that a fork reports."""
MAX_TEXT_LENGTH: Final = 1000
"""Maximum length of an error text."""
MAX_REASONS: Final = 64
SAME_HOST_TRANSPORTS: Final = frozenset({"cuda_ipc", "shared_memory"})
"""Transports between two processes on one host."""
GPU_KERNEL_TRANSPORTS: Final = frozenset({"nccl"})
"""Transports that run kernels on the source's GPU and so compete with its requests."""
OPT_IN_TRANSPORTS: Final = frozenset({"nccl", "gloo"})
"""Transports used only if requested, because connections to their ports are not authenticated."""
PRINTABLE: Final = r"^[^\x00-\x1f\x7f-\x9f\u2028\u2029]*$"
_UNPRINTABLE: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def sanitize_text(value: object) -> object:
    """Convert text to one line of at most `MAX_TEXT_LENGTH` characters; pydantic rejects other values."""
    if not isinstance(value, str):
        return value
    if len(value) > MAX_TEXT_LENGTH:
        value = value[: MAX_TEXT_LENGTH - 1] + "…"
    return value if value.isprintable() else _UNPRINTABLE.sub(" ", value)


def _keep_last(value: object) -> object:
    """Keep only the last reasons, which explain the outcome."""
    return value[-MAX_REASONS:] if isinstance(value, list | tuple) else value


def _limit_key_length(sources: dict[str, int]) -> dict[str, int]:
    """Reject names that are too long together, because a planner stores those of thousands of forks."""
    if sum(map(len, sources)) > MAX_KEY_CHARS:
        raise ValueError(f"the names of all sources have more than {MAX_KEY_CHARS} characters")
    return sources


Text = Annotated[str, Field(max_length=2048, pattern=PRINTABLE)]
"""Text that can be forwarded: bounded, without control characters and surrogates."""
Label = Annotated[Text, Field(max_length=256)]
SanitizedText = Annotated[str, BeforeValidator(sanitize_text)]
"""Error text: sanitised instead of rejected, so that no report is lost."""
Identifier = Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$")]
ModelName = Annotated[
    Text, Field(min_length=1, max_length=512, examples=["HuggingFaceTB/SmolLM2-135M-Instruct"])
]
WeightsVersion = Annotated[
    Text, Field(min_length=1, max_length=256, examples=["files:9f86d081884c7d659a2feaa0c55ad015"])
]
"""Version of a model's weights: as stated, or ``commit:``, ``files:`` or ``weights:`` with hex digits."""
HexId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", examples=["9f86d081884c7d659a2feaa0c55ad015"])]
SourceName = Annotated[Text, Field(min_length=1, max_length=2064)]
"""Instance id, or `KIND:URI` of storage."""
Bytes = Annotated[int, Field(ge=0, le=2**63 - 1)]
BytesPerSecond = Annotated[float, Field(ge=0, le=float(2**63))]
Seconds = Annotated[float, Field(ge=0, le=1e9)]
Generation = Annotated[int, Field(ge=0, le=2**63 - 1)]
ChunkCount = Annotated[int, Field(ge=0, le=MAX_CHUNKS)]
RankIndex = Annotated[int, Field(ge=0, le=1 << 20)]
RankSize = Annotated[int, Field(ge=1, le=1 << 20)]
ChunkRange = Annotated[
    tuple[ChunkCount, ChunkCount], Field(description="half-open range of chunk indices", examples=[(0, 64)])
]
Chunks = Annotated[tuple[ChunkRange, ...], Field(max_length=MAX_RANGES)]
Transports = Annotated[tuple[Label, ...], Field(max_length=16)]
SourceBytes = Annotated[dict[SourceName, Bytes], Field(max_length=MAX_SOURCES), AfterValidator(_limit_key_length)]
Phases = Annotated[dict[Annotated[str, Field(pattern=r"^[a-z_]{1,32}$")], Seconds], Field(max_length=16)]
"""Seconds by phase, in the order in which they began."""
SourceRates = Annotated[dict[SourceName, BytesPerSecond], Field(max_length=MAX_RATES)]
SourceTransports = Annotated[dict[SourceName, Label], Field(max_length=MAX_TRANSPORTS)]
Reasons = Annotated[tuple[SanitizedText, ...], BeforeValidator(_keep_last)]
InstanceState = Literal["loading", "serving", "draining"]
ForkState = Literal["planning", "running", "finished", "failed"]
Outcome = Literal["forked", "fallback", "failed", "interrupted"]
SourceType = Literal["peer", "snapshot", "checkpoint", "loader"]
StorageType = Literal["snapshot", "checkpoint", "loader"]

VERSION_HEADER = "Rfork-Version"
"""Header of the planner's responses with its rfork release."""

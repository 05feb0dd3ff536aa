"""Python: every name that `rfork` exports, and what those return, as blocks for mkdocstrings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import rfork
from docs.site.reference.markdown import heading


@dataclass(frozen=True)
class ApiGroup:
    """Names that are told together: exported ones, or where others live that those return."""

    title: str
    text: str
    names: tuple[str, ...]


MEMBERS = {
    "rfork.source.seed.Seed": (
        "serving", "observe", "updating", "suspend", "resume", "drain", "wait_acknowledged", "close",
    ),
    "rfork.storage.module_io.lazy.LazyTensors": ("uri", "specs", "close"),
    "rfork.image.memory.Image": ("device", "digest", "manifest", "readable", "writable"),
    "rfork.image.layout.Layout": ("layout_id", "chunks", "differences", "first_difference"),
    "rfork.image.manifest.Manifest": ("weights_id",),
    "rfork.receiver.report.ForkReport": (
        "gb_per_s", "storage_bytes", "resumed_bytes", "to_dict", "line",
    ),
    "rfork.storage.module_io.load.LoadReport": ("gb_per_s",),
    "rfork.artifacts.report.ArtifactReport": ("to_dict", "line"),
    "rfork.errors.RforkError": ("kind",),
    "rfork.schema.instances.Rank": ("key",),
}  # fmt: skip
"""Which methods and properties of a class are for users, where it has any."""

NOT_CONSTRUCTED = frozenset(
    {"rfork.source.seed.Seed", "rfork.storage.module_io.lazy.LazyTensors", "rfork.image.memory.Image"}
)
"""Classes whose objects users get and never make: how that is done is not shown."""

GROUPS = (
    ApiGroup(
        "Fork and seed",
        "The target calls `fork` or `fork_pretrained`, the source `seed`; a target is a source from then on.",
        ("fork", "fork_pretrained", "report_of", "seed", "rfork.source.seed.Seed"),
    ),
    ApiGroup(
        "What a fork tells",
        "",
        ("ForkReport", "rfork.receiver.report.SourceShare", "RforkError"),
    ),
    ApiGroup(
        "Tensor files",
        "On disk, in object stores and behind HTTP. They run in the process that calls them: no planner.",
        (
            "load",
            "LoadReport",
            "load_tensors",
            "tensors",
            "open",
            "rfork.storage.module_io.lazy.LazyTensors",
            "save",
            "no_init",
        ),
    ),
    ApiGroup(
        "Images",
        "What is moved: the tensors of a module as one line of bytes.",
        ("capture", "rfork.image.memory.Image", "rfork.image.layout.Layout", "rfork.image.manifest.Manifest"),
    ),
    ApiGroup(
        "Ranks and settings",
        "Read from the environment where none are given; [Settings](settings.md) has all of them.",
        ("Rank", "Settings", "StorageSettings", "ArtifactSettings"),
    ),
    ApiGroup(
        "Artifacts",
        "Caches of compiled kernels, as a second image: `rfork.artifacts`.",
        (
            "rfork.artifacts.client.fetch",
            "rfork.artifacts.server.seed",
            "rfork.artifacts.storage.save",
            "rfork.artifacts.storage.load",
            "ArtifactReport",
        ),
    ),
)
MKDOCSTRINGS_OPTIONS = {
    "heading_level": "3",
    "show_root_heading": "true",
    "show_source": "false",
    "show_bases": "false",
    "members_order": "source",
    "docstring_style": "null",  # plain prose
    "separate_signature": "true",
    "show_signature_annotations": "true",
    "signature_crossrefs": "true",
    "line_length": "100",
    "merge_init_into_class": "true",
    "show_labels": "false",
    "show_attribute_values": "false",
}
"""How each is shown."""
PLAIN = frozenset({"__version__", "artifacts"})
"""Exported names that need no section: the version, and a module whose names have theirs."""


def home_of(name: str) -> str:
    """Where an exported name lives: `rfork.fork` is also the name of a room, so it is told from there."""
    return name if "." in name else f"{getattr(rfork, name).__module__}.{name}"


def group_sections() -> Iterator[str]:
    """All names on the page."""
    for group in GROUPS:
        yield from group.names


def page() -> str:
    """A section for each group."""
    parts = []
    for group in GROUPS:
        parts.append(heading(2, group.title, group.title.lower().replace(" ", "-")))
        parts.append(group.text + "\n")
        parts += [_block(name) for name in group.names]
    return "\n".join(parts)


def rendered_name(name: str) -> str:
    """What users write for it."""
    if "." not in name:
        return f"rfork.{name}"
    if name.startswith("rfork.artifacts."):
        return f"rfork.artifacts.{name.rpartition('.')[2]}"
    return name.rpartition(".")[2]


def _block(name: str) -> str:
    home = home_of(name)
    options = {
        **MKDOCSTRINGS_OPTIONS,
        "heading": rendered_name(name),
        "toc_label": rendered_name(name),
        "members": f"[{', '.join(MEMBERS.get(home, ()))}]",
        "inherited_members": "true",
    }
    if home in NOT_CONSTRUCTED:
        options["merge_init_into_class"] = "false"
    return "\n".join([f"::: {home}", "    options:", *(f"      {key}: {value}" for key, value in options.items()), ""])

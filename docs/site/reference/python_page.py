"""Python reference: every exported name of `rfork`, and the types that these return, as blocks for
mkdocstrings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import rfork
from docs.site.reference.markdown import heading


@dataclass(frozen=True)
class ApiGroup:
    """Names that share a section: exported names, or modules of the types that they return."""

    title: str
    text: str
    names: tuple[str, ...]


MEMBERS = {
    "rfork.source.seed.Seed": (
        "measure_step", "record_step_latency", "updating", "suspend", "resume", "drain", "wait_report_acked", "close",
    ),
    "rfork.storage.module_io.lazy.LazyTensors": ("uri", "specs", "close"),
    "rfork.image.memory.Image": ("device", "digest", "manifest", "readable", "writable"),
    "rfork.image.layout.Layout": ("layout_id", "chunks", "differences", "first_difference"),
    "rfork.image.layout.Manifest": ("weights_id",),
    "rfork.receiver.report.ForkReport": (
        "gb_per_s", "storage_bytes", "resumed_bytes", "to_dict", "line",
    ),
    "rfork.storage.module_io.load.LoadReport": ("gb_per_s",),
    "rfork.artifacts.client.ArtifactReport": ("to_dict", "line"),
    "rfork.errors.RforkError": ("kind",),
    "rfork.schema.Rank": ("key",),
}  # fmt: skip
"""Public methods and properties of a class that has others."""

NOT_CONSTRUCTED = frozenset(
    {"rfork.source.seed.Seed", "rfork.storage.module_io.lazy.LazyTensors", "rfork.image.memory.Image"}
)
"""Classes whose objects users receive but do not construct: their constructors are not shown."""

GROUPS = (
    ApiGroup(
        "Fork and seed",
        "The target calls `fork` or `fork_pretrained`, the source `seed`. A target is a source afterwards.",
        ("fork", "fork_pretrained", "fork_report", "seed", "rfork.source.seed.Seed"),
    ),
    ApiGroup(
        "Report of a fork",
        "",
        ("ForkReport", "rfork.receiver.report.SourceShare", "RforkError"),
    ),
    ApiGroup(
        "Tensor files",
        "Disk, object stores and HTTP. These functions run in the calling process and need no planner.",
        (
            "load",
            "LoadReport",
            "load_tensors",
            "iter_tensors",
            "open_tensors",
            "rfork.storage.module_io.lazy.LazyTensors",
            "save",
            "no_init",
        ),
    ),
    ApiGroup(
        "Images",
        "The data model: the tensors of a module as one range of bytes.",
        ("capture", "rfork.image.memory.Image", "rfork.image.layout.Layout", "rfork.image.layout.Manifest"),
    ),
    ApiGroup(
        "Ranks and settings",
        "Read from the environment unless passed; [Settings](settings.md) lists all of them.",
        ("Rank", "InstanceSettings", "StorageSettings", "ArtifactSettings"),
    ),
    ApiGroup(
        "Artifacts",
        "Caches of compiled kernels as a second image: `rfork.artifacts`.",
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
"""Options of mkdocstrings."""
PLAIN = frozenset({"__version__", "artifacts"})
"""Exported names without a section: the version, and a module whose names have their own."""


def home_of(name: str) -> str:
    """Return the dotted path of an exported name's definition."""
    return name if "." in name else f"{getattr(rfork, name).__module__}.{name}"


def group_sections() -> Iterator[str]:
    """Return all sections of the page."""
    for group in GROUPS:
        yield from group.names


def page() -> str:
    """Render one section for each group."""
    parts = []
    for group in GROUPS:
        parts.append(heading(2, group.title, group.title.lower().replace(" ", "-")))
        parts.append(group.text + "\n")
        parts += [_block(name) for name in group.names]
    return "\n".join(parts)


def rendered_name(name: str) -> str:
    """Return the name as users write it."""
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

"""Python: every name that `rfork` exports, and what those return, as blocks for mkdocstrings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import rfork
from docs.site.reference.markdown import heading


@dataclass(frozen=True)
class Group:
    """Names that are told together: exported ones, or where others live that those return."""

    title: str
    text: str
    names: tuple[str, ...]


MEMBERS = {
    "rfork.seed.seed.Seed": (
        "serving", "observe", "updating", "suspend", "resume", "drain", "wait_acknowledged", "close",
    ),
    "rfork.storage.modules.lazy.Tensors": ("uri", "specs", "close"),
    "rfork.image.memory.Image": ("device", "digest", "manifest", "readable", "writable"),
    "rfork.image.layout.Layout": ("layout_id", "chunks", "differences", "first_difference"),
    "rfork.image.manifest.Manifest": ("weights_id",),
    "rfork.fork.report.ForkReport": (
        "gb_per_s", "storage_bytes", "resumed_bytes", "to_dict", "line",
    ),
    "rfork.storage.modules.load.LoadReport": ("gb_per_s",),
    "rfork.artifacts.report.ArtifactReport": ("to_dict", "line"),
    "rfork.errors.RforkError": ("kind",),
    "rfork.wire.instances.Rank": ("key",),
}  # fmt: skip
"""Which methods and properties of a class are for users, where it has any."""

MADE = frozenset({"rfork.seed.seed.Seed", "rfork.storage.modules.lazy.Tensors", "rfork.image.memory.Image"})
"""Classes whose objects users get and never make: how that is done is not shown."""

GROUPS = (
    Group(
        "Fork and seed",
        "The target calls `fork` or `fork_pretrained`, the source `seed`; a target is a source from then on.",
        ("fork", "fork_pretrained", "report_of", "seed", "rfork.seed.seed.Seed"),
    ),
    Group(
        "What a fork tells",
        "",
        ("ForkReport", "rfork.fork.report.SourceShare", "RforkError"),
    ),
    Group(
        "Tensor files",
        "On disk, in object stores and behind HTTP. They run in the process that calls them: no planner.",
        (
            "load",
            "LoadReport",
            "load_tensors",
            "tensors",
            "open",
            "rfork.storage.modules.lazy.Tensors",
            "save",
            "no_init",
        ),
    ),
    Group(
        "Images",
        "What is moved: the tensors of a module as one line of bytes.",
        ("capture", "rfork.image.memory.Image", "rfork.image.layout.Layout", "rfork.image.manifest.Manifest"),
    ),
    Group(
        "Ranks and settings",
        "Read from the environment where none are given; [Settings](settings.md) has all of them.",
        ("Rank", "Settings", "StorageSettings", "ArtifactSettings"),
    ),
    Group(
        "Artifacts",
        "Caches of compiled kernels, as a second image: `rfork.artifacts`.",
        (
            "rfork.artifacts.taking.fetch",
            "rfork.artifacts.giving.seed",
            "rfork.artifacts.stored.save",
            "rfork.artifacts.stored.load",
            "ArtifactReport",
        ),
    ),
)
LOOK = {
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


def told() -> Iterator[str]:
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


def shown(name: str) -> str:
    """What users write for it."""
    if "." not in name:
        return f"rfork.{name}"
    if name.startswith("rfork.artifacts."):
        return f"rfork.artifacts.{name.rpartition('.')[2]}"
    return name.rpartition(".")[2]


def _block(name: str) -> str:
    home = home_of(name)
    options = {
        **LOOK,
        "heading": shown(name),
        "toc_label": shown(name),
        "members": f"[{', '.join(MEMBERS.get(home, ()))}]",
        "inherited_members": "true",
    }
    if home in MADE:
        options["merge_init_into_class"] = "false"
    return "\n".join(
        [f"::: {home}", "    options:", *(f"      {key}: {value}" for key, value in options.items()), ""]
    )

"""What seeds and forks of a vLLM server meet under."""

from __future__ import annotations

from rfork.engines.model_name import canonical_model_name


def model_name(model: str, setting: str | None, draft: bool) -> str:
    """The setting (`setting`), else the model's own name.

    A draft keeps its own name behind the setting: two servers may well have two drafts.
    """
    name = canonical_model_name(model)
    if setting is not None:
        return f"{setting}/{name}" if draft else setting
    return name

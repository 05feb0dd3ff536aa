"""Name under which seeds and forks of a vLLM server find each other."""

from __future__ import annotations

from rfork.engines.model_name import canonical_model_name


def model_name(model: str, setting: str | None, draft: bool) -> str:
    """Return the configured name (`setting`), else the model's own name.

    A draft appends its own name to the configured one, because two servers may have different drafts.
    """
    name = canonical_model_name(model)
    if setting is not None:
        return f"{setting}/{name}" if draft else setting
    return name

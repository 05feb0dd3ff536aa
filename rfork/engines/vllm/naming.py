"""What seeds and forks of a vLLM server meet under."""

from __future__ import annotations

from rfork.engines.naming import meeting_name


def model_name(model: str, told: str | None, draft: bool) -> str:
    """The setting (`told`), else the model's own name.

    A draft keeps its own name behind the setting: two servers may well have two drafts.
    """
    name = meeting_name(model)
    if told is not None:
        return f"{told}/{name}" if draft else told
    return name

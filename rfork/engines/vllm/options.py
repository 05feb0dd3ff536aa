"""rfork's settings as a vLLM server is told them: the environment's, and ``--model-loader-extra-config``."""

from __future__ import annotations

import logging
from difflib import get_close_matches
from typing import TYPE_CHECKING

from rfork import settings as options
from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.settings import InstanceSettings

if TYPE_CHECKING:
    from vllm.config import LoadConfig

log = logger(__name__)


def settings_of(load_config: LoadConfig) -> InstanceSettings:
    """The environment's settings under those of the load configuration. Raises SettingsError, one line."""
    extra = load_config.model_loader_extra_config or {}
    if not isinstance(extra, dict):
        raise SettingsError("--model-loader-extra-config is not a JSON object of rfork's settings")
    if unknown := sorted(extra.keys() - InstanceSettings.model_fields.keys()):
        near = get_close_matches(unknown[0], InstanceSettings.model_fields, 1)
        raise SettingsError(
            f"--model-loader-extra-config: rfork has no setting {', '.join(map(repr, unknown))}",
            hint=f"did you mean {near[0]!r}?" if near else "its names are those of RFORK_*, in lower case",
        )
    return options.load(InstanceSettings, **extra)


def cap_deadline(settings: InstanceSettings, ready_s: float) -> InstanceSettings:
    """A fork's deadline is half of vLLM's for its engines, at most: one that waited can still load."""
    max_deadline_s = ready_s / 2
    if settings.deadline_s <= max_deadline_s:
        return settings
    log.info(
        "a fork may take half of the time that vLLM gives its engines",
        deadline_s=max_deadline_s,
        hint="VLLM_ENGINE_READY_TIMEOUT_S is vLLM's",
    )
    return settings.model_copy(update={"deadline_s": max_deadline_s})


def attach_log_handler(level: str) -> None:
    """Show rfork's lines where vLLM's are, unless somebody says where they go."""
    own, vllm = logging.getLogger("rfork"), logging.getLogger("vllm")
    if not own.hasHandlers() and vllm.handlers:
        own.handlers = list(vllm.handlers)
        own.setLevel(level.upper())
        own.propagate = False

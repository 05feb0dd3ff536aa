"""rfork's settings of a vLLM server: the environment's, overridden by ``--model-loader-extra-config``."""

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
    """Return the environment's settings, overridden by those of the load configuration.

    Raises SettingsError with one line.
    """
    extra = load_config.model_loader_extra_config or {}
    if not isinstance(extra, dict):
        raise SettingsError(
            "--model-loader-extra-config must be a JSON object of rfork settings",
            hint="""e.g. '{"planner": "http://planner:8700"}'""",
        )
    if unknown := sorted(extra.keys() - InstanceSettings.model_fields.keys()):
        near = get_close_matches(unknown[0], InstanceSettings.model_fields, 1)
        raise SettingsError(
            f"--model-loader-extra-config: unknown rfork setting {', '.join(map(repr, unknown))}",
            hint=f"did you mean {near[0]!r}?"
            if near
            else "the settings are the RFORK_* variables in lower case, without the prefix",
        )
    return options.load(InstanceSettings, **extra)


def cap_deadline(settings: InstanceSettings, ready_s: float) -> InstanceSettings:
    """Limit a fork's deadline to half of vLLM's start timeout, so that a failed fork leaves time to load."""
    max_deadline_s = ready_s / 2
    if settings.deadline_s <= max_deadline_s:
        return settings
    log.info(
        "deadline reduced to half of vLLM's engine start timeout",
        deadline_s=max_deadline_s,
        hint="raise VLLM_ENGINE_READY_TIMEOUT_S to allow more",
    )
    return settings.model_copy(update={"deadline_s": max_deadline_s})


def attach_log_handler(level: str) -> None:
    """Send rfork's log lines to vLLM's handlers, unless rfork's logger is already configured."""
    own, vllm = logging.getLogger("rfork"), logging.getLogger("vllm")
    if not own.hasHandlers() and vllm.handlers:
        own.handlers = list(vllm.handlers)
        own.setLevel(level.upper())
        own.propagate = False

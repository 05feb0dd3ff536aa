"""The entry point that vLLM calls in each of its processes, before it knows what it will serve.

So it does little, imports what vLLM itself has imported by then, and raises nothing: a server that does not
ask for rfork starts as if rfork were not installed.
"""

from __future__ import annotations

import multiprocessing
import sys

from rfork.engine_command import LOAD_FORMAT
from rfork.engines.vllm.engine_manager import hook_engine_manager


def register() -> None:
    """Make ``--load-format rfork`` known to vLLM. Called in the API server, the engine core and each worker;
    again is harmless.
    """
    try:
        hook_engine_manager()
        if not _is_api_server():
            _register_loader()
    except Exception as error:  # vLLM has to start without rfork, whatever a new version of it moved
        from rfork.logs import logger  # of what registering takes, structlog would be most

        logger(__name__).error(
            "rfork does not fit this vLLM: --load-format rfork is not to be had",
            because=f"{type(error).__name__}: {error}",
            hint="see the page of compatible versions",
        )


def _register_loader() -> None:
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER, register_model_loader

    from rfork.engines.vllm.loader import RforkModelLoader

    if _LOAD_FORMAT_TO_MODEL_LOADER.get(LOAD_FORMAT) is not RforkModelLoader:
        register_model_loader(LOAD_FORMAT)(RforkModelLoader)


def _is_api_server() -> bool:
    """Whether this is the process of ``vllm serve`` itself, which has others load: it is spared seconds."""
    return (
        multiprocessing.parent_process() is None
        and sys.argv[1:2] == ["serve"]
        and "vllm.entrypoints.cli.serve" in sys.modules
    )

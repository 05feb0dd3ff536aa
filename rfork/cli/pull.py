"""`rfork pull`: fork a model from running instances into this process."""

from __future__ import annotations

import errno
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rfork import settings as options
from rfork.cli import formatters
from rfork.cli.console import Bar, configure_logs, handle_errors, print_result, transformers_bars
from rfork.cli.options import (
    BindOption,
    EgressOption,
    FolderArgument,
    HostOption,
    JsonOption,
    NameOption,
    PlannerOption,
    VersionOption,
    model_name,
)
from rfork.errors import ModelError, SettingsError, StorageError, StorageFull
from rfork.image import ranges
from rfork.image.chunks import Chunks
from rfork.schema import ForkProgress
from rfork.settings import InstanceSettings
from rfork.shutdown import shutdown_on_signal, wait_for_shutdown

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FULL: Final = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk or quota."""


def pull(
    folder: FolderArgument,
    name: NameOption = None,
    version: VersionOption = None,
    planner: PlannerOption = None,
    snapshot: Annotated[
        str | None,
        typer.Option(metavar="URI", help="Snapshot to read if no instance has the weights [env: RFORK_SNAPSHOT]"),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="PATH_OR_URI",
            help="Folder of safetensors files to load if no source works [default: MODEL_DIR, if it has weights]",
        ),
    ] = None,
    generate: Annotated[str | None, typer.Option(metavar="PROMPT", help="Answer this prompt after the fork.")] = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the model to this folder as a checkpoint.")
    ] = None,
    stay: Annotated[bool, typer.Option("--stay", help="Keep running as a seed until interrupted.")] = False,
    sha256: Annotated[
        bool, typer.Option("--sha256", help="Print the SHA-256 of all tensors, for comparison with another process.")
    ] = False,
    deadline: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Maximum seconds before falling back [env: RFORK_DEADLINE_S]"),
    ] = None,
    bind: BindOption = None,
    host: HostOption = None,
    egress_rate: EgressOption = None,
    as_json: JsonOption = False,
) -> None:
    """Build the model of MODEL_DIR from its config, and fork its weights from a running instance."""
    with handle_errors(as_json=as_json):
        chosen = options.load(
            InstanceSettings,
            planner=planner,
            bind=bind,
            node_name=host,
            max_egress_bytes_per_s=egress_rate,
            deadline_s=deadline,
            version=version,
        )
        from rfork.storage.versions.version import version_of_files

        files = checkpoint or (folder if version_of_files(folder) is not None else None)
        if not (chosen.planner or snapshot or chosen.snapshot or files):
            raise SettingsError(
                "no planner is set, and there is nothing else to read from",
                hint="pass --planner URL or set RFORK_PLANNER; or pass --snapshot or --checkpoint",
            )
        configure_logs(chosen, as_json=as_json, brief=True)
        from rfork import _api as engine
        from rfork.engines.transformers import EmptyModel
        from rfork.image.capture import capture
        from rfork.image.memory import image_sha256

        model = model_name(folder, name)
        unfilled = EmptyModel(folder, files)
        # Suppress the progress bar of transformers, which a fallback may use.
        with Bar(f"fork {model}") as bar, transformers_bars(enabled=False):

            def show(progress: ForkProgress, image_bytes: int) -> None:
                verified = ranges.count(progress.verified)
                # Chunks kept by a previous process are verified without being read.
                verified_bytes = verified * image_bytes // max(1, len(Chunks.of(image_bytes)))
                done = min(max(progress.bytes_read, verified_bytes), image_bytes)
                bar.update(done, image_bytes, formatters.sources_note(progress.sources))

            report = engine.fork_with_fallbacks(
                unfilled.model,
                model=model,
                rank=None,
                snapshot=snapshot,
                later_fallbacks=unfilled.fallbacks,
                files=partial(version_of_files, files) if files is not None else None,
                exclude=(),
                settings=chosen,
                on_progress=show,
            )
        module = unfilled.model
        try:
            result = report.to_dict()
            if sha256:
                result["sha256"] = image_sha256(capture(module))
            if output is not None:
                _write(module, folder, output)
                result["output"] = str(output)
            if generate is not None:
                began = time.monotonic()
                result["generated"] = _generate_reply(module, folder, generate)
                result["generate_seconds"] = round(time.monotonic() - began, 3)
            stopped = shutdown_on_signal() if stay else None
            lines = [report.line()]
            if sha256:
                lines.append(f"sha256 of all tensors: {result['sha256']}")
            if generate is not None:
                lines.append(f"> {generate}\n{result['generated']}")
            print_result(result, "\n".join(lines), as_json=as_json)
            if stopped is not None:
                wait_for_shutdown(stopped)
        finally:
            if report.seed is not None:
                report.seed.close(chosen.drain_timeout_s)


def _generate_reply(module: PreTrainedModel, folder: Path, prompt: str) -> str:
    from rfork.engines.transformers import generate, tokenizer_of

    try:
        return generate(module, tokenizer_of(folder), prompt)
    except (ValueError, TypeError, RuntimeError, IndexError) as error:  # errors raised by a model's own code
        raise ModelError(f"{folder}: the model cannot answer the prompt: {error}") from error


def _write(module: PreTrainedModel, folder: Path, output: Path) -> None:
    from rfork.engines.transformers import tokenizer_of

    try:
        module.save_pretrained(output)
        if (folder / "tokenizer_config.json").is_file():
            tokenizer_of(folder).save_pretrained(output)
    except Exception as error:
        from safetensors import SafetensorError

        if not isinstance(error, OSError | SafetensorError):
            raise
        raise _not_written(output, error) from None


def _not_written(output: Path, error: Exception) -> StorageError:
    """Convert a write error; safetensors reports the operating system's error only in its text."""
    number = error.errno if isinstance(error, OSError) else None
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if number in FULL or any(f"(os error {full})" in text for full in FULL):
        return StorageFull(
            f"{output}: no space left for the copy", hint="free some space, or choose another folder with --output"
        )
    return StorageError(f"{output}: {text}")

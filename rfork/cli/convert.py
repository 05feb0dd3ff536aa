"""`rfork convert`: convert tensor files to another format, on any storage."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rfork.cli.console import Bar, handle_errors, print_result
from rfork.cli.options import JsonOption, bytes_in

FloatName = Literal["float64", "float32", "float16", "bfloat16"]


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Input: a path, s3://… or https://…")],
    destination: Annotated[
        str,
        typer.Argument(
            metavar="DST",
            help="Output: NAME.tensors, NAME.safetensors (a plain safetensors file), or a folder. A folder becomes a "
            "snapshot or, with --max-shard-size, a Hugging Face folder with an index.",
        ),
    ],
    dtype: Annotated[
        FloatName | None, typer.Option("--dtype", help="Convert floating-point tensors to this type.")
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option("--only", metavar="PATTERN", help="Tensors to include, such as 'layers.0.*'; repeatable."),
    ] = None,
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            "--max-shard-size",
            metavar="SIZE",
            help="Maximum bytes per file, such as 5GB or 500MiB: write several files.",
        ),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(
            "--rank",
            min=0,
            help="Number of the rank whose files to read from a folder or from model-rank-%03d.tensors.",
        ),
    ] = None,
    source_key: Annotated[
        Path | None, typer.Option("--src-key-file", help="File with the key of SRC: 32 bytes, or 64 hex digits.")
    ] = None,
    source_password: Annotated[
        Path | None, typer.Option("--src-password-file", help="File with the password of SRC on its first line.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key-file", help="File with the key to encrypt DST (NAME.tensors).")
    ] = None,
    password: Annotated[
        Path | None, typer.Option("--password-file", help="File with the password to encrypt DST on its first line.")
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Replace DST. An existing set of files (--max-shard-size) is removed before the first new file is "
            "written, so a later failure leaves neither.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Convert the tensors of SRC to the format given by the name of DST.

    SRC is a safetensors file, a folder of them, a .tensors file or numbered set, or a snapshot. Names, types,
    shapes and bytes do not change; a snapshot is verified first. If the command fails, no new file remains at
    DST.
    """
    with handle_errors(as_json=as_json):
        import torch

        from rfork.storage.convert import convert as run
        from rfork.storage.tensorizer.encryption import Secret

        unlock = Secret.from_files(source_key, source_password)
        lock = Secret.from_files(key, password)
        max_shard_bytes = bytes_in(max_shard_size, "--max-shard-size") if max_shard_size is not None else None
        with Bar("convert") as bar:
            saved = run(
                source,
                destination,
                dtype=getattr(torch, dtype) if dtype is not None else None,
                only=only or (),
                rank=rank,
                unlock=unlock,
                lock=lock,
                max_shard_bytes=max_shard_bytes,
                force=force,
                progress=bar.update,
            )
        result = {
            "uri": saved.uri,
            "tensors": saved.tensors,
            "bytes": saved.nbytes,
            "seconds": round(saved.seconds, 3),
            "gb_per_s": round(saved.gb_per_s, 3),
        }
        print_result(result, saved.line(), as_json=as_json)

"""Compilation of the fake driver library against NVIDIA's header, which Triton's wheel contains."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("libcuda.c")
FLAGS = ("-std=c11", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-pthread", "-Wall", "-Wextra", "-Werror")


@cache
def library_path() -> Path:
    """Return the compiled library, from the cache if source, header and flags are unchanged. Runs concurrently with
    other processes.

    Raises RuntimeError without a compiler or the header.
    """
    compiler, header = shutil.which("cc"), _header()
    if compiler is None:
        raise RuntimeError("the fake of the NVIDIA driver needs a C compiler: apt-get install gcc libc6-dev")
    digest = hashlib.sha256("\0".join(FLAGS).encode())
    for path in (SOURCE, header):
        digest.update(path.read_bytes())
    # Only this user may write there, since the library is loaded.
    folder = Path(tempfile.gettempdir()) / f"rfork-fake-libcuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user")
    library = folder / f"{digest.hexdigest()[:20]}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            compiled = Path(temporary) / library.name
            command = [compiler, *FLAGS, f"-I{header.parent}", "-o", str(compiled), str(SOURCE)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                raise RuntimeError(f"cannot compile {SOURCE}:\n{result.stderr}")
            compiled.rename(library)
    return library


def _header() -> Path:
    spec = importlib.util.find_spec("triton")
    for folder in (spec and spec.submodule_search_locations) or ():
        header = Path(folder) / "backends/nvidia/include/cuda.h"
        if header.exists():
            return header
    raise RuntimeError("the fake of the NVIDIA driver needs cuda.h: install the package triton (3.5 or newer)")

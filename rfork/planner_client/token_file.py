"""Bearer token that is kept in a file, as secrets are mounted, and replaced there when it is rotated."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Final

from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.tls_files import file_version

TOKEN: Final = re.compile("[!-~]+")
"""Visible ASCII: all that can stand in a header."""


class TokenFile:
    """The token in a file, read again whenever the file changes. Thread-safe.

    While the file cannot be used, the token read before stays in use. The constructor raises SettingsError
    for a file that cannot be used. No error and no log names the token.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._version = file_version(path)
        self._token = _read(path)

    @property
    def token(self) -> str:
        """The token that the file holds now."""
        with self._lock:
            version = file_version(self._path)
            if version != self._version:
                self._version = version
                self._read_again()
            return self._token

    def reread(self) -> str:
        """Return the token after reading the file, whether it seems to have changed or not."""
        with self._lock:
            self._version = file_version(self._path)
            self._read_again()
            return self._token

    def _read_again(self) -> None:
        log = logger("rfork.token")
        try:
            token = _read(self._path)
        except SettingsError as error:
            log.warning("token file cannot be used, keeping the token read before", reason=str(error))
            return
        if token != self._token:
            self._token = token
            log.info("token file read again", file=str(self._path))


def _read(path: Path) -> str:
    try:
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise SettingsError(f"RFORK_TOKEN_FILE: {path}: {reason}") from None
    if not TOKEN.fullmatch(token):
        raise SettingsError(
            f"RFORK_TOKEN_FILE: {path} does not hold one token of visible ASCII characters",
            hint="write the token alone into the file",
        )
    return token

"""Bearer token in a file, such as a mounted secret, which may be replaced at any time."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Final

from rfork.errors import SettingsError
from rfork.logs import logger
from rfork.net.tls import file_version

TOKEN: Final = re.compile("[!-~]+")
"""Visible ASCII, as allowed in a header."""


class TokenFile:
    """The token in a file, read again whenever the file changes. Thread-safe.

    While the file is unusable, the previous token stays in use. The constructor raises SettingsError for an
    unusable file. Errors and logs never contain the token.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._version = file_version(path)
        self._token = _read(path)

    @property
    def token(self) -> str:
        """The current token."""
        with self._lock:
            version = file_version(self._path)
            if version != self._version:
                self._version = version
                self._read_again()
            return self._token

    def reread(self) -> str:
        """Read the file, even if it seems unchanged, and return the token."""
        with self._lock:
            self._version = file_version(self._path)
            self._read_again()
            return self._token

    def _read_again(self) -> None:
        log = logger("rfork.token")
        try:
            token = _read(self._path)
        except SettingsError as error:
            log.warning("token file unusable, keeping the previous token", reason=str(error))
            return
        if token != self._token:
            self._token = token
            log.info("token file reloaded", file=str(self._path))


def _read(path: Path) -> str:
    try:
        token = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SettingsError(f"RFORK_TOKEN_FILE: cannot read {path}: {reason}") from None
    if not TOKEN.fullmatch(token):
        raise SettingsError(
            f"RFORK_TOKEN_FILE: {path} does not contain one token of visible ASCII characters",
            hint="write only the token into the file",
        )
    return token

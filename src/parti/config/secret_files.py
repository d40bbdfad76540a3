"""Files with secrets: who else may read them, and what to do about it.

A file counts as exposed if others than its owner may read or write it and this user can change that: because the file
is its own, or because it is root. What is owned by somebody else cannot be changed from here; Kubernetes mounts
secrets that way, readable by all users of a container that has one.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from parti.config.schema import Settings
from parti.config.sources import config_path, read_config_file

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_KEYS = ("nkey_seed_file", "credentials_file", "tls_key", "system_credentials_file")
_IN_CONFIG = frozenset({"password", "token", "owner_token", "system_password"})


@dataclass(frozen=True, slots=True)
class Exposure:
    """A file with a secret that others may use."""

    setting: str
    path: Path
    mode: int

    @property
    def text(self) -> str:
        """What is wrong."""
        return f"{self.setting}: other users may read or write {self.path} (mode {self.mode:04o}), expected 0600"

    @property
    def fix(self) -> str:
        """What to do."""
        return f"chmod 600 {shlex.quote(str(self.path))}"


def find_exposure(setting: str, path: Path) -> Exposure | None:
    """Return how a file is exposed; None if it is not, or cannot be looked at."""
    if os.name != "posix":
        return None
    try:
        found = path.stat()
    except OSError:
        return None  # whoever reads it says why
    mode = stat.S_IMODE(found.st_mode)
    changeable = os.geteuid() in {0, found.st_uid}
    return Exposure(setting, path, mode) if mode & _OTHERS and changeable else None


def exposed_keys(settings: Settings) -> Iterator[Exposure]:
    """Find key files, and a config file with secrets in it, that are exposed."""
    for setting in _KEYS:
        path = getattr(settings, setting)
        if path is not None and (exposure := find_exposure(setting, path)):
            yield exposure
    path = config_path()
    if path is None:
        return
    path = path.expanduser()
    values = read_config_file(path, Settings.model_fields)
    if (_IN_CONFIG & values.keys() or "@" in str(values.get("nats", ""))) and (
        exposure := find_exposure("config file", path)
    ):
        yield exposure

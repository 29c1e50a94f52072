"""What the environment may decide: one frozen value, read when asked for.

| variable | meaning | default |
|---|---|---|
| `HOPSPARSE_CACHE_DIR` | where compiled kernels and tuning results are kept | `$XDG_CACHE_HOME/hopsparse`, else `~/.cache/hopsparse` |

Nothing is read at import, and no folder is created here. `NO_COLOR` is honoured by rich.
"""  # noqa: E501

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CACHE_VARIABLE = "HOPSPARSE_CACHE_DIR"


@dataclass(frozen=True)
class Settings:
    """The settings of one process.

    Attributes:
        cache_dir: Folder of compiled kernels and tuning results; it may not exist yet.
    """

    cache_dir: Path

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the settings.

        Args:
            environment: Variables to read instead of those of the process.

        Example:
            >>> Settings.from_environment({"HOPSPARSE_CACHE_DIR": "/tmp/kernels"}).cache_dir.name
            'kernels'
        """
        variables = os.environ if environment is None else environment
        if chosen := variables.get(CACHE_VARIABLE):
            return cls(cache_dir=_expanded(chosen))
        base = variables.get("XDG_CACHE_HOME")
        return cls(cache_dir=(Path(base) if base else _expanded("~/.cache")) / "hopsparse")


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        # A user without a home has no cache: this is a folder that nobody can make.
        return Path(os.devnull) / path

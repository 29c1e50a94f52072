"""What the environment may decide: one frozen value, read when asked for.

| variable | meaning | default |
|---|---|---|
| `HOPSPARSE_CACHE_DIR` | where compiled kernels and tuning results are kept | `$XDG_CACHE_HOME/hopsparse`, else `~/.cache/hopsparse` |
| `HOPSPARSE_DELAYS` | seed of the pauses that kernels are compiled with, to verify that none forgets to wait (`hopsparse verify --delays`) | no pauses |

Nothing is read at import, and no folder is created here. `NO_COLOR` is honoured by rich.
"""  # noqa: E501

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import ArgumentError

CACHE_VARIABLE = "HOPSPARSE_CACHE_DIR"
DELAYS_VARIABLE = "HOPSPARSE_DELAYS"


@dataclass(frozen=True)
class Settings:
    """The settings of one process.

    Attributes:
        cache_dir: Folder of compiled kernels and tuning results; it may not exist yet.
        delays: Seed of the pauses that kernels are compiled with; None: no pauses.
    """

    cache_dir: Path
    delays: int | None = None

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Read the settings.

        Args:
            environment: Variables to read instead of those of the process.

        Raises:
            ArgumentError: A seed that is no number.

        Example:
            >>> Settings.from_environment({"HOPSPARSE_CACHE_DIR": "/tmp/kernels"}).cache_dir.name
            'kernels'
        """
        variables = os.environ if environment is None else environment
        delays = _seed(variables.get(DELAYS_VARIABLE))
        if chosen := variables.get(CACHE_VARIABLE):
            return cls(_expanded(chosen), delays)
        base = variables.get("XDG_CACHE_HOME")
        return cls((Path(base) if base else _expanded("~/.cache")) / "hopsparse", delays)


def _seed(text: str | None) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or int(text) >= 2**32:
        raise ArgumentError(
            f"{DELAYS_VARIABLE}={text}",
            need="a seed of 0 to 4294967295, or nothing",
            hint=f"unset {DELAYS_VARIABLE}",
        )
    return int(text)


def _expanded(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:
        # A user without a home has no cache: this is a folder that nobody can make.
        return Path(os.devnull) / path

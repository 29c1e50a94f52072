"""Every option of a command is on the page that documents the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer.main

from hopsparse.cli import app

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {
    "attention-report": "attention.md",
    "comm-report": "comm.md",
    "compare": "evaluate.md",
    "evaluate": "evaluate.md",
    "profile": "profile.md",
    "recover": "recover.md",
}
GROUP: Any = typer.main.get_command(app)


COMMANDS: dict[str, Any] = dict(GROUP.commands) | {
    f"{name} {inner}": each
    for name, group in GROUP.commands.items()
    for inner, each in getattr(group, "commands", {}).items()
}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_option_is_documented(name: str) -> None:
    options = [each.opts[-1] for each in COMMANDS[name].params if each.opts[0][0] == "-"]
    assert "--json" in options
    text = (DOCS / PAGES.get(name, "cli.md")).read_text(encoding="utf-8")
    assert [option for option in options if f"`{option}" not in text] == []

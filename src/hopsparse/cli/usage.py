"""A command line that typer refuses, told as every other error is: with --json as one object."""

from __future__ import annotations

import json
from typing import Any

import typer
from typer.core import TyperGroup

from ..errors import ArgumentError
from .options import error_json

# What all complaints about options are; typer has it from click, or has a copy of click in it.
_UsageError: Any = typer.BadParameter.__base__
_WORDS = "hopsparse.words"


class Commands(TyperGroup):
    """The commands; a wrong option is told on standard error by typer, and here as JSON."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any
    ) -> Any:
        """Keep the words: reading them empties the list."""
        words = tuple(args)
        try:
            context = super().make_context(info_name, args, parent, **extra)
        except _UsageError as error:
            _tell(error, words)
            raise
        context.meta[_WORDS] = words
        return context

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the words name."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            _tell(error, ctx.meta[_WORDS])
            raise


def _tell(error: Any, words: tuple[str, ...]) -> None:
    if "--json" not in words:
        return
    command = "hopsparse" if error.ctx is None else error.ctx.command_path
    refused = ArgumentError(
        " ".join(error.format_message().split()).rstrip("."),
        need="the options that its help lists",
        hint=f"{command} --help",
    )
    typer.echo(json.dumps({"error": error_json(refused)}, indent=2))

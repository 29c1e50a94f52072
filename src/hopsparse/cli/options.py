"""A command is a frozen dataclass of its options and a function that takes one.

typer reads options from a function's parameters; a command with fifteen of them would hand
fifteen arguments around. Here the dataclass is the signature: its fields carry the same
`Annotated[..., typer.Option(...)]`, and the function gets one value.
"""

from __future__ import annotations

import errno
import inspect
import json
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from ..errors import ArgumentError, HopsparseError, VerificationError
from .console import print_error, stderr

Options = TypeVar("Options")

REPORT_JSON, REPORT_PAGE = "report.json", "report.html"

# What `sparsify` and `recover` both take.
EvalText = Annotated[
    Path | None,
    typer.Option(
        "--eval", metavar="FILE", help="Text to evaluate on; two bundled ones if left out."
    ),
]
EvalWindows = Annotated[int, typer.Option(help="Windows of each evaluation text.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an interrupted run.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace a checkpoint that hopsparse wrote.")
]
ReportAsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON instead.")]

USAGE_EXIT = 2
FAILED_EXIT = 1
INTERRUPTED_EXIT = 130


def command(
    options: type[Options], run: Callable[[Options], None], *, name: str
) -> Callable[..., None]:
    """Build what `typer.Typer.command` registers; its help is the docstring of `run`.

    A HopsparseError ends the process with its three parts on standard error, and, if the options
    have a true `json`, as one JSON object on standard output. Other exceptions pass through.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Greet:
        ...     whom: str
        >>> def greet(options: Greet) -> None:
        ...     print("hello", options.whom)
        >>> command(Greet, greet, name="greet")(whom="you")
        hello you
    """

    def shell(**values: Any) -> None:
        chosen = options(**values)
        try:
            _run(run, chosen)
        except HopsparseError as error:
            print_error(error)
            if getattr(chosen, "json", False):
                typer.echo(json.dumps({"error": error_json(error)}, indent=2))
            failed = isinstance(error, VerificationError)
            raise typer.Exit(FAILED_EXIT if failed else USAGE_EXIT) from None
        except KeyboardInterrupt:
            stderr().print("Interrupted.")
            raise typer.Exit(INTERRUPTED_EXIT) from None

    hints = get_type_hints(options, include_extras=True)
    parameters = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=hints[field.name],
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
        )
        for field in fields(options)  # type: ignore[arg-type]
    ]
    shell.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    shell.__annotations__ = hints
    shell.__doc__ = run.__doc__
    shell.__name__ = name
    return shell


def unless_subcommand(shell: Callable[..., None]) -> Callable[..., None]:
    """A command that also holds others: it does nothing where one of those is named.

    Args:
        shell: What `command` built.
    """

    def callback(context: typer.Context, **values: Any) -> None:
        if context.invoked_subcommand is None:
            shell(**values)

    known = inspect.signature(shell).parameters.values()
    kind = inspect.Parameter.KEYWORD_ONLY
    own = inspect.Parameter("context", kind, annotation=typer.Context)
    callback.__signature__ = inspect.Signature([own, *known])  # type: ignore[attr-defined]
    callback.__annotations__ = {"context": typer.Context, **shell.__annotations__}
    callback.__doc__, callback.__name__ = shell.__doc__, shell.__name__
    return callback


def _run(run: Callable[[Options], None], chosen: Options) -> None:
    """Run a command; a name that no file system takes is an error of the input."""
    try:
        run(chosen)
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        raise ArgumentError(
            f"{error.filename}: {error.strerror}",
            need="a name that its file system takes, with .partial or .costs.json behind it",
            hint="a shorter one",
        ) from error


def error_json(error: HopsparseError) -> dict[str, str]:
    """The error as tools read it."""
    return {
        "kind": type(error).__name__,
        "got": error.got,
        "need": error.need,
        "try": error.hint,
    }

"""The command line: one file a command, over the public API.

Nothing heavy is imported until a command runs, so that `hopsparse --help` answers at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ..version import __version__
from .attention_report import ATTENTION_REPORT
from .bench import BENCH
from .comm_report import COMM_REPORT
from .compare import COMPARE
from .compile import COMPILE
from .convert import CONVERT
from .doctor import DOCTOR
from .evaluate import EVALUATE
from .explain import EXPLAIN
from .generate import GENERATE
from .inspect import INSPECT
from .plan import PLAN
from .profile import PROFILE
from .recover import RECOVER
from .sparsify import SPARSIFY
from .tune import TUNE
from .usage import Commands
from .verify import VERIFY

__all__ = ["app", "main"]

app = typer.Typer(
    name="hopsparse",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    # Anything that is no HopsparseError is a bug: its traceback is shown as Python shows it.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_COMMANDS = (
    DOCTOR,
    SPARSIFY,
    PLAN,
    RECOVER,
    EVALUATE,
    COMPARE,
    INSPECT,
    CONVERT,
    GENERATE,
    VERIFY,
    PROFILE,
    COMPILE,
    EXPLAIN,
    TUNE,
    COMM_REPORT,
    ATTENTION_REPORT,
)
for _command in _COMMANDS:
    app.command(_command.__name__)(_command)
app.add_typer(BENCH, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version."
        ),
    ] = False,
) -> None:
    """Sparse operators, formats and models for NVIDIA Hopper GPUs."""


def main() -> None:
    """Run the command line; the entry point `hopsparse`."""
    app()

"""What `hopsparse verify` checks of the operators: each folder's `checks.py` says it.

Such a module gives its checks with `checks()`, beside the cases that tests and benchmarks take.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import walk_packages

from ..verify import Check


def all_checks() -> list[Check]:
    """Every check of every operator, operator by operator.

    Example:
        >>> {"spmm_nm", "select"} <= {check.op for check in all_checks()}
        True
    """
    return [check for module in _modules() for check in import_module(module).checks()]


def _modules() -> Iterator[str]:
    package = import_module(__package__)
    found = walk_packages(package.__path__, f"{__package__}.")
    return (
        each.name
        for each in found
        if each.name.split(".")[-1] == "checks" and not each.ispkg and each.name != __name__
    )

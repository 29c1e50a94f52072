"""The operators that have kernels, and every kernel they may run.

An operator has kernels if its folder has a `plan.py`. That module gives them with `every_spec()`,
and says with `sass_of(spec)` which instructions the code of one must show.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType

from ..plan import KernelSpec


def plans() -> dict[str, ModuleType]:
    """The `plan` module of each operator that has one, by the operator's name.

    Example:
        >>> all(hasattr(plan, "every_spec") for plan in plans().values())
        True
    """
    package = import_module(__package__)
    folders = sorted(found.name for found in iter_modules(package.__path__) if found.ispkg)
    names = {op: f"{__package__}.{op}.plan" for op in folders}
    return {op: import_module(name) for op, name in names.items() if find_spec(name)}


def verified_specs(op: str) -> list[KernelSpec]:
    """Kernels that `hopsparse verify --all` launches, nearly all of them.

    Those of an operator whose folder has a `verified.py` are more than it runs in any other way.

    Args:
        op: One of `plans()`.
    """
    name = f"{__package__}.{op}.verified"
    more: list[KernelSpec] = import_module(name).specs_of_all() if find_spec(name) else []
    return list(dict.fromkeys([*every_spec(op), *more]))


def every_spec(op: str) -> list[KernelSpec]:
    """All kernels that an operator may run.

    Args:
        op: One of `plans()`.
    """
    specs: list[KernelSpec] = plans()[op].every_spec()
    return specs

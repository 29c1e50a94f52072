"""Another build of this package in the same process, so that both are timed side by side.

Its sources are loaded as a package of another name. Operators are entered into torch by the name
of the package, so that name is replaced in the text of each module as it is compiled.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from unittest.mock import patch

import wrapt

from ..errors import ArgumentError

_OWN = "hopsparse"
# What torch knows operators by, in every form that sources have.
_SPELLINGS = ('"{}::', "ops.{}.", 'Library("{}"')


def load_build(folder: Path, name: str) -> ModuleType:
    """Import the package that lies in a folder, under another name.

    Loading the same folder under the same name again gives the same package.

    Args:
        folder: A checkout, its `src`, or a folder that the package is installed in.
        name: What it is called in this process, such as `hopsparse_base`.

    Raises:
        ArgumentError: There is no package in the folder, it cannot be imported beside this one, or
            the name is taken by another.

    Example:
        >>> import hopsparse
        >>> other = load_build(Path(hopsparse.__file__).parents[1], "hopsparse_example")
        >>> other.__name__, other.formats.NM is hopsparse.formats.NM
        ('hopsparse_example', False)
    """
    root = package_in(folder)
    known = sys.modules.get(name)
    if known is not None:
        if Path(str(known.__file__)).parent == root:
            return known
        raise ArgumentError(
            f"{name} is {known.__file__}", need="a name that is free", hint=f"{name}_2"
        )
    finder = _Finder(name, root)
    sys.meta_path.insert(0, finder)
    try:
        with patch.object(wrapt, "register_post_import_hook", _not_entered):
            return import_module(name)
    except Exception as error:
        sys.meta_path.remove(finder)
        for each in [each for each in sys.modules if each.split(".")[0] == name]:
            del sys.modules[each]
        raise ArgumentError(
            f"{root} cannot be imported beside this build ({type(error).__name__}: {error})",
            need="a build that runs with the libraries of this process",
            hint="a newer commit as the base",
        ) from error


def _not_entered(*_: object) -> None:
    """Registries of other libraries have one place for each name, which this build has taken."""


def package_in(folder: Path) -> Path:
    """The package in a checkout, its `src`, or the folder of an installation.

    Raises:
        ArgumentError: There is none.
    """
    for root in (folder / "src" / _OWN, folder / _OWN, folder):
        if (root / "__init__.py").is_file() and (root / "ops").is_dir():
            return root.resolve()
    raise ArgumentError(
        f"{folder}: no {_OWN} in it",
        need="a checkout, or a folder that pip installed it in",
        hint="git worktree add ../base main",
    )


class _Finder(MetaPathFinder):
    """Finds modules of one package, by a name that is not the folder's."""

    def __init__(self, name: str, root: Path) -> None:
        self._name, self._root = name, root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        first, *rest = fullname.split(".")
        if first != self._name:
            return None
        place = self._root.joinpath(*rest)
        package = place / "__init__.py"
        if package.is_file():
            loader = _Loader(fullname, str(package))
            return spec_from_file_location(
                fullname, package, loader=loader, submodule_search_locations=[str(place)]
            )
        module = place.with_name(place.name + ".py")
        if not module.is_file():
            return None
        return spec_from_file_location(fullname, module, loader=_Loader(fullname, str(module)))


class _Loader(SourceFileLoader):
    """Compiles a module with its package's name replaced; nothing is kept on disk."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        text = self.get_data(path).decode()
        new = fullname.split(".")[0]
        for spelling in _SPELLINGS:
            text = text.replace(spelling.format(_OWN), spelling.format(new))
        found: Any = compile(text, path, "exec", dont_inherit=True)
        return found  # type: ignore[no-any-return]

"""A process that verifies an operator whose kernels forget to wait: run as a program.

Its arguments are the name of a mutation, or "none", the seed of the delays, and a folder to compile
in. Exit code 1: noticed. 0: all numbers were right.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from hopsparse.compiler import KernelCache
from hopsparse.compiler import cache as kernel_cache
from hopsparse.errors import HopsparseError
from hopsparse.ops.checks import all_checks
from hopsparse.verify import Check, outcome_of
from tests.helpers.mutations import CAUGHT, Mutation, copy_of_kernels

CONTROL = "none"


def checks_for(mutation: Mutation) -> list[Check]:
    """Those that have to notice."""
    return [
        check
        for check in all_checks()
        if check.op == mutation.op
        and mutation.case in check.case
        and check.dtype.startswith(mutation.dtype)
    ]


def main(name: str, seed: int, folder: Path) -> int:
    root = copy_of_kernels(folder / "package")
    mutations = [each for each in CAUGHT if name in (each.name, CONTROL)]
    if name != CONTROL:
        mutations[0].apply(root)
    made = KernelCache(folder / "kernels", root=root, delays=seed)
    kernel_cache._shared = lambda _folder, _delays: made  # type: ignore[assignment]
    # Of the control one check a mutation: all of them, right, under the same delays.
    checks = [
        check for each in mutations for check in checks_for(each)[: 1 if name == CONTROL else 4]
    ]
    for check in dict.fromkeys(checks):
        try:
            found = outcome_of(check, torch.device("cuda"))
        except HopsparseError as error:
            print(check.name, type(error).__name__, error)
            return 1
        print(check.name, found.detail, found.kernels)
        if not found.ok:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])))

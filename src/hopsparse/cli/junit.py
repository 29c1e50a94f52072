"""Checks as JUnit XML, which build servers show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree import ElementTree

if TYPE_CHECKING:
    from .verify_operators import Row

# XML 1.0 has no place for the others.
_UNSAYABLE = re.compile(r"[^\t\n\r\x20-\uD7FF\uE000-\uFFFD\U00010000-\U0010FFFF]")


def write_junit(path: Path, rows: Sequence[Row]) -> None:
    """Write a suite for each operator, and a test for each of its checks.

    Args:
        path: A file, which is replaced.
        rows: What was checked.
    """
    root = ElementTree.Element("testsuites", name="hopsparse verify")
    for op in dict.fromkeys(row.op for row in rows):
        own = [row for row in rows if row.op == op]
        suite = ElementTree.SubElement(
            root,
            "testsuite",
            name=op,
            tests=str(len(own)),
            failures=str(sum(not row.ok for row in own)),
            time=f"{sum(row.seconds for row in own):.3f}",
        )
        for row in own:
            _add(suite, row)
    ElementTree.indent(root)
    ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _add(suite: ElementTree.Element, row: Row) -> None:
    name = " ".join(filter(None, (row.case, row.format, row.dtype)))
    test = ElementTree.SubElement(
        suite, "testcase", classname=f"hopsparse.{row.op}", name=name, time=f"{row.seconds:.4f}"
    )
    if row.kernels:
        told = ElementTree.SubElement(test, "system-out")
        told.text = "\n".join(row.kernels)
    if not row.ok:
        detail = _UNSAYABLE.sub("?", row.detail)
        ElementTree.SubElement(test, "failure", message=detail).text = detail

"""What of Nsight Compute is installed: the program, its Python module, its catalogue."""

from __future__ import annotations

import shutil
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_LIBRARY = "libnvperf_host.so"


def find_ncu() -> Path | None:
    """Where ncu is, or None.

    Example:
        >>> found = find_ncu()
        >>> found is None or found.is_file()
        True
    """
    found = shutil.which("ncu")
    if found is not None:
        return Path(found)
    usual = sorted(Path("/usr/local").glob("cuda*/bin/ncu"))
    usual += sorted(Path("/opt/nvidia/nsight-compute").glob("*/ncu"))
    return usual[-1] if usual else None


def report_module() -> ModuleType | None:
    """`ncu_report`, as a package or out of Nsight Compute's own folder; None where it is not."""
    try:
        return import_module("ncu_report")
    except ImportError:
        pass
    beside = next((each for root in _roots() for each in root.glob("extras/python")), None)
    if beside is None:
        return None
    sys.path.append(str(beside))
    try:
        return import_module("ncu_report")
    except ImportError:
        return None
    finally:
        sys.path.remove(str(beside))


def library_path() -> Path | None:
    """Where the catalogue is: beside `ncu_report`, or in Nsight Compute's folder; or None.

    Example:
        >>> path = library_path()
        >>> path is None or path.name == "libnvperf_host.so"
        True
    """
    found = find_spec("ncu_report")
    if found is not None and found.origin is not None:
        beside = Path(found.origin).with_name(_LIBRARY)
        if beside.is_file():
            return beside
    hosts = (path for root in _roots() for path in sorted(root.glob(f"target/*/{_LIBRARY}")))
    return next(hosts, None)


def _roots() -> list[Path]:
    """Folders of Nsight Compute: that of ncu, or of the program that a script `ncu` starts."""
    ncu = find_ncu()
    if ncu is None:
        return []
    own = ncu.resolve().parent
    toolkit = sorted(own.parent.glob("nsight-compute-*"))
    return [own, *toolkit, *sorted(Path("/opt/nvidia/nsight-compute").glob("*"))]

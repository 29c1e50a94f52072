from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hopsparse.compiler import Nvrtc, default_nvrtc
from tests.helpers.tiny_kernels import copy_package, write_kernels

# Where `make .venv/ready` installs it: apart, because a process finds one NVRTC by itself.
NEWER = Path(sys.prefix, "nvrtc-newer", "nvidia", "cu13", "lib", "libnvrtc.so.13")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder that tiny kernels are relative to."""
    return write_kernels(tmp_path / "root")


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, for child processes."""
    return copy_package(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="session")
def newer_nvrtc() -> Nvrtc:
    assert NEWER.exists(), "`make .venv/ready` installs a second NVRTC"
    return Nvrtc(NEWER)


@pytest.fixture(scope="session", params=["usual", "newer"])
def nvrtc(request: pytest.FixtureRequest) -> Nvrtc:
    """Each compiler in turn."""
    if request.param == "usual":
        return default_nvrtc()
    newer: Nvrtc = request.getfixturevalue("newer_nvrtc")
    return newer

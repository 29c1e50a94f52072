"""Fixtures and hooks of all tiers; helpers that tests import live in tests/helpers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

TIERS = ("unit", "compile", "gpu", "dist", "model", "cli")
_TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test belongs to the tier of its folder; the examples in docstrings are unit tests."""
    for item in items:
        in_tests = item.path.is_relative_to(_TESTS)
        tier = item.path.relative_to(_TESTS).parts[0] if in_tests else "unit"
        if tier in TIERS:
            item.add_marker(tier)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

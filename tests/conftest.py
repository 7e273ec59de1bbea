"""Settings for all tests."""

import os

import pytest
from hypothesis import settings

settings.register_profile("here", deadline=None)  # the first example may compile
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With NUMBA_DISABLE_JIT=1 keep only the tests that are small enough for interpreted kernels."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") in ("", "0"):
        return
    dropped = [item for item in items if item.get_closest_marker("nojit") is None]
    items[:] = [item for item in items if item.get_closest_marker("nojit") is not None]
    config.hook.pytest_deselected(items=dropped)

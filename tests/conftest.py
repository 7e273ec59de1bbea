"""Settings for all tests."""

import os
import sys
from collections.abc import Callable

import pytest
from hypothesis import settings

settings.register_profile("here", deadline=None)  # the first example may compile
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")

SIMULATOR = os.environ.get("NUMBA_ENABLE_CUDASIM", "0") not in ("", "0")
if (
    SIMULATOR
):  # it polls its threads without a pause: each poll lasts as long as Python lets a thread run, 5 ms by default
    sys.setswitchinterval(1e-4)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With NUMBA_DISABLE_JIT=1 keep only the tests that are small enough for interpreted kernels; tests for the CUDA
    simulator run with NUMBA_ENABLE_CUDASIM=1, and then alone."""

    def keep(wanted: Callable[[pytest.Item], bool]) -> None:
        dropped = [item for item in items if not wanted(item)]
        items[:] = [item for item in items if wanted(item)]
        config.hook.pytest_deselected(items=dropped)

    keep(lambda item: (item.get_closest_marker("cudasim") is not None) == SIMULATOR)
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        keep(lambda item: item.get_closest_marker("nojit") is not None)

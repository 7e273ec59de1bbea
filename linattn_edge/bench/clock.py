"""The clocks, and what is known of them: how finely they tick, and what looking at them costs."""

import time
from typing import Any

import numpy as np

WALL, CPU = "wall clock", "thread CPU time"
CLOCKS = {WALL: time.perf_counter_ns, CPU: time.thread_time_ns}  # reading the second costs more: for long calls


def describe(clock: str, looks: int = 20_000) -> dict[str, Any]:
    """How a clock behaves here: both figures are measured, in ns.

    resolution_ns: the smallest step seen between two looks. overhead_ns: what two looks at it add to a measured time
    (the median).
    """
    now = CLOCKS[clock]
    for _ in range(100):
        now()
    seen = np.empty(looks, np.int64)
    for i in range(looks):
        start = now()
        seen[i] = now() - start
    steps = np.abs(np.diff(seen))
    found = np.concatenate([seen[seen > 0], steps[steps > 0]])
    info = time.get_clock_info("perf_counter" if clock == WALL else "thread_time")
    return {
        "function": f"time.{now.__name__}",
        "monotonic": info.monotonic,
        "resolution_ns": int(found.min()) if found.size else 0,
        "overhead_ns": float(np.median(seen)),
    }

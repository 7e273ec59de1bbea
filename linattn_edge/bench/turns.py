"""How times are taken: contestants take turns in one process, so that whatever disturbs one disturbs all.

On a machine that others use too, a mean says little: the least of many turns is what the code costs, the percentiles
say how typical that is.
"""

import gc
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from linattn_edge.bench.clock import CLOCKS, WALL
from linattn_edge.bench.statistics import summary

Array = NDArray[Any]
Run = Callable[[int], Array]  # a contestant: n calls, and the time of each in µs

MOST_CALLS = 200  # in one turn


class Missing(Exception):
    """Something that a measurement needs is not here; the message says what."""


def timed(
    call: Callable[[], object],
    clock: str = WALL,
    units: float = 1,
    batch: int = 1,
    before: Callable[[], object] | None = None,
) -> Run:
    """A contestant that calls from Python. A sample is `batch` calls, each worth `units` (tokens, layers).

    before: called ahead of each sample, outside the time.
    """
    now = CLOCKS[clock]
    scale = 1e-3 / (units * batch)

    def run(n: int) -> Array:
        times = np.empty(n)
        inner = range(batch)
        for i in range(n):
            if before is not None:
                before()
            start = now()
            for _ in inner:
                call()
            times[i] = now() - start
        return times * scale

    return run


def take_turns(
    contestants: Mapping[str, Run], rounds: int, turn: float = 5e-3, budget: float = 6.0
) -> dict[str, Array]:
    """All contestants in turn, `rounds` times, about `turn` seconds each; slow ones get fewer rounds.

    Returns {name: samples, in the order in which they were taken}. `budget` bounds the seconds of one contestant (but
    three rounds are always made). Python's garbage collector is off meanwhile.
    """
    calls = {}
    slowest = 0.0
    for name, run in contestants.items():
        run(1)  # compiles, touches memory
        start = time.perf_counter()
        run(1)
        seconds = time.perf_counter() - start
        calls[name] = int(min(MOST_CALLS, max(1, turn / max(seconds, 1e-9))))
        slowest = max(slowest, seconds)
    rounds = max(3, min(rounds, int(budget / max(slowest, turn))))
    samples: dict[str, list[Array]] = {name: [] for name in contestants}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for _ in range(rounds):
            for name, run in contestants.items():
                samples[name].append(run(calls[name]))
    finally:
        if collecting:
            gc.enable()
    return {name: np.concatenate(taken) for name, taken in samples.items()}


def alternate(
    contestants: Mapping[str, Run], rounds: int, turn: float = 5e-3, budget: float = 6.0
) -> dict[str, dict[str, float]]:
    """`take_turns`, and {name: summary} of what came out."""
    taken = take_turns(contestants, rounds, turn, budget)
    return {name: summary(samples) for name, samples in taken.items()}

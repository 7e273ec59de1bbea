"""What a new process costs: imports, and the first step with an empty and a filled kernel cache."""

import os
import subprocess
import sys
import tempfile
from functools import partial

from linattn_edge.bench.record import Group, Row
from linattn_edge.bench.statistics import summary
from linattn_edge.bench.suites.base import Job, Settings
from linattn_edge.bench.turns import Missing
from linattn_edge.bench.views import Table, count, figure, word

FIRST_CALL = """
from time import perf_counter
a = perf_counter()
import linattn_edge as la
b = perf_counter()
import numba
c = perf_counter()
import numpy as np
attn = la.LinearAttention(8, 64)
x = np.ones((1, 8, 64), np.float32)
attn.step(x, x, x, attn.init_state())
print(b - a, c - b, perf_counter() - c)
"""

IMPORT, NUMBA = "import linattn_edge", "import numba"
COLD, WARM = "the first step, kernels to be compiled", "the first step, kernels in the cache"


def first_call(folder: str) -> tuple[float, float, float]:
    """Seconds that a new process takes to import this, to import Numba, and from there to the end of its first step.

    folder: of the kernel cache; "" for the usual one. Raises Missing where the process fails.
    """
    environment = os.environ | ({"NUMBA_CACHE_DIR": folder} if folder else {})
    command = [sys.executable, "-c", FIRST_CALL]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise Missing(f"a new process fails: {reason[0]}")
    importing, numba, rest = map(float, done.stdout.split())
    return importing, numba, rest


def plan(settings: Settings) -> list[Job]:
    """One job."""
    return [Job("new processes", partial(new_processes, settings))]


def new_processes(settings: Settings) -> Group:
    """Several of them; the cold start, which takes longest, only once, and not in a quick run."""
    group = Group("startup", "new processes", {"H": 8, "d": 64})
    taken: dict[str, list[float]] = {IMPORT: [], NUMBA: [], COLD: [], WARM: []}
    try:
        if settings.quick:
            first_call("")  # it may have to compile
        with tempfile.TemporaryDirectory() as folder:
            for i in range(3 if settings.quick else 6):
                importing, numba, rest = first_call("" if settings.quick else folder)
                taken[IMPORT].append(importing)
                taken[NUMBA].append(numba)
                taken[COLD if i == 0 and not settings.quick else WARM].append(rest)
    except Missing as reason:
        group.notes.append(str(reason))
    if settings.quick:
        group.notes.append("Compiling is left out of a quick run.")
    for name, seconds in taken.items():
        if seconds:
            group.rows.append(Row(name, {}, summary(seconds), unit="s"))
    return group


def tables(groups: list[Group]) -> list[Table]:
    """A row for each stage."""
    rows = []
    for group in groups:
        for row in group.rows:
            assert row.time is not None
            rows.append([word(row.name), figure(row.time["min"]), figure(row.time["p50"]), count(row.time["samples"])])
    notes = " ".join(note for group in groups for note in group.notes)
    text = (
        "Seconds that a new process takes for its stages, which add up: the imports, then one of the two first steps, "
        f"of a layer of 8 heads of width 64. Python's own start comes before. {notes}"
    )
    return [Table("The start of a process", text.strip(), ["", "least", "median", "processes"], rows)]

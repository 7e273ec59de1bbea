"""How times are taken: contestants take turns in one process, and minima and tenth percentiles are compared.

On a machine that others use too, a mean says little: the least of many turns is what the code costs, the tenth
percentile says whether that least is typical.
"""

import ctypes
import gc
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Run = Callable[[int], Array]  # a contestant: n calls, and the time of each in µs

WALL, CPU = "wall clock", "thread CPU time"
CLOCKS = {WALL: time.perf_counter_ns, CPU: time.thread_time_ns}  # reading the second costs more: for long calls


def summary(samples: Iterable[float]) -> dict[str, float]:
    """What is kept of one contestant's samples."""
    values = np.asarray(list(samples), np.float64)
    return {"min": float(values.min()), "p10": float(np.percentile(values, 10)), "samples": values.size}


def ratio(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    """a over b, of minima and of tenth percentiles."""
    return {name: a[name] / b[name] for name in ("min", "p10")}


def timed(call: Callable[[], object], clock: str = WALL, units: int = 1, batch: int = 1) -> Run:
    """A contestant that calls from Python. A sample is `batch` calls, each worth `units` (tokens, layers)."""
    now = CLOCKS[clock]
    scale = 1e-3 / (units * batch)

    def run(n: int) -> Array:
        times = np.empty(n)
        inner = range(batch)
        for i in range(n):
            start = now()
            for _ in inner:
                call()
            times[i] = now() - start
        return times * scale

    return run


def alternate(contestants: Mapping[str, Run], rounds: int, turn: float = 5e-3, budget: float = 6.0) -> dict[str, Any]:
    """All contestants in turn, `rounds` times, about `turn` seconds each; slow ones get fewer rounds.

    Returns {name: summary}. `budget` bounds the seconds of one contestant (but three rounds are always made).
    """
    calls = {}
    slowest = 0.0
    for name, run in contestants.items():
        run(1)  # compiles, touches memory
        start = time.perf_counter()
        run(1)
        seconds = time.perf_counter() - start
        calls[name] = int(min(200, max(1, turn / seconds)))
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
    return {name: summary(np.concatenate(taken)) for name, taken in samples.items()}


class Missing(Exception):
    """Something that a measurement needs is not here; the message says what."""


class Yardstick:
    """yardstick.c as a shared library. Raises Missing where it can't be built or run."""

    KERNELS = ("touch", "gated", "gated_delta")
    DECAY, BETA = 0.97, 0.5

    def __init__(self) -> None:
        compiler = shutil.which("gcc") or shutil.which("cc")
        if compiler is None:
            raise Missing("no C compiler (gcc or cc)")
        import llvmlite.binding as llvm

        features = llvm.get_host_cpu_features()
        if not (features.get("avx2") and features.get("fma")):
            raise Missing("the CPU has no AVX2 and FMA")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "yardstick.so"
            source = Path(__file__).with_name("yardstick.c")
            options = ["-O3", "-march=native", "-shared", "-fPIC"]
            built = subprocess.run(
                [compiler, *options, str(source), "-o", str(library)], capture_output=True, text=True, check=False
            )
            if built.returncode:
                raise Missing(f"yardstick.c does not compile: {built.stderr.strip().splitlines()[-1]}")
            self._function = ctypes.CDLL(str(library)).yardstick
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
        self.compiler = f"{version.partition(chr(10))[0]}, {' '.join(options[:2])}"

    def run(
        self, kernel: str, states: list[Array], q: Array, k: Array, v: Array, factors: Array, clock: str, n: int
    ) -> tuple[Array, Array]:
        """n runs over states [H, d, d] with q, k, v [T, d]: their µs, and the last output [T, d]."""
        (T, d), H = q.shape, states[0].shape[0]
        times, o = np.empty(n), np.empty((T, d), np.float32)
        pointer = ctypes.c_void_p
        code = self._function(
            ctypes.c_int(self.KERNELS.index(kernel)),
            (pointer * len(states))(*(S.ctypes.data for S in states)),
            *(ctypes.c_int(size) for size in (len(states), H, d, T)),
            *(pointer(a.ctypes.data) for a in (q, k, v, factors)),
            ctypes.c_float(self.BETA),
            pointer(o.ctypes.data),
            *(ctypes.c_int(size) for size in (clock == CPU, n)),
            pointer(times.ctypes.data),
        )
        if code:
            raise Missing(f"the yardstick takes d = 32, 64 … 256 and at most 64 tokens, not d = {d}, T = {T}")
        return times, o

    def contestant(self, kernel: str, H: int, d: int, layers: int = 1, T: int = 1, clock: str = WALL) -> Run:
        """Times per token and layer, over `layers` states of its own, in rotation."""
        states = []
        for _ in range(layers):
            states.append(aligned((H, d, d)))
            states[-1][...] = 0.01
        q, k, v = (np.ascontiguousarray(a) for a in tokens(T, d))
        factors = np.full(d, self.DECAY, np.float32)
        return lambda n: self.run(kernel, states, q, k, v, factors, clock, n)[0] / (layers * T)


def tokens(T: int, d: int) -> Array:
    """q, k, v [3, T, d], small enough for any rule to stay bounded."""
    draw = np.random.default_rng(1).uniform(-0.5, 0.5, (3, T, d)).astype(np.float32)
    draw[1] *= 0.3
    return draw


def aligned(shape: tuple[int, ...], alignment: int = 64) -> Array:
    """Zeros, float32, at the alignment that a state has."""
    size = int(np.prod(shape)) * 4
    raw = np.zeros(size + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(np.float32).reshape(shape)


def load() -> list[float]:
    """Load averages of 1, 5 and 15 minutes, where the system tells them."""
    return [round(x, 2) for x in os.getloadavg()] if hasattr(os, "getloadavg") else []


def machine() -> dict[str, Any]:
    """What a reader of the figures must know."""
    from linattn_edge.cli import collect_info

    info = collect_info()
    versions = {"linattn_edge": info["version"], "python": platform.python_version()}
    versions |= {
        name: found
        for name, found in {**info["packages"], **info["optional_packages"]}.items()
        if found and name in ("numpy", "numba", "llvmlite", "onnxruntime", "torch")
    }
    cpu = info["cpu"]
    return {
        "cpu": cpu["name"],
        "llvm_cpu": cpu["llvm_name"],
        "cores": cpu["usable_cores"],
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
        "date": time.strftime("%Y-%m-%d"),
        "time": time.strftime("%H:%M:%S%z"),
        "load": load(),
    }


def progress(text: str) -> None:
    """A passing line on a terminal, nothing in a pipe."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

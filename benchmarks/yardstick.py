"""yardstick.c: bare AVX2 code for the same arithmetic, compiled here and timed inside C."""

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from linattn_edge.bench.clock import CPU, WALL
from linattn_edge.bench.inputs import aligned
from linattn_edge.bench.turns import Array, Missing, Run


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

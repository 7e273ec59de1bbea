"""The update rules: one entry each, with the equation in NumPy and the loop that the kernels compile.

With Λ_t = exp(g_t), applied before the write, and the read after it: y_t = scale · S_tᵀ φ(q_t).

| name          | recurrence                            |
|---------------|---------------------------------------|
| `linear`      | S ← S + φ(k)vᵀ                        |
| `gated`       | S ← ΛS + φ(k)vᵀ                       |
| `delta`       | S ← S + β φ(k)(v − Sᵀφ(k))ᵀ           |
| `gated_delta` | S ← ΛS + β φ(k)(v − (ΛS)ᵀφ(k))ᵀ       |

The names are those of the ONNX `LinearAttention` operator. To add a rule, add an entry to `RULES`: its NumPy `write`
is the reference backend, its `loop` the compiled ones, and both are found from here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


def write_sum(S: F64, k: F64, v: F64, decay: F64, beta: F64) -> F64:
    """ΛS + kvᵀ. S [..., F, V], k and decay = exp(g) [..., F], v [..., V]; beta is not used."""
    return decay[..., None] * S + k[..., None] * v[..., None, :]


def write_delta(S: F64, k: F64, v: F64, decay: F64, beta: F64) -> F64:
    """ΛS + βk(v − (ΛS)ᵀk)ᵀ. Shapes as in `write_sum`, beta [...]."""
    S = decay[..., None] * S
    missing = v - np.einsum("...fv,...f->...v", S, k)
    return S + (beta[..., None] * k)[..., None] * missing[..., None, :]


# The loops below take lane operations (kernels/lanes.py) and give a function for one token and one block of columns:
# S[at + i*stride ...] is row i of the block; k, q, decay, decayed_k = Λk and decayed_q = Λq are arrays [F], v and y are
# arrays in which the block begins at `column`; qk = q·k. Columns of S are independent under every rule here, so blocks
# can be taken in any order. On a GPU several threads share a column, each with some of the F rows: each stores its part
# of y, qk is its part of q·k, and a sum that is needed in between goes through `join`.


def sum_loop(op: Any) -> Callable[..., None]:
    """One sweep: each row is decayed, written and read while it is in registers."""
    load, store, fma, mul, zero = op.load, op.store, op.fma, op.mul, op.zero

    def loop(S, at, stride, F, k, q, decay, decayed_k, decayed_q, v, y, column, beta, qk):  # type: ignore[no-untyped-def]
        value = load(v, column)
        total = zero(value)
        for i in range(F):
            row = fma(decay[i], load(S, at), mul(k[i], value))
            store(S, at, row)
            total = fma(q[i], row, total)
            at += stride
        store(y, column, total)

    return loop


def sum_writes(op: Any) -> tuple[Callable[..., None], Callable[..., None]]:
    """Tokens 0 to count of one block, with nobody to read between them: rows stay in registers, four at a time. The
    first function is for decays, the second for none.

    k and decay are those of the first token, further ones `ld` and `ldd` on; v is vt on.
    """
    load, store, fma, mul = op.load, op.store, op.fma, op.mul

    def plain(S, at, stride, F, k, ld, v, vt, column, count):  # type: ignore[no-untyped-def]
        i = 0
        while i + 4 <= F:
            at1, at2, at3 = at + stride, at + 2 * stride, at + 3 * stride
            row0, row1, row2, row3 = load(S, at), load(S, at1), load(S, at2), load(S, at3)
            for t in range(count):
                value, a = load(v, t * vt + column), t * ld + i
                row0 = fma(k[a], value, row0)
                row1 = fma(k[a + 1], value, row1)
                row2 = fma(k[a + 2], value, row2)
                row3 = fma(k[a + 3], value, row3)
            store(S, at, row0)
            store(S, at1, row1)
            store(S, at2, row2)
            store(S, at3, row3)
            at += 4 * stride
            i += 4
        while i < F:
            row0 = load(S, at)
            for t in range(count):
                row0 = fma(k[t * ld + i], load(v, t * vt + column), row0)
            store(S, at, row0)
            at += stride
            i += 1

    def loop(S, at, stride, F, k, ld, decay, ldd, v, vt, column, count):  # type: ignore[no-untyped-def]
        i = 0
        while i + 4 <= F:
            at1, at2, at3 = at + stride, at + 2 * stride, at + 3 * stride
            row0, row1, row2, row3 = load(S, at), load(S, at1), load(S, at2), load(S, at3)
            for t in range(count):
                value = load(v, t * vt + column)
                a, b = t * ld + i, t * ldd + i
                row0 = fma(decay[b], row0, mul(k[a], value))
                row1 = fma(decay[b + 1], row1, mul(k[a + 1], value))
                row2 = fma(decay[b + 2], row2, mul(k[a + 2], value))
                row3 = fma(decay[b + 3], row3, mul(k[a + 3], value))
            store(S, at, row0)
            store(S, at1, row1)
            store(S, at2, row2)
            store(S, at3, row3)
            at += 4 * stride
            i += 4
        while i < F:
            row0 = load(S, at)
            for t in range(count):
                row0 = fma(decay[t * ldd + i], row0, mul(k[t * ld + i], load(v, t * vt + column)))
            store(S, at, row0)
            at += stride
            i += 1

    return loop, plain


def long_sum(op: Any) -> tuple[Callable[..., None], Callable[..., None], Callable[..., None]]:
    """A sum that keeps float32's precision over a billion tokens: S gathers a few of them, and is then added to a total
    R with what rounding lost put back into S (Knuth's two-sum). For one block of columns:

    write(S, at, stride, R, r_at, r_stride, F, k, q, v, y, column): as `sum_loop`, without decay;
    read(S, at, stride, R, r_at, r_stride, F, q, y, column): y = qᵀ(R + S);
    fold(S, at, stride, R, r_at, r_stride, F): R + S, exactly, as R and the rest.
    """
    load, store, fma, sub, add, zero = op.load, op.store, op.fma, op.sub, op.add, op.zero

    def write(S, at, stride, R, r_at, r_stride, F, k, q, v, y, column):  # type: ignore[no-untyped-def]
        value = load(v, column)
        total = zero(value)
        for i in range(F):
            row = fma(k[i], value, load(S, at))
            store(S, at, row)
            total = fma(q[i], add(load(R, r_at), row), total)
            at += stride
            r_at += r_stride
        store(y, column, total)

    def read(S, at, stride, R, r_at, r_stride, F, q, y, column):  # type: ignore[no-untyped-def]
        total = zero(load(S, at))
        for i in range(F):
            total = fma(q[i], add(load(R, r_at), load(S, at)), total)
            at += stride
            r_at += r_stride
        store(y, column, total)

    def fold(S, at, stride, R, r_at, r_stride, F):  # type: ignore[no-untyped-def]
        for _ in range(F):
            a, b = load(R, r_at), load(S, at)
            whole = add(a, b)
            moved = sub(whole, a)
            store(R, r_at, whole)
            store(S, at, add(sub(a, sub(whole, moved)), sub(b, moved)))
            at += stride
            r_at += r_stride

    return write, read, fold


def delta_loop(op: Any) -> Callable[..., None]:
    """Two sweeps: read Sᵀ(Λk) and Sᵀ(Λq) together, then write; y = Sᵀ(Λq) + (q·k)u with u = β(v − Sᵀ(Λk))."""
    load, store, fma, mul, sub, zero, join = op.load, op.store, op.fma, op.mul, op.sub, op.zero, op.join

    def loop(S, at, stride, F, k, q, decay, decayed_k, decayed_q, v, y, column, beta, qk):  # type: ignore[no-untyped-def]
        value = load(v, column)
        known = zero(value)
        total = zero(value)
        row_at = at
        for i in range(F):
            row = load(S, row_at)
            known = fma(decayed_k[i], row, known)
            total = fma(decayed_q[i], row, total)
            row_at += stride
        change = mul(beta, sub(value, join(known, y, column)))
        store(y, column, fma(qk, change, total))
        row_at = at
        for i in range(F):
            store(S, row_at, fma(decay[i], load(S, row_at), mul(k[i], change)))
            row_at += stride

    return loop


@dataclass(frozen=True)
class Rule:
    """An update rule. `decay`: takes g; `beta`: takes beta; `normaliser`: may carry z, obeying S's decay."""

    name: str
    decay: bool
    beta: bool
    normaliser: bool
    write: Callable[[F64, F64, F64, F64, F64], F64]
    loop: Callable[[Any], Callable[..., None]]
    source: str


_TABLE = (
    Rule("linear", False, False, True, write_sum, sum_loop, "Katharopoulos et al. 2020, eq. 18-20"),
    Rule(
        "gated",
        True,
        False,
        True,
        write_sum,
        sum_loop,
        "Yang et al. 2023 (GLA), eq. 3; Sun et al. 2023 (RetNet), eq. 6",
    ),
    Rule(
        "delta",
        False,
        True,
        False,
        write_delta,
        delta_loop,
        "Schlag et al. 2021, eq. 23-24; Yang et al. 2024 (DeltaNet)",
    ),
    Rule("gated_delta", True, True, False, write_delta, delta_loop, "Yang et al. 2024 (Gated DeltaNet), eq. 10"),
)
RULES: dict[str, Rule] = {rule.name: rule for rule in _TABLE}
LOOPS = tuple(dict.fromkeys(rule.loop for rule in _TABLE))  # the kernels choose by place

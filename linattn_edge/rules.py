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

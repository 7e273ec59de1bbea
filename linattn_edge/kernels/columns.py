"""The sweep over S: blocks of columns of a group of state heads, taken through a piece of tokens.

Columns of S are independent under every rule, so a block of `width` columns takes all tokens of the piece at once, with
its accumulators in registers; from `DENSE` tokens on it is copied into a dense buffer first, so that it stays in L1.
One function for each state dtype and width, reached by its address: a layer compiles only the widths that it has.
"""

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np
from numba import types

from linattn_edge.kernels import layout, sweep
from linattn_edge.kernels.jit import core, device, switch
from linattn_edge.kernels.lanes import Operations, at_address, operations, pointer
from linattn_edge.kernels.layout import FOLD, READ, WIDE, WIDEST, WRITE
from linattn_edge.rules import LOOPS, long_sum, sum_loop, sum_writes

DENSE = 4  # tokens from which copying a block of columns into a dense buffer pays


def types_of(dtype: str) -> tuple[Any, Any]:
    """What a state of that dtype is computed in, and stored as."""
    if dtype in layout.HALVES:
        return np.float32, np.uint16 if dtype == "float16" else np.int16
    return np.dtype(dtype).type, np.dtype(dtype).type


@device
def place(n, i, share):
    """Where state head n + i finds its key (or query) head, counted from that of n, when `share` states use one."""
    return i if share == 1 else (n + i) // share - n // share


def weighted_rows(op: Operations) -> Callable[..., None]:
    """y = Σ_i q[i] · row i of S, for one block of columns: how a state is read, and a cache of values too."""
    load, store, fma, zero = op.load, op.store, op.fma, op.zero

    @device
    def read(S, at, stride, F, q, y, column):
        total = zero(load(S, at))
        for i in range(F):
            total = fma(q[i], load(S, at), total)
            at += stride
        store(y, column, total)

    return read


def _build(dtype: str, width: int) -> Callable[..., int]:
    item, kept = types_of(dtype)
    exact = dtype not in layout.HALVES  # others are rounded at every token
    op = operations(width)
    load, store, mul, read = op.load, op.store, op.mul, weighted_rows(op)
    update = switch(
        [loop(op) for loop in LOOPS], "S, at, stride, F, k, q, decay, decayed_k, decayed_q, v, y, column, beta, qk"
    )

    writes, plain_writes = (device(loop) for loop in sum_writes(op))
    is_sum = LOOPS.index(sum_loop)

    def columns(fields, first):
        """Columns `first` to VP, as many whole blocks as there are. fields: the address of a sweep (sweep.py)."""
        w = at_address(fields, sweep.SIZE, np.int64)
        rule, mode, VP, F, r = w[sweep.RULE], w[sweep.MODE], w[sweep.VP], w[sweep.F], w[sweep.R]
        group, n, count = w[sweep.GROUP], w[sweep.FIRST_HEAD], w[sweep.COUNT]
        keys, shared = w[sweep.SHARED_KEYS], w[sweep.SHARED]
        ld, ldq, ldd, dh = w[sweep.LD], w[sweep.LDQ], w[sweep.LDD], w[sweep.DH]
        vt, vh, yt, yh, yj = w[sweep.VT], w[sweep.VH], w[sweep.YT], w[sweep.YH], w[sweep.YJ]
        state, dense = at_address(w[sweep.S], group * F * VP, kept), at_address(w[sweep.BUFFER], F * width, kept)
        ks, qs = at_address(w[sweep.K], count * ld, item), at_address(w[sweep.Q], count * ldq, item)
        decays = at_address(w[sweep.DECAY], count * ld, item)
        dks, dqs = at_address(w[sweep.DK], count * ld, item), at_address(w[sweep.DQ], count * ld, item)
        vs = at_address(w[sweep.V], (count - 1) * vt + group * vh, item)
        ys = at_address(w[sweep.Y], (count - 1) * yt + group * yh, item)
        betas, qks = at_address(w[sweep.BETA], count * group, item), at_address(w[sweep.QK], count * group, item)
        normalize, factors = w[sweep.NORMALIZE], at_address(w[sweep.FACTORS], count * group * r, item)
        for head in range(group):
            Sn = pointer(state, head * F * VP)
            kn, qn = pointer(ks, place(n, head, keys) * F), pointer(qs, place(n, head, shared) * r * F)
            decay_n, dkn, dqn = pointer(decays, head * dh), pointer(dks, head * F), pointer(dqs, head * F)
            vn, yn = pointer(vs, head * vh), pointer(ys, head * yh)
            if mode == WRITE and rule == is_sum and count >= DENSE and exact:
                for c in range(first, VP - width + 1, width):
                    if dh == 0:
                        plain_writes(Sn, c, VP, F, kn, ld, vn, vt, c, count)
                    else:
                        writes(Sn, c, VP, F, kn, ld, decay_n, ldd, vn, vt, c, count)
                continue
            for c in range(first, VP - width + 1, width):
                home, at, stride = Sn, c, VP
                if count >= DENSE:
                    for i in range(F):
                        store(dense, i * width, load(Sn, c + i * VP))
                    home, at, stride = pointer(dense, 0), 0, width
                for t in range(count):
                    j = 0
                    if mode != READ:
                        a, b = t * ld, t * group + head
                        update(
                            rule, home, at, stride, F, pointer(kn, a), pointer(qn, t * ldq), pointer(decay_n, t * ldd),
                            pointer(dkn, a), pointer(dqn, a), pointer(vn, t * vt), pointer(yn, t * yt), c, betas[b],
                            qks[b],
                        )  # fmt: skip
                        j = 1
                    if mode != WRITE:
                        while j < r:
                            read(home, at, stride, F, pointer(qn, t * ldq + j * F), pointer(yn, t * yt + j * yj), c)
                            j += 1
                        if normalize != 0:
                            for j in range(r):
                                a, b = t * yt + j * yj + c, (t * group + head) * r + j
                                store(yn, a, mul(factors[b], load(yn, a)))
                if count >= DENSE and mode != READ:
                    for i in range(F):
                        store(Sn, c + i * VP, load(dense, i * width))
        return 0

    return columns


def _build_long(width: int) -> Callable[..., int]:
    op = operations(width)
    load, store, mul = op.load, op.store, op.mul
    write, read, fold = (device(loop) for loop in long_sum(op))
    item = np.float32

    def long_columns(fields, first):
        """`columns` of a compensated state: no decay, no beta."""
        w = at_address(fields, sweep.SIZE, np.int64)
        mode, VP, F, r, now = w[sweep.MODE], w[sweep.VP], w[sweep.F], w[sweep.R], w[sweep.NOW]
        group, n, count = w[sweep.GROUP], w[sweep.FIRST_HEAD], w[sweep.COUNT]
        keys, shared = w[sweep.SHARED_KEYS], w[sweep.SHARED]
        ld, ldq = w[sweep.LD], w[sweep.LDQ]
        vt, vh, yt, yh, yj = w[sweep.VT], w[sweep.VH], w[sweep.YT], w[sweep.YH], w[sweep.YJ]
        state, dense = at_address(w[sweep.S], group * F * VP, item), at_address(w[sweep.BUFFER], F * width, item)
        far = at_address(w[sweep.FAR], group * F * VP, item)
        ks, qs = at_address(w[sweep.K], count * ld, item), at_address(w[sweep.Q], count * ldq, item)
        vs = at_address(w[sweep.V], (count - 1) * vt + group * vh, item)
        ys = at_address(w[sweep.Y], (count - 1) * yt + group * yh, item)
        normalize, factors = w[sweep.NORMALIZE], at_address(w[sweep.FACTORS], count * group * r, item)
        for head in range(group):
            Sn, Rn = pointer(state, head * F * VP), pointer(far, head * F * VP)
            kn, qn = pointer(ks, place(n, head, keys) * F), pointer(qs, place(n, head, shared) * r * F)
            vn, yn = pointer(vs, head * vh), pointer(ys, head * yh)
            for c in range(first, VP - width + 1, width):
                home, at, stride = Sn, c, VP
                if count >= DENSE:
                    for i in range(F):
                        store(dense, i * width, load(Sn, c + i * VP))
                    home, at, stride = pointer(dense, 0), 0, width
                for t in range(count):
                    j = 0
                    if mode != READ:
                        write(
                            home, at, stride, Rn, c, VP, F, pointer(kn, t * ld), pointer(qn, t * ldq),
                            pointer(vn, t * vt), pointer(yn, t * yt), c,
                        )  # fmt: skip
                        j = 1
                        if (now + t + 1) % FOLD == 0:
                            fold(home, at, stride, Rn, c, VP, F)
                    if mode != WRITE:
                        while j < r:
                            q, y = pointer(qn, t * ldq + j * F), pointer(yn, t * yt + j * yj)
                            read(home, at, stride, Rn, c, VP, F, q, y, c)
                            j += 1
                        if normalize != 0:
                            for j in range(r):
                                a, b = t * yt + j * yj + c, (t * group + head) * r + j
                                store(yn, a, mul(factors[b], load(yn, a)))
                if count >= DENSE and mode != READ:
                    for i in range(F):
                        store(Sn, c + i * VP, load(dense, i * width))
        return 0

    return long_columns


@functools.cache
def long_columns(width: int) -> int:
    """The address of the compiled sweep of compensated states."""
    return core(_build_long(width), f"long columns {width}", (types.int64, types.int64), exact=True)


def _build_fold() -> Callable[..., int]:
    _, _, fold = (device(loop) for loop in long_sum(operations(1)))

    def fold_z(z, total, F):
        """Add z [F] to its total; both are addresses."""
        fold(at_address(z, F, np.float32), 0, 1, at_address(total, F, np.float32), 0, 1, F)
        return 0

    return fold_z


@functools.cache
def fold_z() -> int:
    """The address of the compiled end of a compensated sum of keys."""
    return core(_build_fold(), "fold z", (types.int64, types.int64, types.int64), exact=True)


@functools.cache
def _many_registers() -> bool:
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))


def width(VP: int) -> int:
    """How many columns to take at once. Whole rows are read from beyond the caches twice as fast as halves of rows."""
    return WIDEST if VP % WIDEST == 0 and _many_registers() else WIDE


@functools.cache
def columns(dtype: str, width: int) -> int:
    """The address of the compiled sweep for states of that dtype, `width` columns at a time."""
    return core(_build(dtype, width), f"columns {dtype} {width}", (types.int64, types.int64))

"""The GPU kernel: one function for steps and prefills, every rule and every feature map, written once for a layer.

A block of threads has some neighbouring value columns of one state head of one stream, a thread one column and some of
its F rows: those stay in its registers from the first token to the last, so a call reads and writes S once. A piece of
tokens is packed into shared memory as on the CPU: raw q and k, φ of them, Λ = exp(g); then each thread takes all tokens
of the piece. Its sums over rows are its part of y; parts meet at the end of a piece, or in `join` where a rule needs
one sooner. The normaliser z is a column of S whose v is always 1, kept by one more row of threads. Every block has z
and the position for itself, so none waits for another; copy 0 is the one that is shown.

The rules' loops, the maps' loops, exp, norms and divisions are the ones that the CPU runs: `retarget` compiles the same
code with lanes of width 1. All numbers are float32. This file imports numba.cuda: whoever has no GPU never loads it.
"""

import functools
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from linattn_edge.kernels import advance, columns, maths, phi
from linattn_edge.kernels.jit import cuda_device, cuda_kernel, cuda_simulated
from linattn_edge.kernels.lanes import Operations
from linattn_edge.kernels.layout import READ, STEP, WRITE
from linattn_edge.layer import Layer

COLUMNS = 32  # threads side by side: a row of S is read 128 bytes at a time
ROWS = 16  # rows of S that a thread has, while there are threads for it
RESIDENT = 32  # and up to how many it keeps in registers; more stay in memory
PARTS = 16  # threads that share a column, at most
PIECE = 16  # tokens packed at once, at most
SHARED = 46 << 10  # bytes of shared memory for them: what every GPU has is 48 KiB

NOT_FINITE, OUT_OF_RANGE, BEYOND, LENGTH = range(4)  # the flags of a state, set and never cleared by a kernel
FLAGS = 4

_OVER_PI = np.float32(1 / np.pi)


class Shape(NamedTuple):
    """How a call is laid out on the GPU."""

    columns: int  # threads of a block side by side
    parts: int  # threads that share a column
    rows: int  # rows of S for each of them
    resident: bool  # whether those are kept in registers
    blocks: int  # blocks for each state head
    piece: int  # tokens packed at once
    sides: int  # vectors of a token and state head: its key, its queries
    threads: int  # rows of threads of a block: the parts, and one more for z

    @property
    def padded(self) -> int:
        """F, rounded up to whole parts."""
        return self.parts * self.rows


def shape_of(layer: Layer, mode: int, many: bool, queries: int | None = None) -> Shape | None:
    """The shape of a call; None where not even one token fits into shared memory. queries: for each state head, where
    not the layer's."""
    K, V, F, r = layer.K, layer.V, layer.F, queries or max(1, layer.H // layer.N)
    width = COLUMNS
    while width // 2 >= max(V, 4):
        width //= 2
    parts = 1
    while parts * ROWS < F and parts < PARTS:
        parts *= 2
    rows = -(-F // parts)
    sides = {STEP: 1 + r, WRITE: 1, READ: r}[mode]
    delta = 1 if layer.rule.beta else 0
    padded = parts * rows
    token = sides * (K + padded + 2) + (1 + 2 * delta) * padded + (r + delta) * parts * width
    token += delta * (parts + 1) + (r * parts if layer.normalize else 0)
    fits = (SHARED // 4 - (2 * padded if layer.normalize else 0)) // token
    if fits < 1:
        return None
    piece = min(PIECE, fits) if many else 1
    threads = parts + 1 if layer.normalize else parts
    return Shape(width, parts, rows, rows <= RESIDENT, -(-V // width), piece, sides, threads)


def _unsigned(i):
    return np.uint64(i)


def _same(i):
    return i


def _load(a, at):
    return a[at]


def _store(a, at, x):
    a[at] = x


def _fma(x, y, z):
    return x * y + z


def _mul(x, y):
    return x * y


def _sub(x, y):
    return x - y


def _zero(y):
    return np.float32(0)


def _add(x, y):
    return x + y


def _cos(x):
    return cuda.libdevice.cospif(x * _OVER_PI)


def _sin(x):
    return cuda.libdevice.sinpif(x * _OVER_PI)


def _operations(shape: Shape, meet: int) -> Operations:
    """Lanes of width 1. Parts meet at slots `meet` after those of y, one for each token: one barrier is enough."""
    C, P = shape.columns, shape.parts

    def join(x, y, column):
        y[meet + column] = x
        cuda.syncthreads()
        first = meet + column // (P * C) * (P * C) + column % C
        total = np.float32(0)
        for part in range(P):
            total += y[first + part * C]
        return total

    return Operations(*(cuda_device(f) for f in (_load, _store, _fma, _mul, _sub, _zero, _add, join)))


@functools.cache
def _substitutes() -> dict[Any, Any]:
    """What the CPU's functions call that is another thing on a GPU."""
    if cuda_simulated():
        return {}
    # cos and sin of the toolkit fall back to float64 for large arguments, those of πx do not
    turns = {maths.cos: cuda_device(_cos), maths.sin: cuda_device(_sin)}
    bits = {maths.to_bits: cuda.libdevice.float_as_int, maths.from_bits: cuda.libdevice.int_as_float}
    return bits | turns | {maths.exp: _again(maths.exp32, bits)}


def _again(function: Callable[..., Any], substitutes: dict[Any, Any]) -> Any:
    """The same code for the GPU: what it calls is looked up anew, plain functions likewise."""

    def new(value: Any) -> Any:
        if not isinstance(value, types.FunctionType):
            return value
        return substitutes[value] if value in substitutes else _again(value, substitutes)

    names = {name: function.__globals__[name] for name in function.__code__.co_names if name in function.__globals__}
    known = {**function.__globals__, **{name: new(value) for name, value in names.items()}}
    cells = tuple(types.CellType(new(cell.cell_contents)) for cell in function.__closure__ or ())
    made = types.FunctionType(function.__code__, known, function.__name__, function.__defaults__, cells or None)
    return cuda_device(made)


@functools.cache
def retarget(function: Callable[..., Any]) -> Any:
    """A plain function of the CPU's, and all that it calls, as one that GPU kernels can call."""
    return function if cuda_simulated() else _again(function, _substitutes())


def finite(x):
    """Neither NaN nor inf."""
    return x - x == np.float32(0)


def within(x, less):
    """Whether the norm of x is at most 1 / less."""
    total = np.float32(0)
    for i in range(x.size):
        total += (x[i] * less) * (x[i] * less)
    return total <= np.float32(1)


def build(layer: Layer, mode: int, width: int, many: bool, ragged: bool, check: bool) -> tuple[Any, Shape]:
    """The plain function of a layer's kernel, and its shape.

    mode: STEP, WRITE or READ. width: decays for each head in g: 0, 1 or F. many: more than one token. ragged: lengths
    are given. check: flag what is not finite or beyond φ's range.
    """
    shape = shape_of(layer, mode, many)
    assert shape is not None
    C, P, R, RESIDENTS, CB, TOKENS, SIDES, ROWS_OF_THREADS = shape
    H, HK, N, K, V, F = layer.H, layer.HK, layer.N, layer.K, layer.V, layer.F
    FP = shape.padded
    OUTPUTS, QUERIES, KEYS, SHARE = layer.outputs, max(1, H // N), N // HK, max(1, N // H)
    NORMALIZE, DELTA, CONSTANT = layer.normalize, layer.rule.beta, layer.decay is not None
    THREADS = C * ROWS_OF_THREADS
    KEY = 0 if mode == READ else 1  # vectors of a token before its queries
    QUERY = 1 if mode == STEP else 0  # where its first query is; a write has none and takes the key for one
    SLOTS = TOKENS * P * C
    EVEN = V % C == 0  # no column is beyond V
    FULL = EVEN and F == FP  # no row beyond F either
    SIDES_OF_WEIGHTS, HEADS, PW = layer.weights.shape
    QK_NORM, ELEMENTWISE = layer.qk_norm, layer.phi.elementwise
    SCALE, EPS, ADD = np.float32(layer.scale), np.float32(layer.eps), layer.eps_mode == "add"
    HORIZON = layer.phi.horizon or 0
    limit = layer.phi.limit(K, float(np.finfo(np.float32).max))
    LIMITED = check and limit < np.inf and not QK_NORM
    LESS = np.float32(1 / limit if LIMITED else 0)
    ZERO, ONE, LARGEST = np.float32(0), np.float32(1), np.finfo(np.float32).max
    # sizes of arrays
    LOCAL = R if RESIDENTS else 1
    RAW, FEATURES, VECTORS = TOKENS * SIDES * K, TOKENS * SIDES * FP, TOKENS * SIDES
    DECAYS = TOKENS * FP if width > 0 else FP
    PER_TOKEN = FP if width > 0 else 0
    PRODUCTS, PAIRS, BETAS = (TOKENS * FP, TOKENS * P, TOKENS) if DELTA else (1, 1, 1)
    YS = QUERIES * SLOTS + (SLOTS if DELTA else 0)
    ZS, DENS = (FP, QUERIES * TOKENS * P) if NORMALIZE else (1, 1)
    NORMS = 2 * VECTORS if QK_NORM else 1

    op = _operations(shape, QUERIES * SLOTS)
    update = cuda_device(layer.rule.loop(op))
    read = cuda_device(_plain(columns.weighted_rows(op)))
    phi_of = retarget(layer.phi.loop)
    size_of, exp = retarget(phi.size_of), retarget(maths.exp32)
    products, divisor = retarget(advance.products), retarget(advance.divisor)
    is_finite, is_within = cuda_device(finite), cuda_device(within)
    place = cuda_device(_same if cuda_simulated() else _unsigned)  # no index counts from the end: none is asked

    def kernel(q, k, v, g, beta, lengths, out, S, z, position, weights, flags, T):
        """All arrays flat; T tokens of each stream, a block of columns of a state head for each block of threads."""
        raw = cuda.shared.array(RAW, np.float32)
        features = cuda.shared.array(FEATURES, np.float32)
        decays = cuda.shared.array(DECAYS, np.float32)
        dks = cuda.shared.array(PRODUCTS, np.float32)
        dqs = cuda.shared.array(PRODUCTS, np.float32)
        qks = cuda.shared.array(PAIRS, np.float32)
        betas = cuda.shared.array(BETAS, np.float32)
        ys = cuda.shared.array(YS, np.float32)
        zs = cuda.shared.array(ZS, np.float32)
        dens = cuda.shared.array(DENS, np.float32)
        norms = cuda.shared.array(NORMS, np.float32)
        own = cuda.local.array(LOCAL, np.float32)

        col, part = cuda.threadIdx.x, cuda.threadIdx.y
        me = part * C + col
        block = cuda.blockIdx.x
        cb, unit = block % CB, block // CB
        n, b = unit % N, unit // N
        B = cuda.gridDim.x // (N * CB)
        c = cb * C + col
        first = part * R
        rows = 0  # of S, of this thread
        if part < P and c < V and first < F:
            rows = F - first if F - first < R else R
        base = ((b * N + n) * F + first) * V + c
        if RESIDENTS and part < P:
            for i in range(R):
                own[place(i)] = S[place(base + i * V)] if FULL or i < rows else ZERO
        length = T
        if ragged:
            asked = int(lengths[place(b)])
            length = max(0, min(T, asked))
            if me == 0 and asked != length:
                flags[LENGTH] = 1
        now, moves = position[place((n * CB + cb) * B + b)], 1
        if HORIZON > 0 and me == 0 and now + (length if mode != READ else 0) > HORIZON:
            flags[BEYOND] = 1
        if mode == READ:
            now, moves = now - 1 if now > 0 else 0, 0
        if NORMALIZE:
            for i in range(me, FP, THREADS):
                zs[i] = z[place(((cb * B + b) * N + n) * F + i)] if i < F else ZERO
        if F < FP:
            for i in range(me, FEATURES, THREADS):
                features[i] = ZERO
        if width == 0:
            for i in range(me, DECAYS, THREADS):
                decays[i] = ONE

        for start in range(0, T, TOKENS):
            count = max(0, min(TOKENS, length - start))
            row = b * T + start
            # what the tokens bring
            for x in range(me, count * SIDES * K, THREADS):
                vector = x // K
                i = x - vector * K
                t = vector // SIDES
                side = vector - t * SIDES
                if side < KEY:
                    value = k[place(((row + t) * HK + n // KEYS) * K + i)]
                else:
                    value = q[place(((row + t) * H + n // SHARE * QUERIES + side - KEY) * K + i)]
                if check and not is_finite(value):
                    flags[NOT_FINITE] = 1
                raw[x] = value
            if mode != READ:
                if width > 0:
                    for x in range(me, count * FP, THREADS):
                        t = x // FP
                        i = x - t * FP
                        at = (n if CONSTANT else (row + t) * N + n) * width
                        value = ZERO
                        if i < F:
                            value = g[place(at + i)] if width > 1 else g[place(at)]
                        if check and not value <= LARGEST:
                            flags[NOT_FINITE] = 1
                        decays[x] = exp(value)
                if part < P:
                    for t in range(count):
                        value = v[place(((row + t) * N + n) * V + c)] if EVEN or c < V else ZERO
                        if check and not is_finite(value):
                            flags[NOT_FINITE] = 1
                        ys[(t * P + part) * C + col] = value
                if DELTA:
                    for t in range(me, count, THREADS):
                        value = beta[place((row + t) * N + n)]
                        if check and not is_finite(value):
                            flags[NOT_FINITE] = 1
                        betas[t] = value
                if NORMALIZE:
                    for x in range(me, count * P, THREADS):
                        dens[x] = ONE
            cuda.syncthreads()
            # φ
            if LIMITED:
                for x in range(me, count * SIDES, THREADS):
                    if not is_within(raw[x * K : x * K + K], LESS):
                        flags[OUT_OF_RANGE] = 1
            if QK_NORM:
                for x in range(me, count * SIDES, THREADS):
                    largest, root = size_of(raw[x * K : x * K + K])
                    norms[2 * x] = largest
                    norms[2 * x + 1] = root
                cuda.syncthreads()
                for x in range(me, count * SIDES * K, THREADS):
                    vector = x // K
                    raw[x] = raw[x] / norms[2 * vector] / norms[2 * vector + 1]
                cuda.syncthreads()
            for x in range(me, count * SIDES * K if ELEMENTWISE else count * SIDES, THREADS):
                vector = x // K if ELEMENTWISE else x
                t = vector // SIDES
                side = vector - t * SIDES
                head = n // KEYS if side < KEY else n // SHARE * QUERIES + side - KEY
                where = (0 if side < KEY else SIDES_OF_WEIGHTS - 1) * HEADS + head % HEADS
                numbers = weights[where * PW : where * PW + PW]
                if ELEMENTWISE:
                    to = vector * FP + x - vector * K
                    phi_of(raw[x : x + 1], features[to : to + 1], numbers, now + (start + t) * moves)
                else:
                    to = vector * FP
                    source = raw[vector * K : vector * K + K]
                    phi_of(source, features[to : to + F], numbers, now + (start + t) * moves)
            cuda.syncthreads()
            if DELTA and mode != READ:
                for x in range(me, count * P, THREADS):
                    t = x // P
                    i = (x - t * P) * R
                    a, d = t * SIDES * FP + i, t * FP + i
                    qks[x] = products(
                        features[a : a + R], features[a + QUERY * FP : a + QUERY * FP + R],
                        decays[t * PER_TOKEN + i : t * PER_TOKEN + i + R], dks[d : d + R], dqs[d : d + R],
                    )  # fmt: skip
                cuda.syncthreads()
            # all tokens, each thread with its rows of its column
            if not NORMALIZE or part < P:
                for t in range(count):
                    a, slot = t * SIDES * FP + first, (t * P + part) * C + col
                    if mode != READ:
                        decay, d, factor, qk = t * PER_TOKEN + first, 0, ZERO, ZERO
                        if DELTA:
                            d, factor, qk = t * FP + first, betas[t], qks[t * P + part]
                        if RESIDENTS:
                            update(
                                own, 0, 1, R, features[a:], features[a + QUERY * FP :], decays[decay:], dks[d:],
                                dqs[d:], ys, ys, slot, factor, qk,
                            )  # fmt: skip
                        else:
                            update(
                                S, base, V, rows, features[a:], features[a + QUERY * FP :], decays[decay:], dks[d:],
                                dqs[d:], ys, ys, slot, factor, qk,
                            )  # fmt: skip
                    if mode != WRITE:
                        for j in range(QUERY, QUERIES):
                            if RESIDENTS:
                                read(own, 0, 1, R, features[a + (KEY + j) * FP :], ys, slot + j * SLOTS)
                            else:
                                read(S, base, V, rows, features[a + (KEY + j) * FP :], ys, slot + j * SLOTS)
            else:
                for p in range(col, P, C):  # z: a column whose v is 1
                    for t in range(count):
                        a, slot = t * SIDES * FP + p * R, t * P + p
                        if mode != READ:
                            decay = t * PER_TOKEN + p * R
                            update(
                                zs, p * R, 1, R, features[a:], features[a + QUERY * FP :], decays[decay:], dks, dqs,
                                dens, dens, slot, ZERO, ZERO,
                            )  # fmt: skip
                        if mode != WRITE:
                            for j in range(QUERY, QUERIES):
                                read(zs, p * R, 1, R, features[a + (KEY + j) * FP :], dens, slot + j * TOKENS * P)
            cuda.syncthreads()
            # y
            if mode != WRITE:
                there = max(0, min(TOKENS, T - start))
                for e in range(part, there * QUERIES, ROWS_OF_THREADS):
                    t = e // QUERIES
                    j = e - t * QUERIES
                    total = ZERO
                    if t < count:
                        for p in range(P):
                            total += ys[j * SLOTS + (t * P + p) * C + col]
                        factor = SCALE
                        if NORMALIZE:
                            den = ZERO
                            for p in range(P):
                                den += dens[(j * TOKENS + t) * P + p]
                            factor = SCALE / divisor(den, EPS, ADD)
                        total = total * factor
                    if EVEN or c < V:
                        out[place(((row + t) * OUTPUTS + n * QUERIES + j) * V + c)] = total
                cuda.syncthreads()

        if mode != READ:
            if RESIDENTS and part < P:
                for i in range(R):
                    if FULL or i < rows:
                        S[place(base + i * V)] = own[place(i)]
            if NORMALIZE:
                for i in range(me, F, THREADS):
                    z[place(((cb * B + b) * N + n) * F + i)] = zs[i]
            if me == 0:
                position[place((n * CB + cb) * B + b)] += length

    return kernel, shape


def _plain(function: Any) -> Any:
    """The plain function that a marked one is."""
    return getattr(function, "py_func", function)


def compiled(layer: Layer, mode: int, width: int, many: bool, ragged: bool, check: bool) -> tuple[Any, Shape]:
    """The kernel of a layer for one kind of call, compiled when first launched, and its shape."""
    kernel, shape = build(layer, mode, width, many, ragged, check)
    return cuda_kernel(kernel, shape.columns * shape.threads), shape

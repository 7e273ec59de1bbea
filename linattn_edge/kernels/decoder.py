"""A whole model in one compiled call: the operations of program.py, one after another, on some tokens of some streams.

Matrices may be stored as float32, float16 or int8 with a scale for each row; everything is computed in float32. Every
number is the same however many tokens a call has: sums over a row are in one order.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from linattn_edge.kernels import layout, maths, program
from linattn_edge.kernels.cpu import run
from linattn_edge.kernels.jit import call, device, kernel, large
from linattn_edge.kernels.lanes import address, at_address, operations, part, total
from linattn_edge.kernels.layout import STEP

exp = maths.exp
F32 = np.float32
LANES = program.LANES
_op = operations(LANES)
load, store, fma, mul, zero = _op.load, _op.store, _op.fma, _op.mul, _op.zero
load_one = operations(1).load


@device
def number_at(w, at):
    """One number of a matrix, however it is stored."""
    return total(load_one(w, at))


@device
def rest(array, at):
    """array[at:]"""
    return part(array, at, array.size - at)


@device
def act(kind, x):
    """An activation, written so that exp never overflows."""
    if kind == program.RELU:
        return max(x, F32(0))
    if kind == program.RELU2:
        return max(x, F32(0)) * max(x, F32(0))
    e = exp(-abs(x))
    if kind == program.LOG_SIGMOID:
        return min(x, F32(0)) - F32(np.log1p(e))
    y = x
    if kind == program.GELU:  # the tanh form: x · σ(2 √(2/π) (x + 0.044715 x³))
        y = F32(1.5957691216057308) * x * (F32(1) + F32(0.044715) * x * x)
        e = exp(-abs(y))
    gate = F32(1) / (F32(1) + e)
    if y < 0:
        gate = e * gate
    return gate if kind == program.SIGMOID else x * gate


@device
def act_all(kind, x, count):
    """x = act(x). One array, or the compiler could not tell that the loop may run in lanes."""
    if kind == program.SILU:
        for i in range(count):
            gate = F32(1) / (F32(1) + exp(-abs(x[i])))
            x[i] *= gate if x[i] >= 0 else F32(1) - gate
    else:
        for i in range(count):
            x[i] = act(kind, x[i])


@device
def multiply(x, by, y, count):
    """y = x · by"""
    whole = count // LANES * LANES
    for i in range(0, whole, LANES):
        store(y, i, mul(load(x, i), load(by, i)))
    for i in range(whole, count):
        y[i] = x[i] * by[i]


@device
def finish(sums, y, at, count, block, scales, biases, add, spare):
    """Store a block of sums at y[at:], scaled, shifted and added as asked; only `count` of them at the end of a row."""
    if scales.size > 0:
        sums = mul(load(scales, block * LANES), sums)
    if biases.size > 0:
        sums = fma(F32(1), load(biases, block * LANES), sums)
    if count >= LANES:
        store(y, at, fma(F32(1), load(y, at), sums) if add else sums)
    else:
        store(spare, 0, sums)
        for i in range(count):
            y[at + i] = y[at + i] + spare[i] if add else spare[i]


@large
def matmul(w, x, y, rows, N, M, scales, biases, add, spare):
    """y [rows, N] = x [rows, M] · wᵀ: one block of w for four tokens, or four blocks for one token, at once."""
    blocks, step = -(-N // LANES), M * LANES
    fours = rows // 4 * 4
    for block in range(blocks):
        n = block * LANES
        for t in range(0, fours, 4):
            x0, x1, x2, x3 = t * M, (t + 1) * M, (t + 2) * M, (t + 3) * M
            a0 = a1 = a2 = a3 = zero(load(spare, 0))
            for i in range(M):
                column = load(w, block * step + i * LANES)
                a0 = fma(x[x0 + i], column, a0)
                a1 = fma(x[x1 + i], column, a1)
                a2 = fma(x[x2 + i], column, a2)
                a3 = fma(x[x3 + i], column, a3)
            finish(a0, y, t * N + n, N - n, block, scales, biases, add, spare)
            finish(a1, y, (t + 1) * N + n, N - n, block, scales, biases, add, spare)
            finish(a2, y, (t + 2) * N + n, N - n, block, scales, biases, add, spare)
            finish(a3, y, (t + 3) * N + n, N - n, block, scales, biases, add, spare)
    for t in range(fours, rows):
        at, block = t * M, 0
        while block + 4 <= blocks:
            w0 = block * step
            w1, w2, w3 = w0 + step, w0 + 2 * step, w0 + 3 * step
            a0 = a1 = a2 = a3 = zero(load(spare, 0))
            for i in range(M):
                number = x[at + i]
                a0 = fma(number, load(w, w0 + i * LANES), a0)
                a1 = fma(number, load(w, w1 + i * LANES), a1)
                a2 = fma(number, load(w, w2 + i * LANES), a2)
                a3 = fma(number, load(w, w3 + i * LANES), a3)
            n = block * LANES
            finish(a0, y, t * N + n, N - n, block, scales, biases, add, spare)
            finish(a1, y, t * N + n + LANES, N - n - LANES, block + 1, scales, biases, add, spare)
            finish(a2, y, t * N + n + 2 * LANES, N - n - 2 * LANES, block + 2, scales, biases, add, spare)
            finish(a3, y, t * N + n + 3 * LANES, N - n - 3 * LANES, block + 3, scales, biases, add, spare)
            block += 4
        while block < blocks:
            a0 = zero(load(spare, 0))
            for i in range(M):
                a0 = fma(x[at + i], load(w, block * step + i * LANES), a0)
            finish(a0, y, t * N + block * LANES, N - block * LANES, block, scales, biases, add, spare)
            block += 1


@device
def embed(w, tokens, y, rows, M, scales):
    for t in range(rows):
        row = tokens[t] // LANES * M * LANES + tokens[t] % LANES
        for i in range(M):
            number = number_at(w, row + i * LANES)
            y[t * M + i] = number * scales[tokens[t]] if scales.size > 0 else number


@large
def norm(x, y, groups, M, weights, eps):
    for g in range(groups):
        squares = F32(0)
        for i in range(M):
            squares += x[g * M + i] * x[g * M + i]
        factor = F32(1) / np.sqrt(squares / F32(M) + eps)
        if weights.size > 0:
            for i in range(M):
                y[g * M + i] = x[g * M + i] * factor * weights[i]
        else:
            for i in range(M):
                y[g * M + i] = x[g * M + i] * factor


@device
def sum_norm(x, y, groups, M, eps):
    for g in range(groups):
        sum_ = eps
        for i in range(M):
            sum_ += x[g * M + i]
        for i in range(M):
            y[g * M + i] = x[g * M + i] / sum_


@large
def convolve(x, place, streams, B, T, lengths, N, M, w, biases):
    """x = silu of a causal convolution over M tokens. Past inputs, oldest first, are at the address `place`,
    [B, N, M - 1], or in each of `streams` from that byte on, [N, M - 1]."""
    for b in range(B):
        at_b = streams[b] + place if streams.size > 0 else place + b * N * (M - 1) * 4
        past = at_address(at_b, N * (M - 1), np.float32)
        count = lengths[b] if lengths.size > 0 else T
        for n in range(N):
            kept = n * (M - 1)
            for t in range(count):
                at = (b * T + t) * N + n
                sum_ = w[n * M + M - 1] * x[at]
                for i in range(M - 1):
                    sum_ += w[n * M + i] * past[kept + i]
                if biases.size > 0:
                    sum_ += biases[n]
                for i in range(M - 2):
                    past[kept + i] = past[kept + i + 1]
                if M > 1:
                    past[kept + M - 2] = x[at]
                x[at] = act(program.SILU, sum_)


def _build() -> Callable[..., int]:
    def decode(ops, count, tokens, lengths, streams, places, work, scratch, B, T):
        """Run `count` operations on tokens [B * T]; lengths [B] or empty. Returns a layout code.

        streams: addresses of the records [B] of a pool, or none; then `places` has, for each layer, the header of a job
        and where in a record the past tokens are.

        work: all buffers for B * T tokens, and program.LANES numbers more; scratch: bytes for a prefill of the
        hungriest layer; places: addresses of each layer's state and past tokens of convolutions, PLACES a layer.
        """
        rows = B * T
        spare = part(work, work.size - program.LANES, program.LANES)
        for number in range(count):
            op = at_address(address(ops) + number * program.WIDTH * 8, program.WIDTH, np.int64)
            code, N, M, kind = op[program.CODE], op[program.N], op[program.M], op[program.KIND]
            x, other = rest(work, op[program.A] * rows), rest(work, op[program.B] * rows)
            y = rest(work, op[program.OUT] * rows)
            reals = at_address(address(op) + 8 * program.REAL, 1, np.float64)
            weight, extra = op[program.WEIGHT], op[program.EXTRA]
            blocked = program.LANES * -(-N // program.LANES)
            scales = at_address(op[program.SCALE], blocked if op[program.SCALE] != 0 else 0, np.float32)
            if code == program.EMBED:
                if kind == program.INT8:
                    embed(at_address(weight, blocked * M, np.int8), tokens, y, rows, M, scales)
                elif kind == program.FLOAT16:
                    embed(at_address(weight, blocked * M, np.uint16), tokens, y, rows, M, scales)
                else:
                    embed(at_address(weight, blocked * M, np.float32), tokens, y, rows, M, scales)
            elif code == program.NORM:
                weights = at_address(weight, M if weight != 0 else 0, np.float32)
                norm(x, y, rows * N, M, weights, F32(reals[0]))
            elif code == program.MATMUL or code == program.ADD_MATMUL:
                add = code == program.ADD_MATMUL
                biases = at_address(extra, blocked if extra != 0 else 0, np.float32)
                if kind == program.INT8:
                    matmul(at_address(weight, blocked * M, np.int8), x, y, rows, N, M, scales, biases, add, spare)
                elif kind == program.FLOAT16:
                    matmul(at_address(weight, blocked * M, np.uint16), x, y, rows, N, M, scales, biases, add, spare)
                else:
                    matmul(at_address(weight, blocked * M, np.float32), x, y, rows, N, M, scales, biases, add, spare)
            elif code == program.ACT:
                act_all(extra, x, rows * N)
            elif code == program.ACT_MULTIPLY:
                act_all(extra, x, rows * N)
                multiply(x, other, y, rows * N)
            elif code == program.LOG_DECAY:
                numbers = at_address(weight, 2, np.float32)
                for i in range(rows * N):
                    g = act(program.LOG_SIGMOID, x[i]) / numbers[0]
                    y[i] = g if g > numbers[1] else numbers[1]
            elif code == program.CONV:
                place = places[op[program.STATE] * program.PLACES + 1 + kind]
                w, biases = at_address(weight, N * M, np.float32), at_address(extra, N if extra != 0 else 0, np.float32)
                convolve(x, place, streams, B, T, lengths, N, M, w, biases)
            elif code == program.PHI:
                plan = at_address(weight, 5, np.int64)
                for t in range(rows):
                    call(
                        plan[0], address(x) + t * N * M * 4, N * M, address(y) + t * N * plan[4] * 4, N * plan[4], 1, N,
                        M, plan[4], plan[1], plan[2], 0, plan[3], 0, 0, 0, 1.0, address(scratch),
                    )  # fmt: skip
            elif code == program.SUM_NORM:
                sum_norm(x, y, rows * N, M, F32(reals[0]))
            else:
                block = places[op[program.STATE] * program.PLACES]
                header = at_address(block, layout.HEADER, np.int64)
                plan = at_address(weight, layout.PLAN_SIZE, np.int64)
                value, width = rest(work, extra * rows), N
                g = rest(work, kind * rows if N > 0 else 0)
                state = at_address(block, header[layout.END], np.uint8)
                if T == 1 and lengths.size == 0:
                    room = at_address(block + header[layout.AT_WORK], header[layout.STEP_WORK], np.uint8)
                    piece, group = 1, header[layout.STEP_GROUP]
                else:
                    room = at_address(address(scratch), header[layout.PREFILL_WORK], np.uint8)
                    piece, group = header[layout.PREFILL_PIECE], header[layout.PREFILL_GROUP]
                    piece = T if piece > T else piece
                run(
                    state, plan, 0, room, x, other, value, g, part(work, 0, 0), lengths, streams, y, T, width, STEP,
                    piece, group,
                )  # fmt: skip
        return layout.OK

    return decode


@functools.cache
def decode() -> Callable[..., int]:
    """The compiled decoder, for every model."""

    def taken(of: Any) -> Any:
        return types.Array(of, 1, "C")

    word = types.int64
    arrays = taken(types.float32), taken(types.uint8)
    signature = (taken(word), word, *[taken(word)] * 4, *arrays, word, word)
    return kernel(_build(), "decode", signature)

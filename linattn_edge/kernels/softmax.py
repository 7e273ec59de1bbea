"""Exact softmax attention over a growing cache: the full scan that linear attention is measured against.

Keys are kept in blocks of WIDE tokens, transposed ([K, WIDE] each), so that both the scores and the weighted sum of
values are the same loop, `weighted_rows`, with accumulators in registers. Nothing is copied per token but the token
itself.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types

from linattn_edge.kernels import layout, maths
from linattn_edge.kernels.columns import weighted_rows
from linattn_edge.kernels.cpu import finite
from linattn_edge.kernels.jit import kernel
from linattn_edge.kernels.lanes import flat, operations, part
from linattn_edge.kernels.layout import NARROW, READ, WIDE, WRITE

exp = maths.exp
wide = weighted_rows(operations(WIDE))
narrow = weighted_rows(operations(NARROW))


def _build(dtype: str) -> Callable[..., int]:
    largest = np.finfo(dtype).max
    item = np.dtype(dtype).type
    nothing = item(0)

    def attend(q, k, v, lengths, out, keys, values, position, w, scale, check, mode):
        """T tokens of each stream. q, k, v, out [B, T, heads, width]; keys [B, N, blocks, K, WIDE]; values [B, N,
        tokens, VP].

        w is scratch of K + VP + tokens numbers. Shapes and capacity are checked by the caller.
        """
        T = k.shape[1] if mode == WRITE else q.shape[1]
        B, N, blocks, K = keys.shape[0], keys.shape[1], keys.shape[2], keys.shape[3]
        capacity, VP = values.shape[2], values.shape[3]
        H = q.shape[2] if mode != WRITE else N
        V = out.shape[3] if mode != WRITE else v.shape[3]
        fq, fk, fv, fo, fkeys, fvalues = flat(q), flat(k), flat(v), flat(out), flat(keys), flat(values)
        if check:
            for b in range(B):
                n = lengths[b] if lengths.size > 0 else T
                a = b * T
                if mode != WRITE and not finite(part(fq, a * H * K, n * H * K)):
                    return layout.REFUSED
                if mode != READ and not (
                    finite(part(fk, a * N * K, n * N * K)) and finite(part(fv, a * N * V, n * N * V))
                ):
                    return layout.REFUSED
        r = H // N
        y, scores = part(w, K, VP), part(w, K + VP, w.size - K - VP)
        for b in range(B):
            length = lengths[b] if lengths.size > 0 else T
            for n in range(N):
                unit = b * N + n
                for t in range(length):
                    row = b * T + t
                    seen = position[b]
                    if mode != READ:
                        x = (unit * blocks + (seen + t) // WIDE) * K * WIDE + (seen + t) % WIDE
                        for i in range(K):
                            fkeys[x + i * WIDE] = fk[(row * N + n) * K + i]
                        x = (unit * capacity + seen + t) * VP
                        for i in range(V):
                            fvalues[x + i] = fv[(row * N + n) * V + i]
                        seen += t + 1
                    if mode == WRITE:
                        continue
                    for j in range(r):
                        h = n * r + j
                        for i in range(K):
                            w[i] = fq[(row * H + h) * K + i] * scale
                        for block in range((seen + WIDE - 1) // WIDE):
                            wide(fkeys, (unit * blocks + block) * K * WIDE, WIDE, K, w, scores, block * WIDE)
                        p = part(scores, 0, seen)
                        top = -largest
                        for i in range(seen):
                            p[i] = max(min(p[i], largest), -largest)  # logits beyond float32
                            top = max(top, p[i])
                        total = nothing
                        for i in range(seen):
                            p[i] = exp(p[i] - top)
                            total += p[i]
                        c = 0
                        while c + WIDE <= VP:
                            wide(fvalues, unit * capacity * VP + c, VP, seen, p, y, c)
                            c += WIDE
                        while c < VP:
                            narrow(fvalues, unit * capacity * VP + c, VP, seen, p, y, c)
                            c += NARROW
                        x = (row * H + h) * V
                        for i in range(V):
                            fo[x + i] = y[i] / total if seen > 0 else nothing
                if mode != WRITE:
                    for t in range(length, T):
                        x = ((b * T + t) * H + n * r) * V
                        for i in range(r * V):
                            fo[x + i] = nothing
            if mode != READ:
                position[b] += length
        return layout.OK

    return attend


@functools.cache
def attend(dtype: str) -> Callable[..., int]:
    """The compiled full scan for caches of that dtype."""
    real = types.float32 if dtype == "float32" else types.float64
    taken = [types.Array(real, 4, "C", readonly=True)] * 3 + [types.Array(types.int64, 1, "C", readonly=True)]
    kept = [types.Array(real, n, "C") for n in (4, 5, 4)]
    rest = [types.Array(types.int64, 1, "C"), types.Array(real, 1, "C"), real, types.boolean, types.int64]
    signature: tuple[Any, ...] = (*taken, *kept, *rest)
    return kernel(_build(dtype), f"softmax {dtype}", signature)

"""A block of tokens in matrix form, from primitive operators: exact for every decay, with no exponent above 0.

With D[i, j] = exp(Σ g_s over j < s ≤ i), the decay from token j to token i, w_i = exp(Σ g_s over s ≤ i) that from the
past state and e_j = exp(Σ g_s over s > j) that to the end of the block:

    u = v                                                 (linear, gated)
    u = (I + β·tril(kkᵀ ∘ D, −1))⁻¹ β(v − (w ∘ k)S)        (the delta rules)
    y = tril(qkᵀ ∘ D)u + (w ∘ q)S        S ← w_T S + (e ∘ k)ᵀu

Each sum of g is added up by itself, as a product with zeros and ones, and never as a difference of two prefix sums:
behind a decay of −1e30 such a difference has no digits left.

The past state is copied, below u, by one node on which all that follows depends (the delta rules read it once more,
for u): the present may be written over it.
"""

import math

import numpy as np

from linattn_export.channels import ChannelDecay
from linattn_export.graph import Graph
from linattn_export.masks import BLOCK, lower, square, strict
from linattn_export.recurrence import Parts, decay, finished
from linattn_export.tokens import Tokens, split

FLOOR = -1e5  # exp of anything below −104 is 0 in float32, and BLOCK times this is no large number


def attend(graph: Graph, parts: Parts) -> tuple[Tokens, str]:
    """The nodes of a block: the output and the present state."""
    layer, N = parts.layer, parts.layer.N
    readers = parts.q.heads // N
    q = _queries(graph, parts.q, N)
    k = graph.node("Transpose", split(graph, parts.k).value, perm=[0, 2, 1, 3])
    kT = graph.node("Transpose", k, perm=[0, 1, 3, 2])
    u = graph.node("Transpose", split(graph, parts.v).value, perm=[0, 2, 1, 3])
    decays = _decays(graph, parts)

    def shared(value: str) -> str:
        """What all queries of a state share, [B, N, ...], as [B, N, 1, ...] where there are several."""
        return value if readers == 1 else graph.node("Unsqueeze", value, graph.ints(2))

    from_past = {"q": q, "k": k}
    if decays is not None:
        w = decays.from_past()
        from_past["q"] = graph.node("Mul", q, shared(w))
    if parts.beta is not None:
        beta = graph.reshape(parts.beta, 0, 0, N, 1)
        beta = graph.node("Transpose", beta, perm=[0, 2, 1, 3])
        if decays is not None:
            from_past["k"] = graph.node("Mul", k, w)
        known = graph.node("MatMul", from_past["k"], parts.past, hint="known")
        among = decays.pairs(k, k, kT, 1) if decays is not None else graph.node("MatMul", k, kT)
        among = graph.node("Trilu", among, graph.constant(-1, "int64"), upper=0)
        L = graph.node("Mul", among, beta)
        inverse = _inverse(graph, L)
        missing = graph.node("Mul", graph.node("Sub", u, known), beta)
        u = graph.node("MatMul", inverse, missing)
        # once more with what is left: the inverse of strongly correlated keys loses a digit
        left = graph.node("Sub", graph.node("Sub", missing, u), graph.node("MatMul", L, u))
        u = graph.node("Add", u, graph.node("MatMul", inverse, left), hint="change")
    below = graph.node("Concat", u, parts.past, axis=2, hint="u_and_past")
    sees = decays.pairs(q, k, kT, readers) if decays is not None else graph.node("MatMul", q, shared(kT))
    sees = graph.node("Trilu", sees, upper=0)
    both = graph.node("Concat", sees, from_past["q"], axis=-1)
    y = finished(graph, layer, graph.node("MatMul", both, shared(below)))
    if layer.scale != 1:
        y = graph.node("Mul", y, graph.constant(layer.scale))
    if readers == 1:
        y = graph.node("Transpose", y, perm=[0, 2, 1, 3])
    else:
        y = graph.node("Transpose", y, perm=[0, 3, 1, 2, 4])
    output = Tokens(graph.reshape(y, 0, 0, parts.q.heads * layer.V), parts.q.heads, layer.V)
    end = graph.ints(2**31 - 1)
    S = graph.node("Slice", below, graph.token_count(), end, graph.ints(2), hint="past")
    if decays is not None:
        S = graph.node("Mul", S, decays.whole(), hint="decayed")
        kT = decays.to_end(k, kT)
    return output, graph.node("Add", S, graph.node("MatMul", kT, u, hint="written"), hint="state")


def _queries(graph: Graph, q: Tokens, N: int) -> str:
    """[B, N, T, F], or [B, N, r, T, F] where r queries read a state."""
    if q.heads == N:
        return graph.node("Transpose", split(graph, q).value, perm=[0, 2, 1, 3])
    return graph.node("Transpose", graph.reshape(q.value, 0, 0, N, q.heads // N, q.width), perm=[0, 2, 3, 1, 4])


def _decays(graph: Graph, parts: Parts) -> "HeadDecay | ChannelDecay | None":
    g, N = decay(graph, parts), parts.layer.N
    if g is None:
        return None
    C = parts.channels
    g = graph.node("Max", g, graph.constant(FLOOR), hint="g")
    g = graph.node("Transpose", graph.reshape(g, 0, 0, N, C), perm=[0, 2, 1, 3])
    return HeadDecay(graph, g) if C == 1 else ChannelDecay(graph, g, N, C)


class HeadDecay:
    """The decays of a block where a head has one number for all its channels. g: [B, N, T, 1]."""

    def __init__(self, graph: Graph, g: str) -> None:
        self.graph, self.g = graph, g
        steps = graph.node("Mul", g, strict(graph))  # [B, N, s, j]: g_s where s > j
        self._pairs = graph.node("Exp", graph.node("MatMul", lower(graph), steps), hint="D")

    def pairs(self, x: str, k: str, kT: str, readers: int) -> str:
        """xkᵀ ∘ D, [B, N, T, T] or [B, N, r, T, T]; above the diagonal it means nothing."""
        D = self._pairs
        if readers > 1:
            kT, D = (self.graph.node("Unsqueeze", value, self.graph.ints(2)) for value in (kT, D))
        return self.graph.node("Mul", self.graph.node("MatMul", x, kT), D)

    def from_past(self) -> str:
        """w, [B, N, T, 1]."""
        return self.graph.node("Exp", self.graph.node("MatMul", lower(self.graph), self.g), hint="w")

    def whole(self) -> str:
        """w_T, [B, N, 1, 1]."""
        return self.graph.node("Exp", self.graph.node("ReduceSum", self.g, self.graph.ints(2), keepdims=1))

    def to_end(self, k: str, kT: str) -> str:
        """(e ∘ k)ᵀ, [B, N, F, T]."""
        row = self.graph.node("Transpose", self.g, perm=[0, 1, 3, 2])
        e = self.graph.node("Exp", self.graph.node("MatMul", row, strict(self.graph)), hint="e")
        return self.graph.node("Mul", kT, e)


def _inverse(graph: Graph, L: str) -> str:
    """(I + L)⁻¹ of a strictly lower triangular L [B, N, T, T], by doubling: blocks of 1 inverted, then of 2, 4, …

    Each level solves with what the last one inverted. The product of (I + (−L)^(2^i)), which is shorter, overflows
    where keys repeat.
    """
    size = BLOCK if graph.tokens is None else graph.tokens
    levels = max(1, math.ceil(math.log2(max(size, 2))))
    i, j = np.indices((size, size))
    level = np.where(i > j, np.frexp(np.maximum(i ^ j, 1))[1] - 1, -1)  # the level at which token i meets token j
    levels_of = square(graph, "level", level)

    def mask(n: int) -> str:
        return graph.node("Cast", graph.node("Equal", levels_of, graph.constant(float(n))), to=1, hint=f"level_{n}")

    def part(n: int) -> str:
        return graph.node("Mul", L, graph.once(("level", n), lambda: mask(n)))

    M = graph.node("Sub", square(graph, "eye", np.eye(size)), part(0))
    for n in range(1, levels):
        M = graph.node("Sub", M, graph.node("MatMul", graph.node("MatMul", M, part(n)), M), hint="inverse")
    return M

"""The `portable` flavor: primitive operators only, no Scan, no Loop, no functions.

A file for one token a call (`tokens=1`) is the recurrence as it is written; any other takes a block of at most
BLOCK tokens in matrix form, quadratic in the block.
"""

from dataclasses import replace

import numpy as np

from linattn_export import block
from linattn_export.graph import Graph
from linattn_export.recurrence import Parts, finished
from linattn_export.tokens import Tokens, repeated


def attend(graph: Graph, parts: Parts) -> tuple[Tokens, str]:
    """The nodes: the output and the present state."""
    N = parts.layer.N
    q = repeated(graph, parts.q, N) if parts.q.heads < N else parts.q
    parts = replace(parts, q=q, k=repeated(graph, parts.k, N))
    return (step if graph.tokens == 1 else block.attend)(graph, parts)


def step(graph: Graph, parts: Parts) -> tuple[Tokens, str]:
    """One token. The past state is read once, or, by the delta rules, before what is written depends on it."""
    layer, N, F, W = parts.layer, parts.layer.N, parts.layer.F, parts.W
    readers = parts.q.heads // N
    q = graph.reshape(parts.q.value, 0, N, readers, F)
    k = graph.reshape(parts.k.value, 0, N, F, 1)
    v = graph.reshape(parts.v.value, 0, N, 1, W)
    S = parts.past
    if layer.decay is not None:
        S = graph.node("Mul", S, graph.constant(np.exp(layer.decay)[..., None], hint="constant_decay"), hint="decayed")
    elif parts.g is not None:
        factor = graph.node("Exp", graph.reshape(parts.g, 0, N, parts.channels, 1))
        S = graph.node("Mul", S, factor, hint="decayed")
    if parts.beta is not None:
        known = graph.node("MatMul", graph.reshape(parts.k.value, 0, N, 1, F), S, hint="known")
        v = graph.node("Mul", graph.node("Sub", v, known), graph.reshape(parts.beta, 0, N, 1, 1), hint="change")
    present = graph.node("Add", S, graph.node("MatMul", k, v, hint="written"), hint="state")
    y = graph.node("MatMul", q, present)
    y = finished(graph, layer, y)
    if layer.scale != 1:
        y = graph.node("Mul", y, graph.constant(layer.scale))
    outputs = N * readers
    return Tokens(graph.reshape(y, 0, 1, outputs * layer.V), outputs, layer.V), present

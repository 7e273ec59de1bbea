"""The ONNX nodes of each feature map, by the map's name. To add one, write a function and list it in `NODES`."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from linattn_edge.features import MAPS
from linattn_edge.layer import Layer
from linattn_export.graph import Array, Graph
from linattn_export.tokens import Tokens, split

KEY, QUERY = 0, -1  # the two sides of a map's weights


def features(graph: Graph, layer: Layer, x: Tokens, side: int, position: str | None) -> Tokens:
    """φ of queries or keys x. position: int64 [B, T], for maps that read positions."""
    build = NODES[check_map(layer)]
    return build(graph, layer, x, side, position)


def check_map(layer: Layer) -> str:
    """The name of the layer's map; refuses a map that has no nodes here."""
    name = layer.phi.name
    if type(layer.phi) is not MAPS.get(name) or name not in NODES:
        raise ValueError(
            f"feature_map: {layer.phi!r} is the caller's own code, which has no ONNX form; supported: "
            f"{', '.join(NODES)}"
        )
    return name


def identity(graph: Graph, layer: Layer, x: Tokens, side: int, position: str | None) -> Tokens:
    return x


def elu(graph: Graph, layer: Layer, x: Tokens, side: int, position: str | None) -> Tokens:
    # exp(x) ≥ x + 1, with equality at 0: the larger of the two is x + 1 from 0 on and exp(x) below
    low = graph.node("Exp", graph.node("Min", x.value, graph.constant(0.0)))
    high = graph.node("Add", x.value, graph.constant(1.0))
    return x.of(graph.node("Max", high, low, hint="elu"))


def relu(graph: Graph, layer: Layer, x: Tokens, side: int, position: str | None) -> Tokens:
    return x.of(graph.node("Relu", x.value))


def relu2(graph: Graph, layer: Layer, x: Tokens, side: int, position: str | None) -> Tokens:
    r = graph.node("Relu", x.value)
    return x.of(graph.node("Mul", r, r, hint="relu2"))


def monomials(graph: Graph, layer: Layer, x: Tokens, side: int, position: str | None) -> Tokens:
    """`polynomial` and `taylor`: each term is a product of `order` entries of [1, x], gathered, times its constant."""
    x = split(graph, x)
    K, F = layer.K, layer.F
    weights = layer.weights[side, 0]
    order, lowest = int(weights[0]), int(weights[1])
    scales = graph.constant(weights[2 + order * K :], hint="monomial_scales")
    one = graph.constant(1.0)
    if order == 0:
        first = graph.node("Slice", x.value, graph.ints(0), graph.ints(1), graph.ints(-1))
        nothing = graph.node("Mul", first, graph.constant(0.0))
        return x.of(graph.node("Mul", graph.node("Add", nothing, one), scales), F)
    index = _terms(order, lowest, K, weights)
    pads = graph.ints(0, 0, 0, 1, 0, 0, 0, 0)
    source = x.value if lowest == order else graph.node("Pad", x.value, pads, one)
    index = index - 1 if lowest == order else index
    y = scales
    for places in index:
        y = graph.node("Mul", graph.node("Gather", source, graph.constant(places, "int64", "terms"), axis=-1), y)
    return x.of(y, F)


def _terms(order: int, lowest: int, K: int, weights: Array) -> Array:
    """[order, F]: for each term the places in [1, x] of its factors; in the order of features.py."""
    terms = [np.zeros((0, 1), np.int64)]
    for d in range(1, order + 1):
        tails = weights[2 + (d - 1) * K : 2 + d * K].astype(int)
        below = terms[-1]
        parts = [np.vstack([np.full((1, n), i + 1), below[:, below.shape[1] - n :]]) for i, n in enumerate(tails)]
        terms.append(np.concatenate(parts, axis=1))
    filled = [np.vstack([t, np.zeros((order - len(t), t.shape[1]), np.int64)]) for t in terms[lowest:]]
    return np.concatenate(filled, axis=1)


def dpfp(graph: Graph, layer: Layer, x: Tokens, side: int, position: str | None) -> Tokens:
    phi: Any = layer.phi
    x = split(graph, x)
    width = 2 * layer.K
    both = graph.node("Concat", x.value, graph.node("Neg", x.value), axis=-1)
    r = graph.node("Relu", both)
    own = np.tile(np.arange(width), phi.nu)
    other = np.concatenate([(np.arange(width) - j) % width for j in range(1, phi.nu + 1)])
    a = r if phi.nu == 1 else graph.node("Gather", r, graph.constant(own, "int64", "dpfp_own"), axis=-1)
    b = graph.node("Gather", r, graph.constant(other, "int64", "dpfp_other"), axis=-1)
    y = graph.node("Mul", a, b, hint="dpfp")
    if phi.sum_norm:
        total = graph.node("ReduceSum", y, graph.ints(-1), keepdims=1)
        some = graph.node("Greater", total, graph.constant(0.0))
        y = graph.node("Div", y, graph.node("Where", some, total, graph.constant(1.0)))
    return x.of(y, layer.F)


def cosformer(graph: Graph, layer: Layer, x: Tokens, side: int, position: str | None) -> Tokens:
    if position is None:
        raise ValueError("feature_map: cosformer needs the position of each token")
    x = split(graph, x)

    def waves(op: str) -> str:
        angle = graph.node("Mul", graph.node("Cast", position, to=1), graph.constant(layer.weights[0, 0, 0]))
        angle = graph.node("Unsqueeze", angle, graph.ints(2, 3))
        return graph.node(op, angle)

    key = "cosformer", layer.weights[0, 0, 0]
    cos = graph.once((*key, "cos"), lambda: waves("Cos"))
    sin = graph.once((*key, "sin"), lambda: waves("Sin"))
    r = graph.node("Relu", x.value)
    y = graph.node("Concat", graph.node("Mul", r, cos), graph.node("Mul", r, sin), axis=-1)
    return x.of(y, layer.F)


def _layers(graph: Graph, layer: Layer, x: Tokens, side: int) -> tuple[Tokens, int]:
    """u = Wx + b of a learned map, split, and its rows R."""
    K, heads = layer.K, layer.phi.heads(side)
    numbers = layer.weights[side, :heads, 1:]
    R = numbers.shape[1] // (K + 1)
    W = numbers[:, : R * K].reshape(heads, R, K).transpose(0, 2, 1)
    b = numbers[:, R * K :]
    x = split(graph, x)
    if heads == 1:
        u = graph.node("MatMul", x.value, graph.constant(W[0], hint="phi_weight"))
        bias = b[0]
    else:  # a matrix for each head: one row times it
        rows = graph.reshape(x.value, 0, 0, x.heads, 1, K)
        u = graph.reshape(graph.node("MatMul", rows, graph.constant(W, hint="phi_weight")), 0, 0, x.heads, R)
        bias = b
    if bias.any():
        u = graph.node("Add", u, graph.constant(bias, hint="phi_bias"))
    return x.of(u, R), R


def t2r(graph: Graph, layer: Layer, x: Tokens, side: int, position: str | None) -> Tokens:
    u, _ = _layers(graph, layer, x, side)
    return u.of(graph.node("Relu", u.value))


def elementwise_product(graph: Graph, layer: Layer, x: Tokens, side: int, position: str | None) -> Tokens:
    u, R = _layers(graph, layer, x, side)
    halves = graph.ints(R // 2, R // 2)
    a, b = graph.several("Split", [u.value, halves], ["product_a", "product_b"], attributes={"axis": -1})
    return u.of(graph.node("Mul", a, b), R // 2)


def hedgehog(graph: Graph, layer: Layer, x: Tokens, side: int, position: str | None) -> Tokens:
    phi: Any = layer.phi
    u, R = _layers(graph, layer, x, side)
    if phi.variant == "softmax":
        parts = [graph.node("Softmax", each, axis=-1) for each in (u.value, graph.node("Neg", u.value))]
        return u.of(graph.node("Concat", *parts, axis=-1), 2 * R)
    if phi.variant == "exp":
        both = graph.node("Concat", u.value, graph.node("Neg", u.value), axis=-1)
        return u.of(graph.node("Exp", both), 2 * R)
    twice = graph.node("Mul", u.value, graph.constant(2.0))
    both = graph.node("Concat", twice, graph.node("Neg", twice), axis=-1)
    return u.of(graph.node("Softmax", both, axis=-1), 2 * R)


def _draws(graph: Graph, layer: Layer, x: Tokens) -> tuple[Tokens, str, int]:
    """u = x times the draws, ‖x‖²/2√K, and the number of draws m."""
    weights = layer.weights[0, 0]
    x = split(graph, x)
    rows = graph.constant(weights[1:].reshape(-1, layer.K).T, hint="draws")
    u = graph.node("MatMul", x.value, rows)
    total = graph.node("ReduceSum", graph.node("Mul", x.value, x.value), graph.ints(-1), keepdims=1)
    return x.of(u), graph.node("Mul", total, graph.constant(0.5 / math.sqrt(layer.K))), int(weights[0])


def favor(graph: Graph, layer: Layer, x: Tokens, side: int, position: str | None) -> Tokens:
    phi: Any = layer.phi
    u, half, m = _draws(graph, layer, x)
    less = graph.node("Add", half, graph.constant(math.log(2 * m if phi.hyperbolic else m) / 2))
    value = u.value
    if phi.hyperbolic:
        value = graph.node("Concat", value, graph.node("Neg", value), axis=-1)
    return u.of(graph.node("Exp", graph.node("Sub", value, less)), layer.F)


def rff(graph: Graph, layer: Layer, x: Tokens, side: int, position: str | None) -> Tokens:
    u, half, m = _draws(graph, layer, x)
    size = graph.node("Exp", graph.node("Sub", half, graph.constant(math.log(m) / 2)))
    waves = graph.node("Concat", graph.node("Cos", u.value), graph.node("Sin", u.value), axis=-1)
    return u.of(graph.node("Mul", waves, size), layer.F)


NODES: dict[str, Callable[[Graph, Layer, Tokens, int, str | None], Tokens]] = {
    "identity": identity,
    "elu": elu,
    "relu": relu,
    "relu2": relu2,
    "polynomial": monomials,
    "taylor": monomials,
    "dpfp": dpfp,
    "cosformer": cosformer,
    "hedgehog": hedgehog,
    "t2r": t2r,
    "elementwise_product": elementwise_product,
    "favor": favor,
    "rff": rff,
}

# φ ≥ 0 in every entry, so the normaliser and every denominator are at least 0
NONNEGATIVE = frozenset({"elu", "relu", "relu2", "dpfp", "hedgehog", "t2r", "favor"})

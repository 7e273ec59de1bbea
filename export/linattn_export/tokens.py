"""Values that hold one vector per token and head: packed [B, T, heads·width] or split [B, T, heads, width]."""

from dataclasses import dataclass, replace

import numpy as np

from linattn_export.graph import Graph


@dataclass(frozen=True)
class Tokens:
    """A value in the graph, with its heads, their width, and whether it is split into them."""

    value: str
    heads: int
    width: int
    split: bool = False

    def of(self, value: str, width: int | None = None) -> "Tokens":
        """Another value of the same layout."""
        return replace(self, value=value, width=self.width if width is None else width)


def split(graph: Graph, x: Tokens) -> Tokens:
    """x as [B, T, heads, width]."""
    if x.split:
        return x
    return Tokens(graph.reshape(x.value, 0, 0, x.heads, x.width), x.heads, x.width, True)


def packed(graph: Graph, x: Tokens) -> Tokens:
    """x as [B, T, heads·width]."""
    if not x.split:
        return x
    return Tokens(graph.reshape(x.value, 0, 0, x.heads * x.width), x.heads, x.width)


def repeated(graph: Graph, x: Tokens, heads: int) -> Tokens:
    """x with each head repeated, so that there are `heads`; split."""
    if heads == x.heads:
        return x
    index = np.repeat(np.arange(x.heads), heads // x.heads)
    value = graph.node("Gather", split(graph, x).value, graph.constant(index, "int64", "heads"), axis=2)
    return Tokens(value, heads, x.width, True)


def unit(graph: Graph, x: Tokens) -> Tokens:
    """x / sqrt(Σx² + 1e-6) of each vector."""
    x = split(graph, x)
    squares = graph.node("Mul", x.value, x.value)
    total = graph.node("ReduceSum", squares, graph.ints(-1), keepdims=1)
    size = graph.node("Sqrt", graph.node("Add", total, graph.constant(1e-6)))
    return x.of(graph.node("Div", x.value, size, hint="unit"))


def with_ones(graph: Graph, v: Tokens) -> Tokens:
    """v with one more column, of ones: what the normaliser z is made of."""
    v = split(graph, v)
    pads = graph.ints(0, 0, 0, 0, 0, 0, 0, 1)
    return v.of(graph.node("Pad", v.value, pads, graph.constant(1.0), hint="v_ones"), v.width + 1)


def normalised(graph: Graph, y: str, width: int, eps: float, eps_mode: str, positive: bool) -> str:
    """y [..., width + 1]: its first columns over the last, which is kept eps away from zero (or has eps added).

    positive: the last is never below 0.
    """
    num, den = graph.several("Split", [y, graph.ints(width, 1)], ["num", "den"], attributes={"axis": -1})
    if eps_mode == "add":
        if eps != 0:
            den = graph.node("Add", den, graph.constant(eps))
    elif positive:
        den = graph.node("Max", den, graph.constant(eps))
    else:
        negative = graph.node("Less", den, graph.constant(0.0))
        below = graph.node("Min", den, graph.constant(-eps))
        above = graph.node("Max", den, graph.constant(eps))
        den = graph.node("Where", negative, below, above)
    return graph.node("Div", num, den)

"""Constant matrices over the pairs of a block's tokens, cut to the block where its length is open."""

import numpy as np

from linattn_export.graph import Array, Graph

BLOCK = 128  # tokens of a block, at most; a longer one does not fit these matrices, and the runtime says so


def square(graph: Graph, name: str, whole: Array) -> str:
    """The first T rows and columns of a constant matrix, float32."""

    def make() -> str:
        constant = graph.constant(whole, hint=name)
        if graph.tokens is not None:
            return constant
        count = graph.token_count()
        ends = graph.once("T, T", lambda: graph.node("Concat", count, count, axis=0))
        return graph.node("Slice", constant, graph.ints(0, 0), ends, graph.ints(0, 1), hint=name)

    return graph.once(name, make)


def _side(graph: Graph) -> int:
    return BLOCK if graph.tokens is None else graph.tokens


def lower(graph: Graph) -> str:
    """[T, T]: 1 from the diagonal downwards."""
    return square(graph, "lower", np.tri(_side(graph)))


def strict(graph: Graph) -> str:
    """[T, T]: 1 below the diagonal."""
    return square(graph, "strict", np.tri(_side(graph), k=-1))


def above(graph: Graph) -> str:
    """[T, T]: 1 above the diagonal."""
    return square(graph, "above", 1 - np.tri(_side(graph)))

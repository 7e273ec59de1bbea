"""What every flavor is given: queries, keys and values after φ, the gates, and the state."""

from dataclasses import dataclass

import numpy as np

from linattn_edge.layer import Layer
from linattn_export.graph import Graph
from linattn_export.maps import NONNEGATIVE
from linattn_export.tokens import Tokens, normalised


@dataclass(frozen=True)
class Parts:
    """q [B, T, H, F], k [B, T, Hk, F], v [B, T, N, W], g [B, T, N·C] or None, beta [B, T, N] or None, and the past
    state [B, N, F, W], W being V or, with the ones column of a normalised layer, V + 1."""

    layer: Layer
    q: Tokens
    k: Tokens
    v: Tokens
    g: str | None
    beta: str | None
    past: str
    channels: int  # C: 1, or F where each channel has a decay

    @property
    def W(self) -> int:
        """Columns of the state."""
        return self.v.width


def decay(graph: Graph, parts: Parts) -> str | None:
    """g packed [B, T, N·C]: the input, or the layer's constant at every token; None for a rule without one."""
    constant = parts.layer.decay
    if constant is None:
        return parts.g
    row = constant.reshape(1, 1, -1)
    if graph.batch_size is not None and graph.tokens is not None:
        return graph.constant(np.tile(row, (graph.batch_size, graph.tokens, 1)), hint="constant_decay")

    def expand() -> str:
        shape = graph.node("Concat", graph.lead(), graph.ints(1), axis=0)
        return graph.node("Expand", graph.constant(row, hint="constant_decay"), shape)

    return graph.once(("decay", row.tobytes(), row.shape), expand)


def finished(graph: Graph, layer: Layer, y: str) -> str:
    """y [..., W] divided by its last column where the layer normalises: [..., V]."""
    if not layer.normalize:
        return y
    return normalised(graph, y, layer.V, layer.eps, layer.eps_mode, layer.phi.name in NONNEGATIVE)

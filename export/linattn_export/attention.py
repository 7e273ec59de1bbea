"""One layer's attention inside a graph, in any flavor: what `export_layer` and `export_model` share."""

from collections.abc import Callable

from linattn_edge.layer import Layer
from linattn_export import fused, portable, standard
from linattn_export.graph import Graph
from linattn_export.maps import KEY, QUERY, features
from linattn_export.recurrence import Parts
from linattn_export.tokens import Tokens, packed, unit, with_ones

FLAVORS: dict[str, Callable[[Graph, Parts], tuple[Tokens, str]]] = {
    "fused": fused.attend,
    "standard": standard.attend,
    "portable": portable.attend,
}


def attention(
    graph: Graph,
    layer: Layer,
    q: str,
    k: str,
    v: str,
    g: str | None,
    beta: str | None,
    past: str,
    position: str | None = None,
    channels: int = 1,
) -> tuple[str, str]:
    """Add the nodes of one layer; gives the names of its output and of its present state.

    All float32: q [B, T, H·K], k [B, T, Hk·K], v [B, T, N·V], g [B, T, N·C] with C = channels, 1 or F (None where the
    rule takes none or the layer has a constant one), beta [B, T, N], past [B, N, F, V], or [B, N, F, V + 1] where the
    layer normalises. position: int64 [B, T] (`positions`), for maps that read it. The output is [B, T, heads·V].
    """
    queries, keys = Tokens(q, layer.H, layer.K), Tokens(k, layer.HK, layer.K)
    values = Tokens(v, layer.N, layer.V)
    if layer.qk_norm:
        queries, keys = unit(graph, queries), unit(graph, keys)
    queries = features(graph, layer, queries, QUERY, position)
    keys = features(graph, layer, keys, KEY, position)
    if layer.normalize:
        values = with_ones(graph, values)
    if layer.decay is not None:
        channels = layer.decay.shape[1]
    parts = Parts(layer, queries, keys, values, g, beta, past, channels)
    y, present = FLAVORS[graph.flavor](graph, parts)
    return packed(graph, y).value, present


def positions(graph: Graph, past_position: str) -> tuple[str, str]:
    """The position of each token, int64 [B, T], and the present position [B], from the past one [B]."""
    count = graph.token_count()
    present = graph.node("Add", past_position, count, hint="position_after")
    first = graph.node("Unsqueeze", past_position, graph.ints(1), hint="position")
    if graph.tokens == 1:
        return first, present
    last = graph.node("Squeeze", count, graph.ints(0))
    zero, one = graph.constant(0, "int64"), graph.constant(1, "int64")
    return graph.node("Add", first, graph.node("Range", zero, last, one), hint="position"), present

"""The `standard` flavor: the ONNX standard's own LinearAttention, from opset 27 on."""

from dataclasses import replace

from linattn_export.fused import call
from linattn_export.graph import Graph
from linattn_export.recurrence import Parts
from linattn_export.tokens import Tokens, repeated


def attend(graph: Graph, parts: Parts) -> tuple[Tokens, str]:
    """The node: its output and the present state. It has no query and key heads that several states share: they are
    repeated."""
    N = parts.layer.N
    q = repeated(graph, parts.q, N) if parts.q.heads < N else parts.q
    return call(graph, replace(parts, q=q, k=repeated(graph, parts.k, N)), "")

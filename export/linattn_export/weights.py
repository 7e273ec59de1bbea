"""Matrices of a model in a graph, as the model keeps them: float32, float16, or int8 with a scale for each row."""

import numpy as np

from linattn_edge.kernels import program
from linattn_edge.models.assembly import Matrix
from linattn_export.graph import Array, Graph

GROUP = 32  # numbers of activations, and of a row, that share a scale in MatMulNBits


def rows(graph: Graph, matrix: Matrix, N: int, ids: str) -> str:
    """The rows of a matrix [N, M] that `ids` [B, T] name: float32 [B, T, M]."""
    table = graph.constant(matrix.rows(N), str(matrix.rows(N).dtype), "embedding")
    x = graph.node("Gather", table, ids, hint="embedded")
    if matrix.kind == program.FLOAT32:
        return x
    x = graph.node("Cast", x, to=graph.onnx.TensorProto.FLOAT)
    if matrix.scales is None:
        return x
    scales = graph.constant(matrix.scales[:N, None], hint="embedding_scales")
    return graph.node("Mul", x, graph.node("Gather", scales, ids, hint="scale"))


def product(graph: Graph, matrix: Matrix, x: str, N: int, bias: Array | None) -> str:
    """W x of x [B, T, M], plus the bias: float32 [B, T, N]."""
    numbers = matrix.rows(N)
    if matrix.kind == program.INT8 and graph.flavor == "fused":
        y = _grouped(graph, matrix, x, N)
    else:
        w = graph.constant(numbers.T, str(numbers.dtype), "weight")
        if matrix.kind != program.FLOAT32:
            stored = w
            w = graph.once(("float", stored), lambda: graph.node("Cast", stored, to=graph.onnx.TensorProto.FLOAT))
        y = graph.node("MatMul", x, w, hint="product")
        if matrix.scales is not None:  # not DequantizeLinear: ONNX Runtime would round the activations too
            y = graph.node("Mul", y, graph.constant(matrix.scales[:N], hint="scales"))
    return y if bias is None else graph.node("Add", y, graph.constant(bias[:N], hint="bias"))


def _grouped(graph: Graph, matrix: Matrix, x: str, N: int) -> str:
    """com.microsoft::MatMulNBits: int8 as it is kept, activations rounded to int8 in groups. Exact ones take 5 times as
    long there."""
    numbers, scales = matrix.rows(N), matrix.scales
    assert scales is not None
    M = numbers.shape[1]
    groups = -(-M // GROUP)
    stored = np.full((N, groups * GROUP), 128, np.uint8)
    stored[:, :M] = (numbers.astype(np.int16) + 128).astype(np.uint8)
    graph.domains["com.microsoft"] = 1
    y = graph.node(
        "MatMulNBits",
        x,
        graph.constant(stored.reshape(N, groups, GROUP), "uint8", "weight"),
        graph.constant(np.repeat(scales[:N, None], groups, axis=1).ravel(), hint="scales"),
        domain="com.microsoft",
        hint="product",
        K=M,
        N=N,
        bits=8,
        block_size=GROUP,
        accuracy_level=4,
    )
    graph.describe(y, "float32", ["B", "T", N])
    return y

"""One layer as an ONNX file: its inputs, outputs and state around `attention`."""

from typing import Any

from linattn_edge.arrays import whole
from linattn_edge.layer import Layer
from linattn_export.attention import FLAVORS, attention, positions
from linattn_export.contract import Carried, Contract, Tensor
from linattn_export.graph import Graph, need
from linattn_export.maps import check_map
from linattn_export.masks import BLOCK

OPSETS = {"fused": 17, "standard": 27, "portable": 17}  # the lowest, and the default
POSITION = Carried("past_position", "present_position", "int64", ("B",), 0, "B", "position")


def layer_graph(
    layer: Layer,
    flavor: str = "fused",
    opset: int | None = None,
    dtype: str = "float32",
    decay: str = "head",
    batch_size: int | None = None,
    tokens: int | None = None,
) -> tuple[Graph, Contract]:
    """The graph and the contract of `export_layer`."""
    opset = check_opset(flavor, opset)
    _choice("dtype", dtype, ("float32", "float16"))
    _choice("decay", decay, ("head", "channel"))
    check_map(layer)
    if batch_size is not None:
        batch_size = whole("batch_size", batch_size, 1)
    if tokens is not None:
        tokens = whole("tokens", tokens, 1, BLOCK if flavor == "portable" else 2**62)
    if tokens is not None and layer.phi.horizon is not None and tokens > layer.phi.horizon:
        raise ValueError(f"tokens: {layer.phi.name} has no φ beyond position {layer.phi.horizon}, got {tokens} tokens")
    graph = Graph(flavor, opset, batch_size, tokens)
    N, W = layer.N, layer.V + layer.normalize
    inputs = [
        Tensor("query", dtype, ("B", "T", layer.H * layer.K), f"B, T, {layer.H} heads x {layer.K}"),
        Tensor("key", dtype, ("B", "T", layer.HK * layer.K), f"B, T, {layer.HK} heads x {layer.K}"),
        Tensor("value", dtype, ("B", "T", N * layer.V), f"B, T, {N} heads x {layer.V}"),
    ]
    channels = layer.F if decay == "channel" else 1
    if layer.rule.decay and layer.decay is None:
        what = f"B, T, {N} heads" + (f" x {layer.F}" if decay == "channel" else "")
        inputs.append(Tensor("decay", dtype, ("B", "T", N * channels), what + " (natural log, at most 0)"))
    if layer.rule.beta:
        inputs.append(Tensor("beta", dtype, ("B", "T", N), f"B, T, {N} heads"))
    layout = "B, head, feature, value" + (": the last column is the normaliser z" if layer.normalize else "")
    states = [Carried("past_state", "present_state", "float32", ("B", N, layer.F, W), 0.0, layout, layer=0)]
    if layer.phi.horizon is not None:
        states.append(POSITION)
    outputs = [Tensor("output", dtype, ("B", "T", layer.outputs * layer.V), f"B, T, {layer.outputs} heads x {layer.V}")]
    given = {t.name: real(graph, graph.input(t.name, t.dtype, t.shape), t.dtype) for t in inputs}
    for state in states:
        graph.input(state.past, state.dtype, state.shape)
    place = after = None
    if layer.phi.horizon is not None:
        place, after = positions(graph, POSITION.past)
    y, present = attention(
        graph,
        layer,
        given["query"],
        given["key"],
        given["value"],
        given.get("decay"),
        given.get("beta"),
        "past_state",
        place,
        channels,
    )
    if dtype == "float16":
        y = graph.node("Cast", y, to=graph.onnx.TensorProto.FLOAT16)
    graph.output("output", y, dtype, outputs[0].shape)
    if after is not None:
        graph.output(POSITION.present, after, "int64", POSITION.shape)
    graph.output("present_state", present, "float32", states[0].shape)
    contract = Contract(
        "layer",
        flavor,
        opset,
        tuple(inputs),
        tuple(outputs),
        tuple(states),
        (layer.config(),),
        batch_size,
        tokens,
        BLOCK if flavor == "portable" and tokens is None else tokens,
        layer.phi.horizon,
    )
    return graph, contract


def real(graph: Graph, value: str, dtype: str) -> str:
    """A value of that dtype as float32."""
    return value if dtype == "float32" else graph.node("Cast", value, to=graph.onnx.TensorProto.FLOAT)


def check_opset(flavor: str, opset: int | None) -> int:
    """The opset to write, refused where the flavor or the installed onnx does not have it."""
    _choice("flavor", flavor, tuple(FLAVORS))
    least, most = OPSETS[flavor], need("onnx").defs.onnx_opset_version()
    if least > most:
        raise ValueError(f"flavor: {flavor!r} needs opset {least}; the installed onnx knows up to {most}")
    return least if opset is None else whole("opset", opset, least, most)


def _choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}: expected one of {', '.join(allowed)}; got {value!r}")

"""A whole model as an ONNX file: each operation of its listing becomes nodes. To add one, list it in `NODES`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from linattn_edge.arrays import whole
from linattn_edge.kernels import program
from linattn_edge.layer import Layer, make_layer
from linattn_edge.models import Model
from linattn_export import weights
from linattn_export.attention import attention
from linattn_export.contract import Carried, Contract, Tensor
from linattn_export.graph import Graph
from linattn_export.layer import check_opset
from linattn_export.maps import KEY, QUERY, check_map, features
from linattn_export.masks import BLOCK
from linattn_export.tokens import Tokens

NAMES = {  # past and present of what layer i keeps
    "genai": {
        "recurrent": ("past_key_values.{}.recurrent_state", "present.{}.recurrent_state"),
        "conv": ("past_key_values.{}.conv_state", "present.{}.conv_state"),
    },
    "transformers.js": {
        "recurrent": ("past_recurrent.{}", "present_recurrent.{}"),
        "conv": ("past_conv.{}", "present_conv.{}"),
    },
}


@dataclass
class Build:
    """A model's graph in the making. values: the value that each buffer of the model holds, by where it begins."""

    graph: Graph
    ids: str
    states: dict[tuple[str, int], Carried]
    convolutions: list[list[tuple[int, int]]]
    values: dict[int, str] = field(default_factory=dict)
    present: dict[tuple[str, int], str] = field(default_factory=dict)
    pasts: dict[int, list[str]] = field(default_factory=dict)  # of each layer's convolutions
    kept: dict[int, list[str]] = field(default_factory=dict)

    def heads(self, value: str, heads: int, width: int, make: Callable[[str], str]) -> str:
        """What `make` makes of [B, T, heads, width], packed again."""
        if heads == 1:
            return make(value)
        return self.graph.reshape(make(self.graph.reshape(value, 0, 0, heads, width)), 0, 0, heads * width)


Operands = Mapping[str, Any]


def embed(build: Build, of: Any, o: Operands) -> None:
    build.values[o["OUT"]] = weights.rows(build.graph, of, o["N"], build.ids)


def norm(build: Build, of: Any, o: Operands) -> None:
    graph = build.graph

    def make(x: str) -> str:  # a pattern that ONNX Runtime makes one kernel of
        squares = graph.node("Pow", x, graph.constant(2.0))
        if graph.opset < 18:
            mean = graph.node("ReduceMean", squares, axes=[-1], keepdims=1)
        else:
            mean = graph.node("ReduceMean", squares, graph.ints(-1), keepdims=1)
        y = graph.node("Div", x, graph.node("Sqrt", graph.node("Add", mean, graph.constant(o["REAL"]))), hint="normed")
        return y if o["WEIGHT"] is None else graph.node("Mul", y, graph.constant(o["WEIGHT"], hint="norm"))

    build.values[o["OUT"]] = build.heads(build.values[o["A"]], o["N"], o["M"], make)


def matmul(build: Build, of: Any, o: Operands) -> None:
    build.values[o["OUT"]] = weights.product(build.graph, of, build.values[o["A"]], o["N"], o["EXTRA"])


def add_matmul(build: Build, of: Any, o: Operands) -> None:
    y = weights.product(build.graph, of, build.values[o["A"]], o["N"], o["EXTRA"])
    build.values[o["OUT"]] = build.graph.node("Add", build.values[o["OUT"]], y, hint="residual")


def activation(graph: Graph, kind: int, x: str) -> str:
    """The activation that program.py names by a number."""
    if kind == program.RELU:
        return graph.node("Relu", x)
    if kind == program.RELU2:
        r = graph.node("Relu", x)
        return graph.node("Mul", r, r)
    if kind == program.SIGMOID:
        return graph.node("Sigmoid", x)
    if kind == program.LOG_SIGMOID:
        return graph.node("Neg", graph.node("Softplus", graph.node("Neg", x)), hint="log_sigmoid")
    y = x
    if kind == program.GELU:  # the tanh form: x · σ(2 √(2/π) (x + 0.044715 x³))
        cubic = graph.node("Mul", graph.node("Mul", x, x), graph.constant(0.044715))
        y = graph.node("Mul", x, graph.node("Add", cubic, graph.constant(1.0)))
        y = graph.node("Mul", y, graph.constant(np.sqrt(8 / np.pi)))
    return graph.node("Mul", x, graph.node("Sigmoid", y), hint="activated")


def act(build: Build, of: Any, o: Operands) -> None:
    build.values[o["A"]] = activation(build.graph, o["EXTRA"], build.values[o["A"]])


def act_multiply(build: Build, of: Any, o: Operands) -> None:
    act(build, of, o)
    build.values[o["OUT"]] = build.graph.node("Mul", build.values[o["A"]], build.values[o["B"]], hint="gated")


def log_decay(build: Build, of: Any, o: Operands) -> None:
    graph = build.graph
    normalizer, lowest = (float(x) for x in o["WEIGHT"])
    g = activation(graph, program.LOG_SIGMOID, build.values[o["A"]])
    g = graph.node("Div", g, graph.constant(normalizer), hint="decay")
    build.values[o["OUT"]] = g if lowest == -np.inf else graph.node("Max", g, graph.constant(lowest), hint="decay")


def conv(build: Build, of: Any, o: Operands) -> None:
    """silu of a causal convolution of each channel; the past tokens of a layer's convolutions are one state."""
    graph, layer, M = build.graph, o["STATE"], o["M"]
    x = graph.node("Transpose", build.values[o["A"]], perm=[0, 2, 1])
    if M > 1:
        past = build.pasts[layer][o["KIND"]]
        x = graph.node("Concat", past, x, axis=2, hint="conv_input")
        ends = graph.ints(1 - M), graph.ints(2**62), graph.ints(2)
        build.kept[layer].append(graph.node("Slice", x, *ends, hint="conv_kept"))
    weight = graph.constant(o["WEIGHT"], hint="conv_weight")
    bias = None if o["EXTRA"] is None else graph.constant(o["EXTRA"], hint="bias")
    y = graph.node("Conv", x, weight, bias, group=o["N"], kernel_shape=[M])
    y = graph.node("Transpose", activation(graph, program.SILU, y), perm=[0, 2, 1])
    build.values[o["OUT"]] = y
    if M > 1 and o["KIND"] == len(build.convolutions[layer]) - 1:
        build.present["conv", layer] = graph.node("Concat", *build.kept[layer], axis=1, hint="conv_state")


def attend(build: Build, of: Layer, o: Operands) -> None:
    layer = o["STATE"]
    q, k, v = (build.values[o[name]] for name in ("A", "B", "EXTRA"))
    g = build.values[o["KIND"]] if o["N"] else None
    past = build.states["recurrent", layer].past
    y, present = attention(build.graph, of, q, k, v, g, None, past, None, o["N"] or 1)
    build.values[o["OUT"]] = y
    build.present["recurrent", layer] = present


def phi(build: Build, of: Any, o: Operands) -> None:
    phi_, side = of
    layer = make_layer(o["N"], o["M"], o["M"], feature_map_=phi_, update_rule="linear", normalize=False)
    check_map(layer)
    x = Tokens(build.values[o["A"]], o["N"], o["M"])
    y = features(build.graph, layer, x, QUERY if side else KEY, None)
    build.values[o["OUT"]] = build.graph.reshape(y.value, 0, 0, o["N"] * y.width) if y.split else y.value


def sum_norm(build: Build, of: Any, o: Operands) -> None:
    graph = build.graph

    def make(x: str) -> str:
        total = graph.node("ReduceSum", x, graph.ints(-1), keepdims=1)
        return graph.node("Div", x, graph.node("Add", total, graph.constant(o["REAL"])))

    build.values[o["OUT"]] = build.heads(build.values[o["A"]], o["N"], o["M"], make)


NODES: dict[int, Callable[[Build, Any, Operands], None]] = {
    program.EMBED: embed,
    program.NORM: norm,
    program.MATMUL: matmul,
    program.ADD_MATMUL: add_matmul,
    program.ACT_MULTIPLY: act_multiply,
    program.ACT: act,
    program.LOG_DECAY: log_decay,
    program.CONV: conv,
    program.ATTENTION: attend,
    program.PHI: phi,
    program.SUM_NORM: sum_norm,
}


def model_graph(
    model: Model,
    flavor: str = "fused",
    opset: int | None = None,
    names: str = "genai",
    batch_size: int | None = None,
    tokens: int | None = None,
) -> tuple[Graph, Contract]:
    """The graph and the contract of `export_model`."""
    opset = check_opset(flavor, opset)
    if not isinstance(names, str) or names not in NAMES:
        raise ValueError(f"names: expected one of {', '.join(NAMES)}; got {names!r}")
    if batch_size is not None:
        batch_size = whole("batch_size", batch_size, 1)
    if tokens is not None:
        tokens = whole("tokens", tokens, 1, BLOCK if flavor == "portable" else 2**62)
    graph = Graph(flavor, opset, batch_size, tokens)
    given = Tensor("input_ids", "int64", ("B", "T"), f"B, T: ids from 0 to {model.vocab_size - 1}")
    out = Tensor("logits", "float32", ("B", "T", model.vocab_size), "B, T, vocabulary")
    graph.input(given.name, given.dtype, given.shape)
    states = carried(model, names)
    for state in states.values():
        graph.input(state.past, state.dtype, state.shape)
    build = Build(graph, given.name, states, model.convolutions)
    for layer, each in enumerate(model.convolutions):
        channels = [c for c, kept in each if kept]
        build.kept[layer] = []
        if channels:
            past = states["conv", layer].past
            build.pasts[layer] = graph.several(
                "Split", [past, graph.ints(*channels)], ["conv_past"] * len(channels), attributes={"axis": 1}
            )
    for operation in model.listing:
        NODES[operation.code](build, operation.of, operation.operands)
    graph.output(out.name, build.values[model.listing[-1].operands["OUT"]], out.dtype, out.shape)
    for place, state in states.items():  # what overwrites the past comes last
        graph.output(state.present, build.present[place], state.dtype, state.shape)
    contract = Contract(
        "model",
        flavor,
        opset,
        (given,),
        (out,),
        tuple(states.values()),
        tuple(layer.config() for layer in model.layers),
        batch_size,
        tokens,
        BLOCK if flavor == "portable" and tokens is None else tokens,
        more={"vocab_size": model.vocab_size, "eos": list(model.eos), "weights": model.weights, "names": names},
    )
    return graph, contract


def carried(model: Model, names: str) -> dict[tuple[str, int], Carried]:
    """The state tensors of a model: of each layer what it remembers, and the past tokens of its convolutions."""
    found = {}
    for i, layer in enumerate(model.layers):
        past, present = (name.format(i) for name in NAMES[names]["recurrent"])
        layout = "B, head, feature, value" + (": the last column is the normaliser z" if layer.normalize else "")
        shape = ("B", layer.N, layer.F, layer.V + layer.normalize)
        found["recurrent", i] = Carried(past, present, "float32", shape, 0.0, layout, layer=i)
        channels = sum(c for c, kept in model.convolutions[i] if kept)
        if channels:
            past, present = (name.format(i) for name in NAMES[names]["conv"])
            kept = model.convolutions[i][0][1]
            layout = "B, channels of q, k and v, tokens: the oldest first"
            found["conv", i] = Carried(past, present, "float32", ("B", channels, kept), 0.0, layout, "conv", i)
    return found

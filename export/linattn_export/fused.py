"""The `fused` flavor: com.microsoft::LinearAttention, and a local function of the same name for other runtimes.

ONNX Runtime from 1.25 on has a float32 CPU kernel for the operator and takes it; a runtime that does not know the
operator finds the function in the file and inlines it. Its body is the recurrence itself, token by token in a Scan, so
that it holds for any number of tokens.
"""

from typing import Any

from linattn_export.graph import Graph
from linattn_export.recurrence import Parts, decay, finished
from linattn_export.tokens import Tokens, packed, split

DOMAIN = "com.microsoft"
ATTRIBUTES = ("q_num_heads", "kv_num_heads", "update_rule", "scale")
INPUTS = ("query", "key", "value", "past_state", "decay", "beta")


def attend(graph: Graph, parts: Parts) -> tuple[Tokens, str]:
    """The node: its output and the present state."""
    graph.domains[DOMAIN] = 1
    _declare(graph, parts.layer.rule.name)
    return call(graph, parts, DOMAIN)


def call(graph: Graph, parts: Parts, domain: str) -> tuple[Tokens, str]:
    """A LinearAttention node, of either domain, and the division where the layer normalises."""
    layer = parts.layer
    heads = max(parts.q.heads, layer.N)
    inputs = [packed(graph, x).value for x in (parts.q, parts.k, parts.v)]
    y, present = graph.several(
        "LinearAttention",
        [*inputs, parts.past, decay(graph, parts), parts.beta],
        ["attention", "state"],
        domain,
        {
            "q_num_heads": parts.q.heads,
            "kv_num_heads": layer.N,
            "update_rule": layer.rule.name,
            "scale": layer.scale,
        },
    )
    graph.describe(y, "float32", ["B", "T", heads * parts.W])
    output = Tokens(y, heads, parts.W)
    if layer.normalize:
        output = Tokens(finished(graph, layer, split(graph, output).value), heads, layer.V, True)
    return output, present


def _declare(graph: Graph, rule: str) -> None:
    key = DOMAIN, "LinearAttention"
    if key not in graph.functions:
        graph.functions[key] = _function(graph, rule)
    elif f"update rule {rule!r}" not in graph.functions[key].doc_string:
        raise ValueError(
            f"update_rule: a file of flavor 'fused' holds layers of one rule; {rule!r} is another: use 'portable' or "
            "'standard'"
        )


def _function(graph: Graph, rule: str) -> Any:
    """The operator for one rule, its sizes taken from the shapes of its inputs."""
    helper = graph.onnx.helper
    body = Graph("fused", graph.opset)
    gated, delta = "gated" in rule, "delta" in rule
    taken = INPUTS[: 6 if delta else 5 if gated else 4]  # some runtimes want as many as the node has
    for name in (*INPUTS, "output", "present_state"):
        body.name(name)

    def size(value: str, axis: int) -> str:
        return body.node("Shape", value, start=axis, end=axis + 1)

    def number(value: int) -> str:
        return body.once(value, lambda: body.node("Constant", value_ints=[value], hint="number"))

    def shape(*sizes: str) -> str:
        return body.node("Concat", *sizes, axis=0)

    def heads(value: str, count: str, copies: str) -> str:
        """[B, T, count·F] as [B, T, count·copies, F], each head `copies` times in a row."""
        rows = body.node("Reshape", value, shape(number(0), number(0), count, one, F))
        rows = body.node("Expand", rows, shape(one, one, one, copies, one))
        return body.node("Reshape", rows, shape(number(0), number(0), body.node("Mul", count, copies), F))

    one = number(1)
    N, F = size("past_state", 1), size("past_state", 2)
    H, HK = (body.node("Div", size(name, 2), F) for name in ("query", "key"))
    outputs = body.node("Max", H, N)
    q = heads("query", H, body.node("Div", outputs, H))
    q = body.node("Reshape", q, shape(number(0), number(0), N, body.node("Div", outputs, N), F))
    k = heads("key", HK, body.node("Div", N, HK))
    W = size("past_state", 3)
    v = body.node("Reshape", "value", shape(number(0), number(0), N, one, W))
    scanned = [q, body.node("Unsqueeze", k, number(4)), v]
    if delta:
        scanned.append(body.node("Unsqueeze", k, number(3)))
        scanned.append(body.node("Reshape", "beta", shape(number(0), number(0), N, one, one)))
    if gated:
        channels = body.node("Div", size("decay", 2), N)
        g = body.node("Reshape", "decay", shape(number(0), number(0), N, channels, one))
        scanned.append(body.node("Exp", g))
    first = [1, 0, 2, 3, 4]  # a Scan along any other axis than the first is not taken everywhere
    scanned = [body.node("Transpose", x, perm=first) for x in scanned]
    state, rows = body.several(
        "Scan",
        ["past_state", *scanned],
        ["state", "rows"],
        attributes={
            "body": _step(body, gated, delta),
            "num_scan_inputs": len(scanned),
        },
    )
    proto = graph.onnx.AttributeProto
    scale = body.node("Constant", hint="scale_value")
    body.nodes[-1].attribute.append(proto(name="value_float", type=proto.FLOAT, ref_attr_name="scale"))
    scaled = body.node("Mul", body.node("Transpose", rows, perm=first), scale)
    width = body.node("Mul", outputs, W)
    last = helper.make_node("Reshape", [scaled, shape(number(0), number(0), width)], ["output"])
    body.nodes += [last, helper.make_node("Identity", [state], ["present_state"])]
    function = helper.make_function(
        DOMAIN,
        "LinearAttention",
        list(taken),
        ["output", "present_state"],
        body.nodes,
        [helper.make_opsetid("", graph.opset)],
        attributes=list(ATTRIBUTES),
    )
    function.doc_string = f"Linear attention with update rule {rule!r}, token by token"
    return function


def _step(graph: Graph, gated: bool, delta: bool) -> Any:
    """One token: S [B, N, F, W], q [B, N, r, F], k [B, N, F, 1], v [B, N, 1, W], k as a row, β and Λ as columns."""
    helper = graph.onnx.helper
    step = graph.inner()
    names = ["S", "q", "k", "v", *(("k_row", "beta") if delta else ()), *(("decay",) if gated else ())]
    S, q, k, v = (f"token_{n}" for n in names[:4])
    real = graph.onnx.TensorProto.FLOAT
    inputs = [helper.make_tensor_value_info(step.name(f"token_{n}"), real, [None] * 4) for n in names]
    if gated:
        S = step.node("Mul", S, "token_decay")
    if delta:
        known = step.node("MatMul", "token_k_row", S)
        v = step.node("Mul", step.node("Sub", v, known), "token_beta")
    state = step.node("Add", S, step.node("Mul", k, v), hint="token_state")
    row = step.node("MatMul", q, state, hint="token_row")
    outputs = [helper.make_tensor_value_info(n, real, [None] * 4) for n in (state, row)]
    return helper.make_graph(step.nodes, "token", inputs, outputs)

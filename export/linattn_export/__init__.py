"""Write a linear-attention layer or model as an ONNX graph, with the state as explicit inputs and outputs.

    import linattn_export as lx

    lx.export_layer(attn, "layer.onnx")
    feeds = lx.state_feeds(state, "layer.onnx")                     # a stream goes on in ONNX Runtime ...
    state = lx.state_from_outputs(outputs, attn, "layer.onnx")      # ... and comes back
    print(lx.verify("layer.onnx", attn))

A file says in its metadata how it is driven: `read_contract`.
"""

from collections.abc import Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal

from linattn_edge.state import layer_of
from linattn_export.contract import Contract, read_contract
from linattn_export.handover import state_feeds, state_from_outputs

__all__ = [
    "Contract",
    "export_layer",
    "export_model",
    "read_contract",
    "state_feeds",
    "state_from_outputs",
    "verify",
]

if TYPE_CHECKING:
    from linattn_export.parity import Report

Path = str | PathLike[str]
Flavor = Literal["fused", "standard", "portable"]


def export_layer(
    attn: Any,
    path: Path,
    flavor: Flavor = "fused",
    opset: int | None = None,
    *,
    dtype: Literal["float32", "float16"] = "float32",
    decay: Literal["head", "channel"] = "head",
    batch_size: int | None = None,
    tokens: int | None = None,
) -> Contract:
    """Write a layer to `path` as an ONNX graph with its state as inputs and outputs; gives the file's contract.

    Inputs: query [B, T, H·K], key [B, T, Hk·K], value [B, T, N·V] and, as the rule has them, decay (natural log, at
    most 0; [B, T, N] or [B, T, N·F]) and beta [B, T, N]; past_state float32 [B, N, F, V], or [B, N, F, V + 1] with z as
    the last column where the layer normalises; past_position int64 [B] for maps that read positions. Outputs: output
    [B, T, heads·V], present_state and present_position. The file is replaced as a whole or not at all.

    Args:
        attn: the LinearAttention.
        path: the file.
        flavor: "fused" for ONNX Runtime, "standard" for the ONNX operator, "portable" for primitive operators.
        opset: 17 for "fused" and "portable", 27 for "standard", unless a newer one is asked for.
        dtype: of query, key, value, decay, beta and output. All is computed in float32, in either case.
        decay: "head" or "channel", the shape of the decay input where there is one.
        batch_size, tokens: fix B and T, for accelerators that want static shapes. "portable" with tokens=1 is the
            plain recurrence, which its other files are 2 to 3 times slower at; those take blocks of up to 128 tokens.

    Raises ValueError where something is not supported, naming it; TypeError where `attn` is not a layer; ImportError
    where onnx is not installed.
    """
    from linattn_export import files, layer

    graph, contract = layer.layer_graph(layer_of(attn), flavor, opset, dtype, decay, batch_size, tokens)
    files.write(graph.model("linattn_edge_layer", contract.metadata()), path)
    return contract


def export_model(
    model: Any,
    path: Path,
    flavor: Flavor = "fused",
    opset: int | None = None,
    names: Literal["genai", "transformers.js"] = "genai",
    *,
    batch_size: int | None = None,
    tokens: int | None = None,
) -> Contract:
    """Write a model to `path` as one ONNX graph with the states of all layers; gives the file's contract.

    Inputs: input_ids int64 [B, T], and of each layer i its past state float32 [B, N, F, V] (V + 1 with z as the last
    column) and, where it has short convolutions, their past tokens [B, channels, kernel - 1]. Outputs: logits float32
    [B, T, vocab], and the present states. Matrices are written as the model keeps them (`load_model(weights=...)`):
    float32, float16, or int8 with a scale for each row; "fused" multiplies int8 by MatMulNBits, which rounds the
    activations to int8 too, the other flavors by float32. The file is replaced as a whole or not at all. Where weights
    have 2 GB or more, they go to a second file, named after the first one and its content.

    Args:
        model: what `load_model` gives.
        names: of the states: "genai" for past_key_values.{i}.recurrent_state and present.{i}.recurrent_state (and
            conv_state), "transformers.js" for past_recurrent.{i} and present_recurrent.{i} (and past_conv.{i}).
        path, flavor, opset, batch_size, tokens: as for `export_layer`.

    Raises ValueError where something is not supported, naming it; TypeError where `model` is not a model; ImportError
    where onnx is not installed.
    """
    from linattn_edge.models import Model
    from linattn_export import files
    from linattn_export.model import model_graph

    if not isinstance(model, Model):
        raise TypeError(f"model: expected a Model (linattn_edge.load_model), got {type(model).__name__}")
    graph, contract = model_graph(model, flavor, opset, names, batch_size, tokens)
    files.write(graph.model("linattn_edge_model", contract.metadata()), path)
    return contract


def verify(path: Path, attn_or_model: Any, runtimes: Sequence[str] = ("onnxruntime",)) -> "Report":
    """Run the graph in `path` token by token, in blocks and mixed, and compare it with the Python runtime.

    runtimes: of "onnxruntime", "onnx-reference", "openvino" and "tract". Gives a report, which prints as a table.

    Raises ParityError, which has the report, where a figure is beyond its bound; ImportError, which says what to
    install, where a runtime is missing; StateMismatchError where the file is of another layer.
    """
    from linattn_export import parity

    return parity.verify(path, attn_or_model, runtimes)

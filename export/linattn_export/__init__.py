"""Write a linear-attention layer or model as an ONNX graph, with the state as explicit inputs and outputs.

The exporter is not in this version. The functions below have their final names and arguments, and raise
`NotImplementedError`.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, NoReturn

__all__ = ["export_layer", "export_model", "state_feeds", "state_from_outputs", "verify"]

Path = str | PathLike[str]
Flavor = Literal["fused", "standard", "portable"]


def export_layer(attn: Any, path: Path, flavor: Flavor = "fused", opset: int | None = None) -> None:
    """Write the layer `attn` to `path` as an ONNX graph."""
    _missing("export_layer")


def export_model(
    model: Any,
    path: Path,
    flavor: Flavor = "fused",
    opset: int | None = None,
    names: Literal["genai", "transformers.js"] = "genai",
) -> None:
    """Write `model` to `path` as an ONNX graph; `names` says how its state tensors are called."""
    _missing("export_model")


def verify(path: Path, attn_or_model: Any, runtimes: Sequence[str] = ("onnxruntime",)) -> Any:
    """Run the graph token by token and in blocks against the Python runtime; raise where they differ."""
    _missing("verify")


def state_feeds(state: Any, path: Path) -> dict[str, Any]:
    """The graph's past-state inputs, by name, that hold `state`."""
    _missing("state_feeds")


def state_from_outputs(outputs: Mapping[str, Any], attn_or_model: Any, path: Path) -> Any:
    """The runtime state that the graph's present-state outputs hold."""
    _missing("state_from_outputs")


def _missing(name: str) -> NoReturn:
    raise NotImplementedError(f"linattn_export.{name}: the ONNX exporter is not in this version yet")

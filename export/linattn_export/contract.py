"""The contract: what a file's `metadata_props` say, enough to drive the graph with no other document."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import linattn_edge
from linattn_edge.errors import StateMismatchError
from linattn_export.graph import need

KEY = "linattn_edge"
FORMAT_VERSION = 1
FLAVORS = ("fused", "standard", "portable")
DTYPES = ("float32", "float16", "int64", "int32")
HOLDS = ("recurrent", "position", "conv")

Size = int | str


@dataclass(frozen=True)
class Tensor:
    """An input or output. shape: numbers, "B" and "T"; layout says in words what the axes are."""

    name: str
    dtype: str
    shape: tuple[Size, ...]
    layout: str


@dataclass(frozen=True)
class Carried:
    """A state tensor: each call's `present` is the next call's `past`; a stream begins with `initial` everywhere.

    holds: "recurrent" (S, with z as its last column where the layer normalises), "position" or "conv".
    """

    past: str
    present: str
    dtype: str
    shape: tuple[Size, ...]
    initial: float
    layout: str
    holds: str = "recurrent"
    layer: int | None = None


@dataclass(frozen=True)
class Contract:
    """All that a file says of itself.

    batch_size, tokens: B and T where the file fixes them. block_length: the most tokens of one call, None for any
    number; a longer prompt is fed block by block. horizon: the first position that the feature map has no φ for.
    layers: for each layer its configuration (update_rule, feature_map with its parameters, scale, eps, ...).
    """

    kind: str
    flavor: str
    opset: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    states: tuple[Carried, ...]
    layers: tuple[dict[str, Any], ...]
    batch_size: int | None = None
    tokens: int | None = None
    block_length: int | None = None
    horizon: int | None = None
    format_version: int = FORMAT_VERSION
    exporter_version: str = linattn_edge.__version__
    more: dict[str, Any] = field(default_factory=dict)

    def metadata(self) -> dict[str, str]:
        """The `metadata_props` of the file."""
        return {KEY: json.dumps(asdict(self), sort_keys=True)}

    def lengths(self, total: int) -> list[int]:
        """How to feed `total` tokens: the lengths of the calls."""
        most = self.tokens or self.block_length or max(total, 1)
        if self.tokens is not None and total % self.tokens:
            raise ValueError(f"tokens: the file takes {self.tokens} tokens a call; {total} is no multiple of that")
        return [min(most, total - start) for start in range(0, total, most)]


def read_contract(path: str | os.PathLike[str]) -> Contract:
    """The contract in a file. Raises FileNotFoundError, or StateMismatchError where the file has no readable one."""
    onnx = need("onnx")
    damaged = need("google.protobuf.message").DecodeError
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{path}: no such file")
    try:
        model = onnx.load(os.fspath(path), format="protobuf", load_external_data=False)
        found = {entry.key: entry.value for entry in model.metadata_props}
    except (damaged, UnicodeDecodeError):
        raise StateMismatchError(f"{path}: not an ONNX file") from None
    return parse(found, path)


def parse(metadata: Mapping[str, str], path: Any) -> Contract:
    """The contract in `metadata_props`, not trusted."""
    if KEY not in metadata:
        raise StateMismatchError(f"{path}: not written by linattn_export (no {KEY!r} in its metadata)")
    try:
        said = json.loads(metadata[KEY])
    except (ValueError, RecursionError):
        raise StateMismatchError(f"{path}: its metadata is not JSON") from None
    version = said.get("format_version") if isinstance(said, dict) else None
    if version != FORMAT_VERSION:
        raise StateMismatchError(f"{path}: format_version {version!r} is not readable; expected {FORMAT_VERSION}")
    try:
        return _contract(said)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise StateMismatchError(f"{path}: its metadata is damaged ({type(error).__name__}: {error})") from None


def _contract(said: dict[str, Any]) -> Contract:
    tensors = {
        side: tuple(
            Tensor(_text(t["name"]), _one_of(t["dtype"], DTYPES), _shape(t["shape"]), _text(t["layout"]))
            for t in _list(said[side])
        )
        for side in ("inputs", "outputs")
    }
    states = tuple(
        Carried(
            _text(s["past"]),
            _text(s["present"]),
            _one_of(s["dtype"], DTYPES),
            _shape(s["shape"]),
            _number(s["initial"]),
            _text(s["layout"]),
            _one_of(s["holds"], HOLDS),
            _count(s["layer"]),
        )
        for s in _list(said["states"])
    )
    if not states or not tensors["inputs"] or not tensors["outputs"]:
        raise ValueError("no inputs, outputs or states")
    if any(s.shape[:1] != ("B",) or "T" in s.shape or "B" in s.shape[1:] for s in states):
        raise ValueError("a state whose shape is not B and numbers")
    names = [s.past for s in states] + [s.present for s in states]
    names += [t.name for side in tensors.values() for t in side]
    if len(set(names)) != len(names):
        raise ValueError("a name occurs twice")
    layers = tuple(_object(layer) for layer in _list(said["layers"]))
    if any(s.layer is not None and s.layer >= len(layers) for s in states):
        raise ValueError("a state of a layer that is not there")
    return Contract(
        _one_of(said["kind"], ("layer", "model")),
        _one_of(said["flavor"], FLAVORS),
        _count(said["opset"]) or 0,
        tensors["inputs"],
        tensors["outputs"],
        states,
        layers,
        _count(said["batch_size"], 1),
        _count(said["tokens"], 1),
        _count(said["block_length"], 1),
        _count(said["horizon"], 1),
        exporter_version=_text(said["exporter_version"]),
        more=_object(said["more"]),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1000:
        raise TypeError(f"expected text, got {value!r:.80}")
    return value


def _one_of(value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"expected one of {', '.join(allowed)}, got {value!r:.80}")
    return str(value)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, got {value!r:.80}")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, got {value!r:.80}")
    return value


def _count(value: Any, least: int = 0) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**62):
        raise TypeError(f"expected a whole number, got {value!r:.80}")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"expected a number, got {value!r:.80}")
    return float(value)


def _shape(value: Any) -> tuple[Size, ...]:
    sizes = tuple(_list(value))
    for size in sizes:
        if size not in ("B", "T") and (_count(size) is None):
            raise TypeError(f"expected a shape of numbers, 'B' and 'T', got {value!r:.80}")
    return sizes

"""A small builder of ONNX graphs: unique value names, shared constants, nodes in order."""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Shape = Sequence[int | str | None]

IR_VERSION = 10  # the newest that ONNX Runtime 1.22 loads


def need(package: str) -> Any:
    """The module of that name, or an error that says what to install."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"linattn_export needs {error.name or package}, which is not installed: pip install 'linattn-edge[export]'"
        ) from None


class Graph:
    """Nodes, constants, inputs and outputs of one file.

    flavor: what attention becomes (`attention.py`). batch_size and tokens: B and T where the file fixes them; None
    leaves them open. A node's values are named by strings; `once` makes what several layers share.
    """

    def __init__(self, flavor: str, opset: int, batch_size: int | None = None, tokens: int | None = None) -> None:
        self.onnx = need("onnx")
        self.flavor, self.opset = flavor, opset
        self.batch_size, self.tokens = batch_size, tokens
        self.nodes: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []
        self.infos: list[Any] = []
        self.functions: dict[tuple[str, str], Any] = {}
        self.domains: dict[str, int] = {"": opset}
        self._initializers: dict[Any, tuple[str, Any]] = {}
        self._names: dict[str, int] = {}
        self._made: dict[Any, str] = {}
        self._tokens_of: tuple[str, int] | None = None

    def name(self, hint: str) -> str:
        """A value name that nothing else has."""
        count = self._names.get(hint, 0)
        self._names[hint] = count + 1
        return hint if count == 0 else self.name(f"{hint}_{count}")

    def inner(self) -> "Graph":
        """A graph for the body of a node of this one: its names are distinct from the names here."""
        other = Graph(self.flavor, self.opset)
        other._names = self._names
        return other

    def input(self, name: str, dtype: str, shape: Shape) -> str:
        """An input of the graph; "B" and "T" in the shape stand for the sizes that the file may fix."""
        if name in self._names:
            raise ValueError(f"{name}: the graph has a value of that name")
        self.inputs.append(self._value(self.name(name), dtype, shape))
        if "T" in shape and self._tokens_of is None:
            self._tokens_of = name, list(shape).index("T")
        return name

    def output(self, name: str, value: str, dtype: str, shape: Shape) -> None:
        """Make `value` an output of the graph, under its final name."""
        if name in self._names:
            raise ValueError(f"{name}: the graph has a value of that name")
        made = any(value in node.output for node in self.nodes)
        if not made or any(value == o.name for o in self.outputs):
            value = self.node("Identity", value)
        for node in self.nodes:
            for ends in (node.input, node.output):
                ends[:] = [name if end == value else end for end in ends]
        for info in self.infos:
            info.name = name if info.name == value else info.name
        self._made = {key: name if made == value else made for key, made in self._made.items()}
        self.outputs.append(self._value(self.name(name), dtype, shape))

    def describe(self, value: str, dtype: str, shape: Shape) -> None:
        """State a value's shape, where inference can't find it."""
        self.infos.append(self._value(value, dtype, shape))

    def sizes(self, shape: Shape) -> list[int | str | None]:
        """A shape with B and T replaced by the sizes that the file fixes."""
        fixed = {"B": self.batch_size, "T": self.tokens}
        return [fixed.get(s) or s if isinstance(s, str) else s for s in shape]

    def _value(self, name: str, dtype: str, shape: Shape) -> Any:
        helper = self.onnx.helper
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), self.sizes(shape))

    def constant(self, value: Any, dtype: str = "float32", hint: str = "constant") -> str:
        """An initialiser of the graph; equal ones are kept once."""
        with np.errstate(over="ignore"):
            array = np.ascontiguousarray(np.asarray(value).astype(dtype))
        array = array.reshape(np.shape(value))  # NumPy makes a scalar [1]
        key = array.dtype.str, array.shape, array.tobytes()
        if key not in self._initializers:
            name = self.name(hint)
            self._initializers[key] = name, self.onnx.numpy_helper.from_array(array, name)
        return self._initializers[key][0]

    def ints(self, *values: int) -> str:
        """An int64 vector: shapes, axes, bounds."""
        return self.constant(np.array(values, np.int64), "int64", "ints")

    def node(self, op: str, *inputs: str | None, hint: str | None = None, domain: str = "", **attributes: Any) -> str:
        """Add a node of one output and give its name."""
        return self.several(op, inputs, [hint or op.lower()], domain, attributes)[0]

    def several(
        self,
        op: str,
        inputs: Sequence[str | None],
        hints: Sequence[str],
        domain: str = "",
        attributes: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Add a node of several outputs and give their names."""
        outputs = [self.name(hint) for hint in hints]
        given = ["" if name is None else name for name in inputs]
        while given and not given[-1]:
            given.pop()
        label = f"{op}.{outputs[0]}"
        self.nodes.append(
            self.onnx.helper.make_node(op, given, outputs, name=label, domain=domain, **(attributes or {}))
        )
        return outputs

    def reshape(self, value: str, *shape: int) -> str:
        """Reshape; a 0 keeps the size of that place."""
        return self.node("Reshape", value, self.ints(*shape))

    def once(self, key: Any, make: Callable[[], str]) -> str:
        """The value made under that key, now or before."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def token_count(self) -> str:
        """T as an int64 vector of one number."""
        if self.tokens is not None:
            return self.ints(self.tokens)
        if self._tokens_of is None:
            raise ValueError("the graph has no input with an axis of tokens yet")
        name, axis = self._tokens_of
        return self.once("T", lambda: self.node("Shape", name, start=axis, end=axis + 1, hint="T"))

    def lead(self) -> str:
        """[B, T] as an int64 vector."""
        if self.tokens is not None and self.batch_size is not None:
            return self.ints(self.batch_size, self.tokens)
        if self._tokens_of is None:
            raise ValueError("the graph has no input with an axis of tokens yet")
        name, axis = self._tokens_of
        return self.once("B, T", lambda: self.node("Shape", name, start=axis - 1, end=axis + 1, hint="B_T"))

    def model(self, name: str, metadata: Mapping[str, str], doc: str = "") -> Any:
        """The finished file."""
        helper = self.onnx.helper
        used = {end for node in self.nodes for end in node.input}
        tensors = [tensor for name_, tensor in self._initializers.values() if name_ in used]
        graph = helper.make_graph(
            self.nodes, name, self.inputs, self.outputs, initializer=tensors, doc_string=doc, value_info=self.infos
        )
        model = helper.make_model(
            graph,
            producer_name="linattn_export",
            opset_imports=[helper.make_opsetid(domain, version) for domain, version in self.domains.items()],
            functions=list(self.functions.values()),
            ir_version=IR_VERSION,
        )
        helper.set_model_props(model, dict(metadata))
        return model

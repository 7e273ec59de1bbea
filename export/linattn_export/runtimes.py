"""What can run an exported file: each runtime by name, as a function from feeds to outputs."""

import os
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from linattn_export.graph import Array, need

Run = Callable[[Mapping[str, Array]], dict[str, Array]]


def open_file(runtime: str, path: str | os.PathLike[str]) -> Run:
    """The file in `path`, ready to run. Raises ValueError for an unknown runtime, ImportError for one not installed."""
    if runtime not in RUNTIMES:
        raise ValueError(f"runtimes: expected some of {', '.join(RUNTIMES)}; got {runtime!r}")
    return RUNTIMES[runtime](os.fspath(path))


def onnxruntime(path: str) -> Run:
    ort = need("onnxruntime")
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(None, dict(feeds)), strict=True))


def onnx_reference(path: str) -> Run:
    onnx = need("onnx")
    evaluator = import_module("onnx.reference").ReferenceEvaluator(onnx.load(path, format="protobuf"))
    return lambda feeds: dict(zip(evaluator.output_names, evaluator.run(None, dict(feeds)), strict=True))


def openvino(path: str) -> Run:
    ov = _other("openvino")
    core = ov.Core()
    model = core.read_model(_inlined(path))
    # float32 all through: some CPUs would take bfloat16 else
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1})
    names = [output.any_name for output in compiled.outputs]

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        found = compiled(dict(feeds))
        return {name: np.array(found[name]) for name in names}

    return run


def tract(path: str) -> Run:
    onnx, package = need("onnx"), _other("tract")
    graph = onnx.load(path, format="protobuf").graph
    inputs, outputs = ([value.name for value in side] for side in (graph.input, graph.output))
    int64 = onnx.TensorProto.INT64
    counts = [i for i, value in enumerate(graph.output) if value.type.tensor_type.elem_type == int64]
    ready: dict[tuple[Any, ...], Any] = {}  # by the shapes of the inputs, which tract wants to know

    def prepare(feeds: Mapping[str, Array]) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "inlined.onnx")
            file.write_bytes(_inlined(path, {name: feeds[name].shape for name in inputs}))
            return package.onnx().load(file).into_model().into_runnable()

    def run(feeds: Mapping[str, Array]) -> dict[str, Array]:
        key = tuple(feeds[name].shape for name in inputs)
        if key not in ready:
            ready[key] = prepare(feeds)
        found = ready[key].run([np.ascontiguousarray(feeds[name]) for name in inputs])
        for i in counts:  # what is made of sizes has a type of its own, which NumPy can't have
            found[i] = found[i].convert_to(package.DatumType.I64)
        return {name: np.array(tensor.to_numpy()) for name, tensor in zip(outputs, found, strict=True)}

    return run


def _inlined(path: str, shapes: Mapping[str, tuple[int, ...]] | None = None) -> bytes:
    """The file with its local functions in place: OpenVINO and tract take none. shapes: of its inputs, to fix them."""
    onnx = need("onnx")
    model = import_module("onnx.inliner").inline_local_functions(onnx.load(path, format="protobuf"))
    if shapes is not None:
        sizes: dict[str, int] = {}
        for value in model.graph.input:
            for dim, size in zip(value.type.tensor_type.shape.dim, shapes[value.name], strict=True):
                sizes |= {dim.dim_param: size} if dim.dim_param else {}
        del model.graph.value_info[:]
        for value in [*model.graph.input, *model.graph.output]:
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_value = sizes[dim.dim_param]
    return bytes(model.SerializeToString())


def _other(package: str) -> Any:
    try:
        return import_module(package)
    except ModuleNotFoundError:
        raise ImportError(f"runtimes: {package} is not installed: pip install {package}") from None


RUNTIMES: dict[str, Callable[[str], Run]] = {
    "onnxruntime": onnxruntime,
    "onnx-reference": onnx_reference,
    "openvino": openvino,
    "tract": tract,
}

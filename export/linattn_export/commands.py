"""`linattn-edge export` and `linattn-edge verify`."""

import argparse
import json
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import linattn_edge as la
import linattn_export as lx
from linattn_edge.models import WEIGHTS, bundled
from linattn_edge.state import replacing
from linattn_edge.terminal import size, table
from linattn_export.contract import Carried, Contract, Tensor
from linattn_export.graph import need
from linattn_export.model import NAMES
from linattn_export.runtimes import RUNTIMES

FOR = {
    "fused": "ONNX Runtime 1.22 and newer: Python, C++, mobile, node, web (its own kernel from 1.25 on)",
    "standard": "runtimes with the ONNX operator LinearAttention (opset 27), such as ONNX Runtime 1.32",
    "portable": "any runtime with opset 17: ONNX Runtime, OpenVINO, tract, NNAPI and CoreML converters",
}


def add_source(parser: argparse.ArgumentParser) -> None:
    """What is exported: a layer or a model."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--layer", metavar="LAYER", help="a file that LinearAttention.save wrote, or as in num_heads=8,key_dim=64"
    )
    which.add_argument(
        "--model", metavar="FOLDER", nargs="?", const=bundled(), help="a checkpoint (no FOLDER: the bundled model)"
    )
    parser.add_argument("--weights", choices=WEIGHTS, default="float32", help="how a model's matrices are kept")


def source(args: argparse.Namespace) -> Any:
    """The layer or model that the arguments name."""
    if args.model is not None:
        return la.load_model(args.model, args.weights)
    if args.weights != "float32":
        raise ValueError("--weights: a layer has none")
    if "=" in args.layer and not os.path.exists(args.layer):
        return parse_layer(args.layer)
    return la.LinearAttention.load(args.layer)


def parse_layer(text: str) -> la.LinearAttention:
    """A layer as it is written on the command line: LinearAttention's arguments, such as num_heads=8,key_dim=64."""
    options: dict[str, Any] = {}
    for part in re.split(r",(?![^\[]*\])", text):  # at commas that are in no list
        name, equals, value = part.partition("=")
        if not equals or name in options:
            raise ValueError(f"--layer: expected name=value once for each name, got {part!r}")
        try:
            options[name] = json.loads(value.lower() if value in ("True", "False", "None") else value)
        except json.JSONDecodeError:
            options[name] = None if value == "None" else value
    try:
        return la.LinearAttention(**options)
    except TypeError as error:
        raise ValueError(f"--layer: {str(error).removeprefix('LinearAttention.__init__() ')}") from None


def add_export_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `linattn-edge export`."""
    add_source(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE", help="the .onnx file")
    parser.add_argument("--flavor", choices=FOR, default="fused", help="which operators (default fused)")
    parser.add_argument("--opset", type=int, help="default 17, for standard 27")
    parser.add_argument("--names", choices=NAMES, default="genai", help="how a model's states are called")
    parser.add_argument("--dtype", choices=("float32", "float16"), default="float32", help="of a layer's inputs")
    parser.add_argument("--decay", choices=("head", "channel"), default="head", help="shape of a layer's decay input")
    parser.add_argument("--batch-size", type=int, metavar="B", help="fix B")
    parser.add_argument("--tokens", type=int, metavar="T", help="fix T: 1 makes the fastest step of portable")
    parser.add_argument("--no-check", action="store_true", help="do not run the file beside the Python runtime")
    parser.add_argument(
        "--ort", action="store_true", help="also write FILE with .ort, for ONNX Runtime's mobile builds"
    )


def run_export(args: argparse.Namespace) -> None:
    """Write the file, check it, and say what it is."""
    if args.output.suffix.lower() != ".onnx":
        raise ValueError(f"-o: expected a file that ends in .onnx, got {args.output}")
    what = source(args)
    fixed: dict[str, Any] = {"batch_size": args.batch_size, "tokens": args.tokens}
    if args.model is not None:
        contract = lx.export_model(what, args.output, args.flavor, args.opset, args.names, **fixed)
    else:
        contract = lx.export_layer(
            what, args.output, args.flavor, args.opset, dtype=args.dtype, decay=args.decay, **fixed
        )
    report = None
    if not args.no_check:
        report = lx.verify(args.output, what, ["onnx-reference" if args.flavor == "standard" else "onnxruntime"])
    ort = write_ort(args.output) if args.ort else None
    if args.json:
        said = {"path": str(args.output), "bytes": args.output.stat().st_size, "contract": asdict(contract)}
        said |= {"verified": None if report is None else [asdict(f) for f in report.figures]}
        print(json.dumps(said | ({} if ort is None else {"ort": str(ort)}), indent=2))
        return
    print(describe(args.output, contract))
    if ort is not None:
        print(f"{ort}: {size(ort.stat().st_size)}, for the ONNX Runtime version that wrote it and newer")
    print()
    print("not checked" if report is None else report)


def describe(path: Path, contract: Contract) -> str:
    """The contract, for people."""
    fixed = {"B": contract.batch_size or "B", "T": contract.tokens or "T"}

    def shape(of: Tensor | Carried) -> str:
        return "[" + ", ".join(str(fixed.get(n, n) if isinstance(n, str) else n) for n in of.shape) + "]"

    states = [s for s in contract.states if s.layer in (0, None)]
    rows = [[t.name, "input", t.dtype, shape(t), t.layout] for t in contract.inputs]
    rows += [[s.past, "state in", s.dtype, shape(s), f"starts as {s.initial:g}"] for s in states]
    rows += [[t.name, "output", t.dtype, shape(t), t.layout] for t in contract.outputs]
    rows += [[s.present, "state out", s.dtype, shape(s), f"the next {s.past}"] for s in states]
    lines = [
        f"{path}: {size(path.stat().st_size)}, flavor {contract.flavor}, opset {contract.opset}",
        f"for {FOR[contract.flavor]}",
        "",
        table(["tensor", "kind", "dtype", "shape", "what"], rows, left=5),
    ]
    if len(contract.layers) > 1:
        lines.append(f"and so on up to layer {len(contract.layers) - 1}: {len(contract.states)} states in all")
    if contract.tokens is not None:
        lines.append(f"takes {contract.tokens} token{'s' if contract.tokens > 1 else ''} a call")
    elif contract.block_length is not None:
        lines.append(f"takes 1 to {contract.block_length} tokens a call; feed longer prompts block by block")
    return "\n".join(lines)


def write_ort(path: Path) -> Path:
    """The file in ONNX Runtime's own format, beside it."""
    runtime = need("onnxruntime")
    target = path.with_suffix(".ort")
    with replacing(target) as temporary:
        options = runtime.SessionOptions()
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = os.fspath(temporary)
        options.add_session_config_entry("session.save_model_format", "ORT")
        options.log_severity_level = 3
        runtime.InferenceSession(os.fspath(path), options, providers=["CPUExecutionProvider"])
    return target


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `linattn-edge verify`."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the .onnx file")
    add_source(parser)
    parser.add_argument(
        "--runtimes", nargs="+", choices=RUNTIMES, default=["onnxruntime"], help="which ones (default onnxruntime)"
    )


def run_verify(args: argparse.Namespace) -> None:
    """Run a file beside the Python runtime."""
    report = lx.verify(args.file, source(args), args.runtimes)
    print(json.dumps([asdict(f) for f in report.figures], indent=2) if args.json else report)

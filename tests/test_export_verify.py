"""lx.verify: what it runs, what it finds, and that it finds what is wrong."""

import sys

import numpy as np
import pytest

import cases
import linattn_edge as la
import linattn_export as lx
from exported import FLAVORS, decay_kind, onnx
from linattn_edge.errors import StateMismatchError
from linattn_export.parity import ParityError
from linattn_export.runtimes import RUNTIMES

LAYERS = [
    ("linear", None, "mha", "elu"),
    ("linear", None, "gqa", "cosformer"),
    ("gated", "channel", "gva", "identity"),
    ("gated", "head", "gqa", "taylor"),
    ("delta", None, "gqa", "hedgehog heads"),
    ("gated_delta", "channel", "mha", "identity"),
    ("gated_delta", "head", "gqa", "identity"),
]
OTHERS = ["openvino", "tract"]


def export(layer, path, flavor, **options):
    rule, gate, layout, phi = layer
    case = cases.make(rule, gate, layout, phi, normalize=rule == "linear", qk_norm=rule == "gated_delta")
    lx.export_layer(case.attn, path, flavor, decay=decay_kind(case), **options)
    return case.attn


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer[0]} {layer[3]}")
def test_right_files_pass(layer, flavor, dtype, tmp_path):
    path = tmp_path / "m.onnx"
    attn = export(layer, path, flavor, dtype=dtype)
    report = lx.verify(path, attn, ["onnxruntime", "onnx-reference"])
    assert report.passed and len({f.case for f in report.figures}) == (2 if layer[3] == "cosformer" else 3)
    outputs = ["output", "present_state", *(["present_position"] if layer[3] == "cosformer" else [])]
    for runtime in ("onnxruntime", "onnx-reference"):
        for name in outputs:
            assert report.worst(runtime, name) <= (1e-3 if (name, dtype) == ("output", "float16") else 2e-5)
    text = str(report)
    assert "onnx-reference" in text and "token by token" in text and text.endswith("all within bounds")


@pytest.mark.parametrize("sizes", [{"tokens": 1}, {"batch_size": 2, "tokens": 1}, {"tokens": 7}, {"batch_size": 2}])
@pytest.mark.parametrize("flavor", FLAVORS)
def test_fixed_sizes(flavor, sizes, tmp_path):
    for layer in LAYERS[1:3]:
        attn = export(layer, tmp_path / "m.onnx", flavor, **sizes)
        assert lx.verify(tmp_path / "m.onnx", attn).passed


@pytest.mark.parametrize("runtime", OTHERS)
@pytest.mark.parametrize("flavor", ["fused", "portable"])
def test_other_runtimes(flavor, runtime, tmp_path):
    pytest.importorskip(runtime, reason=f"{runtime} is not installed")
    for layer in LAYERS:
        for sizes in ({}, {"tokens": 1}):
            attn = export(layer, tmp_path / "m.onnx", flavor, **sizes)
            assert lx.verify(tmp_path / "m.onnx", attn, [runtime]).passed


def spoil(path, change):
    model = onnx.load(path)
    change(model)
    onnx.save(model, path)


def scale_up(model):
    """A scale that is 1 % off."""
    (node,) = [n for n in model.graph.node if n.op_type == "LinearAttention"]
    (scale,) = [a for a in node.attribute if a.name == "scale"]
    scale.f *= 1.01


def forget(model):
    """A present state that is the past one."""
    for node in model.graph.node:
        for i, name in enumerate(node.output):
            if name == "present_state":
                node.output[i] = "unused"
    model.graph.node.append(onnx.helper.make_node("Identity", ["past_state"], ["present_state"]))


def other_rule(model):
    (node,) = [n for n in model.graph.node if n.op_type == "LinearAttention"]
    (rule,) = [a for a in node.attribute if a.name == "update_rule"]
    rule.s = b"linear"
    del node.input[4:]


@pytest.mark.parametrize(
    ("change", "output"), [(scale_up, "output"), (forget, "present_state"), (other_rule, "output")]
)
def test_wrong_files_fail(change, output, tmp_path):
    path = tmp_path / "m.onnx"
    attn = export(("gated", "head", "mha", "identity"), path, "standard")
    spoil(path, change)
    with pytest.raises(ParityError, match=f"onnxruntime, .*{output}: .* > 2e-05") as caught:
        lx.verify(path, attn)
    report = caught.value.report
    assert not report.passed and "FAILED" in str(report)
    assert report.worst("onnxruntime", output) > 2e-5


def test_wrong_weights_fail(tmp_path):
    path = tmp_path / "m.onnx"
    attn = export(("delta", None, "gqa", "hedgehog heads"), path, "fused")

    def nudge(model):
        (tensor,) = [t for t in model.graph.initializer if t.name == "phi_bias"]
        array = onnx.numpy_helper.to_array(tensor) + np.float32(1e-3)
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))

    spoil(path, nudge)
    with pytest.raises(ParityError):
        lx.verify(path, attn)


def test_a_missing_runtime_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    attn = export(LAYERS[0], path, "fused")
    for name in (*OTHERS, "onnxruntime"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(ImportError, match=r"is not installed.*: pip install '?[a-z]+"):
            lx.verify(path, attn, [name])


def test_refusals(tmp_path):
    path = tmp_path / "m.onnx"
    attn = export(LAYERS[0], path, "fused")
    with pytest.raises(ValueError, match="runtimes: expected some of onnxruntime, onnx-reference, openvino, tract"):
        lx.verify(path, attn, ["coreml"])
    with pytest.raises(ValueError, match="runtimes: expected a list of names, got 'onnxruntime'"):
        lx.verify(path, attn, "onnxruntime")
    with pytest.raises(ValueError, match="runtimes: expected a list"):
        lx.verify(path, attn, [])
    with pytest.raises(StateMismatchError, match="belongs to another layer"):
        lx.verify(path, la.LinearAttention(2, 5))
    assert list(RUNTIMES) == ["onnxruntime", "onnx-reference", "openvino", "tract"]

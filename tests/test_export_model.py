"""Whole models as ONNX files: logits against a plain float64 forward pass, names, states, weights, and misuse."""

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import linattn_edge as la
import linattn_export as lx
from checkpoints import BASE, forward, make_tensors, write
from linattn_edge.errors import NotFiniteError, ShapeError, StateMismatchError
from linattn_edge.kernels import program
from linattn_export import files, model, parity, weights

FLAVORS = ("fused", "standard", "portable")
SETTINGS = {
    "elu": ("linear_attn", {}),
    "elementwise product, GQA": ("linear_attn", {"feature_map": "elementwise_product", "num_kv_heads": 2}),
    "hedgehog, tied head": ("linear_attn", {"feature_map": "hedgehog", "tie_word_embeddings": True}),
    "t2r": ("linear_attn", {"feature_map": "t2r", "norm_feature_map": False}),
    "dpfp": ("linear_attn", {"feature_map": "dpfp", "norm_feature_map": False}),
    "norm_q and norm_k": ("linear_attn", {"norm_q": True, "norm_k": True, "feature_map": "relu"}),
    "gla": ("gla", {}),
    "gla with convolutions": ("gla", {"use_short_conv": True}),
    "gla, convolutions of one token": ("gla", {"use_short_conv": True, "conv_size": 1}),
    "gla, GQA, clamped": ("gla", {"num_kv_heads": 1, "clamp_min": -0.2, "feature_map": "gelu"}),
    "gla without gate and weights of norms": ("gla", {"use_output_gate": False, "elementwise_affine": False}),
    **{f"gla, {name}": ("gla", {"feature_map": name}) for name in ("relu", "sqrelu", "sigmoid", "logsigmoid", "swish")},
}


def checkpoint(folder, name):
    kind, extra = SETTINGS[name]
    config = BASE[kind] | extra
    tensors = make_tensors(config)
    return config, tensors, write(folder, config, tensors)


@pytest.fixture(scope="module")
def gla(tmp_path_factory):
    return la.load_model(checkpoint(tmp_path_factory.mktemp("gla"), "gla with convolutions")[2])


def session(path):
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def run(path, contract, ids, lengths):
    """Logits, piece by piece, and the present states at the end, driven by nothing but what the file says."""
    runtime, start, pieces = session(path), 0, []
    sizes = {"B": ids.shape[0]}
    states = {
        s.past: np.full([sizes.get(n, n) for n in s.shape], s.initial, s.dtype) for s in contract.states
    }  # fmt: skip
    names = [output.name for output in runtime.get_outputs()]
    for length in lengths:
        feeds = {contract.inputs[0].name: ids[:, start : start + length]}
        found = dict(zip(names, runtime.run(None, feeds | states), strict=True))
        pieces.append(found[contract.outputs[0].name])
        states = {s.past: found[s.present] for s in contract.states}
        start += length
    return np.concatenate(pieces, axis=1), {s.present: states[s.past] for s in contract.states}


def forwards(config, tensors, ids):
    return np.stack([forward(config, tensors, row) for row in ids])


def off(got, want):
    return np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2))


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("name", SETTINGS)
def test_logits_are_those_of_the_plain_forward_pass(name, flavor, tmp_path):
    config, tensors, folder = checkpoint(tmp_path, name)
    path = str(tmp_path / "model.onnx")
    contract = lx.export_model(la.load_model(folder), path, flavor)
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], (2, 21))
    logits, _ = run(path, contract, ids, (1, 1, 7, 12))
    assert off(logits, forwards(config, tensors, ids)) < 2e-5


def test_every_operation_of_the_decoder_has_nodes():
    names = "EMBED NORM MATMUL ADD_MATMUL ACT_MULTIPLY ACT LOG_DECAY CONV ATTENTION PHI SUM_NORM"
    codes = {getattr(program, name) for name in names.split()}
    assert set(model.NODES) == codes


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("kept", ["float16", "int8"])
def test_weights_are_written_as_the_model_keeps_them(kept, flavor, tmp_path):
    config, tensors, folder = checkpoint(tmp_path, "gla with convolutions")
    small = la.load_model(folder, kept)
    path = str(tmp_path / "model.onnx")
    contract = lx.export_model(small, path, flavor)
    assert contract.more["weights"] == kept
    kinds = {onnx.TensorProto.DataType.Name(t.data_type) for t in onnx.load(path).graph.initializer if t.dims}
    assert {"float16": "FLOAT16", "int8": "UINT8" if flavor == "fused" else "INT8"}[kept] in kinds
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], (2, 21))
    logits, _ = run(path, contract, ids, (1, 20))
    want = small.prefill(ids, small.init_state(2))
    assert off(logits, want) < (0.1 if flavor == "fused" and kept == "int8" else 2e-5)
    assert off(want, forwards(config, tensors, ids)) > 1e-5  # they are not float32's
    lx.verify(path, small)


def test_the_grouped_product_is_the_dequantised_one():
    rng = np.random.default_rng(0)
    from linattn_edge.models.assembly import Matrix
    from linattn_export.graph import Graph

    matrix = rng.standard_normal((21, 45)).astype(np.float32)
    packed = Matrix.pack("m", matrix, "int8")
    assert np.array_equal(packed.rows(21), np.rint(matrix / packed.scales[:21, None]).astype(np.int8))
    graph = Graph("fused", 17)
    graph.input("x", "float32", ("B", "T", 45))
    graph.output("y", weights.product(graph, packed, "x", 21, None), "float32", ("B", "T", 21))
    x = rng.standard_normal((2, 3, 45)).astype(np.float32)
    y = ort.InferenceSession(graph.model("m", {}).SerializeToString()).run(None, {"x": x})[0]
    assert off(y, x @ (packed.rows(21) * packed.scales[:21, None]).T.astype(np.float64)) < 2e-2


@pytest.mark.parametrize(
    ("names", "recurrent", "conv"),
    [
        (
            "genai",
            ("past_key_values.{}.recurrent_state", "present.{}.recurrent_state"),
            ("past_key_values.{}.conv_state", "present.{}.conv_state"),
        ),
        (
            "transformers.js",
            ("past_recurrent.{}", "present_recurrent.{}"),
            ("past_conv.{}", "present_conv.{}"),
        ),
    ],
)
@pytest.mark.parametrize("flavor", FLAVORS)
def test_names_shapes_and_pairs(names, recurrent, conv, flavor, gla, tmp_path):
    path = str(tmp_path / "model.onnx")
    lx.export_model(gla, path, flavor, names=names)
    graph = onnx.load(path).graph

    def told(values):
        return {
            v.name: (
                onnx.TensorProto.DataType.Name(v.type.tensor_type.elem_type),
                [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim],
            )
            for v in values
        }

    inputs, outputs = told(graph.input), told(graph.output)
    expected_in = {"input_ids": ("INT64", ["B", "T"])}
    expected_out = {"logits": ("FLOAT", ["B", "T", 19])}
    for i in range(2):  # H = 2 heads; K = 24 / 2 / 2, V = 24 / 2; 12 + 12 + 24 channels, 4 - 1 tokens
        for (past, present), shape in ((recurrent, ["B", 2, 6, 12]), (conv, ["B", 48, 3])):
            expected_in[past.format(i)] = expected_out[present.format(i)] = ("FLOAT", shape)
    assert inputs == expected_in
    assert outputs == expected_out
    assert next(o.name for o in graph.output) == "logits"  # states come last


def test_the_metadata_alone_drive_the_graph(gla, tmp_path):
    path = tmp_path / "model.onnx"
    lx.export_model(gla, path)
    said = json.loads({p.key: p.value for p in onnx.load(path).metadata_props}["linattn_edge"])
    runtime = session(str(path))
    states = {
        s["past"]: np.full([2 if n == "B" else n for n in s["shape"]], s["initial"], s["dtype"]) for s in said["states"]
    }
    (given,), (out,) = said["inputs"], said["outputs"]
    ids = np.random.default_rng(0).integers(0, said["more"]["vocab_size"], (2, 9))
    names = [o.name for o in runtime.get_outputs()]
    logits = []
    for t in range(9):
        found = dict(
            zip(
                names,
                runtime.run(None, states | {given["name"]: ids[:, t : t + 1].astype(given["dtype"])}),
                strict=True,
            )
        )
        states = {s["past"]: found[s["present"]] for s in said["states"]}
        logits.append(found[out["name"]])
    assert off(np.concatenate(logits, 1), gla.prefill(ids, gla.init_state(2))) < 2e-5


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("name", ["elu", "gla with convolutions"])
def test_a_stream_moves_there_and_back(name, flavor, tmp_path):
    config, _, folder = checkpoint(tmp_path, name)
    m = la.load_model(folder)
    path = str(tmp_path / "model.onnx")
    contract = lx.export_model(m, path, flavor)
    ids = np.random.default_rng(2).integers(0, config["vocab_size"], (3, 30))
    state = m.init_state(3)
    want = m.prefill(ids, state)
    half = m.init_state(3)
    m.prefill(ids[:, :10], half)
    feeds = lx.state_feeds(half, path)
    assert set(feeds) == {s.past for s in contract.states}
    runtime = session(path)
    names = [o.name for o in runtime.get_outputs()]
    found = dict(zip(names, runtime.run(None, feeds | {"input_ids": ids[:, 10:20]}), strict=True))
    assert off(found["logits"], want[:, 10:20]) < 2e-5
    back = lx.state_from_outputs(found, m, path, position=20)
    assert back.position.tolist() == [20] * 3
    assert off(m.prefill(ids[:, 20:], back), want[:, 20:]) < 2e-5


def test_states_that_do_not_fit_are_refused(gla, tmp_path):
    path = str(tmp_path / "model.onnx")
    contract = lx.export_model(gla, path)
    good = {s.present: np.zeros([2 if n == "B" else n for n in s.shape], np.float32) for s in contract.states}
    lx.state_from_outputs(good, gla, path)
    name = "present.1.conv_state"
    with pytest.raises(StateMismatchError, match=r"present\.1\.conv_state not among them"):
        lx.state_from_outputs({n: a for n, a in good.items() if n != name}, gla, path)
    with pytest.raises(ShapeError, match=r"present\.1\.conv_state: expected .* got \[2, 48, 4\]"):
        lx.state_from_outputs(good | {name: np.zeros((2, 48, 4), np.float32)}, gla, path)
    with pytest.raises(ShapeError, match=r"present\.1\.conv_state: expected .* got \[3, 48, 3\]"):
        lx.state_from_outputs(good | {name: np.zeros((3, 48, 3), np.float32)}, gla, path)
    with pytest.raises(TypeError, match="expected float32, got float64"):
        lx.state_from_outputs(good | {name: np.zeros((2, 48, 3))}, gla, path)
    with pytest.raises(NotFiniteError, match="NaN or inf"):
        lx.state_from_outputs(good | {name: np.full((2, 48, 3), np.nan, np.float32)}, gla, path)
    other = la.load_model(checkpoint(tmp_path / "other", "gla")[2])
    for call in (lambda: lx.state_from_outputs(good, other, path), lambda: lx.verify(path, other)):
        with pytest.raises(StateMismatchError, match="other convolutions"):
            call()
    elu = la.load_model(checkpoint(tmp_path / "elu", "elu")[2])
    with pytest.raises(StateMismatchError, match="belongs to another model"):
        lx.state_feeds(elu.init_state(), path)
    attn = la.LinearAttention(2, 6, 12, feature_map="identity")
    with pytest.raises(StateMismatchError, match="holds a model of 2 layers, not a layer"):
        lx.verify(path, attn)


def test_fixed_sizes(gla, tmp_path):
    path = str(tmp_path / "model.onnx")
    contract = lx.export_model(gla, path, "portable", batch_size=2, tokens=1)
    assert (contract.batch_size, contract.tokens) == (2, 1)
    inputs = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in onnx.load(path).graph.input}
    assert inputs["input_ids"] == [2, 1] and inputs["past_key_values.0.conv_state"] == [2, 48, 3]
    lx.verify(path, gla)


@pytest.mark.parametrize("flavor", FLAVORS)
def test_every_value_has_a_shape(flavor, gla, tmp_path):
    path = str(tmp_path / "model.onnx")
    lx.export_model(gla, path, flavor)
    inferred = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True, data_prop=True).graph
    known = {v.name for v in (*inferred.value_info, *inferred.output) if v.type.tensor_type.HasField("shape")}
    assert {name for node in inferred.node for name in node.output} <= known


def test_large_weights_go_to_a_file_of_their_own(gla, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "LIMIT", 10_000)
    path = tmp_path / "model.onnx"
    contract = lx.export_model(gla, path)
    (data,) = (p for p in tmp_path.iterdir() if p != path)
    assert data.name.startswith("model.onnx.") and data.suffix == ".data"
    assert path.stat().st_size < data.stat().st_size
    assert lx.read_contract(path) == contract
    lx.verify(path, gla)


def test_misuse(gla, tmp_path):
    path = tmp_path / "model.onnx"
    with pytest.raises(TypeError, match=r"model: expected a Model .* got str"):
        lx.export_model("gla", path)
    with pytest.raises(ValueError, match=r"names: expected one of genai, transformers\.js; got 'mine'"):
        lx.export_model(gla, path, names="mine")
    with pytest.raises(ValueError, match="flavor: expected one of fused, standard, portable; got 'fast'"):
        lx.export_model(gla, path, "fast")
    with pytest.raises(ValueError, match="tokens"):
        lx.export_model(gla, path, "portable", tokens=1000)
    with pytest.raises(FileNotFoundError):
        lx.export_model(gla, tmp_path / "nowhere" / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_other_weights_is_refused_and_a_wrong_int8_product_found(tmp_path):
    _, _, folder = checkpoint(tmp_path, "gla")
    exact, small = la.load_model(folder), la.load_model(folder, "int8")
    path = tmp_path / "model.onnx"
    lx.export_model(exact, path)
    with pytest.raises(StateMismatchError, match="has weights as float32, the model as int8"):
        lx.verify(path, small)
    lx.export_model(small, path)
    lx.verify(path, small)
    wrong = onnx.load(path)
    node = [n for n in wrong.graph.node if n.op_type == "MatMulNBits"][-1]  # a norm would hide an earlier one
    scales = next(t for t in wrong.graph.initializer if t.name == node.input[2])
    scales.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(scales) * np.float32(1.05), scales.name))
    onnx.save(wrong, path)
    with pytest.raises(parity.ParityError, match="exact products"):
        lx.verify(path, small)


def test_what_is_no_dictionary_and_what_is_not_finite(gla, tmp_path):
    path = tmp_path / "model.onnx"
    lx.export_model(gla, path)
    with pytest.raises(TypeError, match="outputs: expected a dictionary of arrays by name, got list"):
        lx.state_from_outputs([np.zeros(3)], gla, path)
    state = gla.init_state()
    state.layers[0].S[0, 0, 0, 0] = np.nan
    with pytest.raises(NotFiniteError, match="state: it holds NaN"):
        lx.state_feeds(state, path)
    with pytest.raises(ValueError, match="names: expected one of"):
        lx.export_model(gla, path, names=["genai"])

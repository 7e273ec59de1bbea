"""`linattn-edge export` and `verify`."""

import json
import re
import sys

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import linattn_edge as la
import linattn_export as lx
from checkpoints import BASE, make_tensors, write
from linattn_edge import cli, demo
from linattn_export import commands, parity

LAYER = "num_heads=2,key_dim=4,value_dim=5,update_rule=gated_delta,feature_map=identity,qk_norm=True"


@pytest.fixture
def folder(tmp_path):
    config = BASE["gla"]
    return write(tmp_path / "checkpoint", config, make_tensors(config))


@pytest.mark.parametrize("flavor", ["fused", "standard", "portable"])
def test_a_layer_is_written_checked_and_described(flavor, tmp_path, capsys):
    path = tmp_path / "layer.onnx"
    assert cli.main(["export", "--layer", LAYER, "-o", str(path), "--flavor", flavor]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "all within bounds" in out
    assert f"flavor {flavor}, opset {27 if flavor == 'standard' else 17}" in out
    for name in ("query", "key", "value", "decay", "beta", "past_state", "output", "present_state"):
        assert f"\n{name} " in out
    contract = lx.read_contract(path)
    assert contract.layers[0]["update_rule"] == "gated_delta" and contract.layers[0]["qk_norm"] is True
    assert ("feed longer prompts block by block" in out) == (flavor == "portable")
    assert cli.main(["verify", str(path), "--layer", LAYER, "--runtimes", "onnx-reference"]) == 0
    assert "all within bounds" in capsys.readouterr().out


def test_a_saved_layer(tmp_path, capsys):
    rng = np.random.default_rng(0)
    attn = la.LinearAttention(2, 4, feature_map=la.T2R(rng.standard_normal((4, 4))))
    attn.save(tmp_path / "layer.safetensors")
    arguments = ["--layer", str(tmp_path / "layer.safetensors")]
    assert cli.main(["export", *arguments, "-o", str(tmp_path / "l.onnx"), "--tokens", "1", "--batch-size", "3"]) == 0
    out = capsys.readouterr().out
    assert "takes 1 token a call" in out and "[3, 1, 8]" in out
    lx.verify(tmp_path / "l.onnx", attn)


def test_a_model_in_json_and_in_ort_format(folder, tmp_path, capsys):
    path = tmp_path / "model.onnx"
    arguments = ["--model", str(folder), "--weights", "float16", "-o", str(path), "--ort", "--names", "transformers.js"]
    assert cli.main(["export", *arguments, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["bytes"] == path.stat().st_size
    assert [s["past"] for s in said["contract"]["states"]] == ["past_recurrent.0", "past_recurrent.1"]
    assert said["contract"]["more"]["weights"] == "float16"
    assert all(f["error"] <= f["bound"] for f in said["verified"])
    assert said["ort"] == str(path.with_suffix(".ort"))
    inputs = ort.InferenceSession(said["ort"]).get_inputs()
    assert [i.name for i in inputs] == ["input_ids", "past_recurrent.0", "past_recurrent.1"]
    assert cli.main(["export", *arguments]) == 0
    assert "and so on up to layer 1: 2 states in all" in capsys.readouterr().out
    assert cli.main(["verify", str(path), "--model", str(folder), "--weights", "float16", "--json"]) == 0
    assert {f["output"] for f in json.loads(capsys.readouterr().out)} == {"logits", "states"}


def test_the_bundled_model_is_the_default(tmp_path, capsys):
    path = tmp_path / "model.onnx"
    assert cli.main(["export", "-o", str(path), "--no-check", "--model"]) == 0
    assert "not checked" in capsys.readouterr().out
    assert lx.read_contract(path).more["vocab_size"] == 256


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("num_heads=2", "--layer: .*missing.*key_dim.*"),
        ("num_heads=2,key_dim=4,nonsense=1", "--layer: .*nonsense.*"),
        ("num_heads=2,num_heads=4", "--layer: expected name=value once for each name, got 'num_heads=4'"),
        ("num_heads=2,key_dim", "--layer: expected name=value .* got 'key_dim'"),
        ("num_heads=0,key_dim=4", "num_heads: .*"),
        ("/nowhere.safetensors", ".*/nowhere.safetensors.*"),
    ],
)
def test_layers_that_cannot_be_are_one_line(layer, message, tmp_path, capsys):
    assert cli.main(["export", "--layer", layer, "-o", str(tmp_path / "l.onnx")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(f"linattn-edge: error: {message}\n", err)
    assert list(tmp_path.iterdir()) == []


def test_values_on_the_command_line():
    attn = commands.parse_layer("num_heads=4,key_dim=8,num_kv_heads=2,normalize=False,scale=0.5,feature_map=taylor")
    expected = la.LinearAttention(4, 8, num_kv_heads=2, normalize=False, scale=0.5, feature_map="taylor")
    assert attn.layer.config() == expected.layer.config()
    plain = commands.parse_layer("num_heads=4,key_dim=8,value_dim=None").layer
    assert plain.config() == la.LinearAttention(4, 8).layer.config()


def test_a_layer_has_no_weights(tmp_path, capsys):
    assert cli.main(["export", "--layer", LAYER, "--weights", "int8", "-o", str(tmp_path / "l.onnx")]) == 1
    assert capsys.readouterr().err == "linattn-edge: error: --weights: a layer has none\n"


def test_a_wrong_file_fails(tmp_path, capsys):
    path = tmp_path / "layer.onnx"
    assert cli.main(["export", "--layer", LAYER, "-o", str(path), "--no-check"]) == 0
    model = onnx.load(path)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.name == "scale":
                attribute.f *= 1.01
    onnx.save(model, path)
    capsys.readouterr()
    assert cli.main(["verify", str(path), "--layer", LAYER]) == 1
    out, err = capsys.readouterr()
    assert out == "" and "beyond their bound" in err and err.count("\n") == 1
    assert cli.main(["verify", str(path), "--layer", "num_heads=2,key_dim=4"]) == 1
    assert "belongs to another layer" in capsys.readouterr().err


def test_what_is_not_installed_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert cli.main(["export", "--layer", LAYER, "-o", str(tmp_path / "l.onnx")]) == 1
    assert "pip install 'linattn-edge[export]'" in capsys.readouterr().err
    assert demo.export(la.load_model()) is None


def test_the_demo_exports_the_model():
    found = demo.export(la.load_model())
    assert found is not None
    assert found.worst_relative_error < parity.BOUNDS["float32"]
    assert found.file_bytes > 4_000_000


def test_files_that_are_no_onnx(tmp_path, capsys):
    for name in ("y.json", "y.ort", "y"):
        assert cli.main(["export", "--layer", LAYER, "-o", str(tmp_path / name), "--ort"]) == 1
        assert "-o: expected a file that ends in .onnx" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_list_of_decays_on_the_command_line():
    found = commands.parse_layer("num_heads=2,key_dim=4,update_rule=gated,decay=[-1,-2.5],feature_map=elu")
    assert found.layer.decay.tolist() == [[-1], [-2.5]]


def test_more_tokens_than_a_map_has_positions_for(tmp_path):
    attn = la.LinearAttention(2, 4, feature_map=la.CosFormer(max_len=5))
    with pytest.raises(ValueError, match="tokens: cosformer has no φ beyond position 5, got 6 tokens"):
        lx.export_layer(attn, tmp_path / "l.onnx", tokens=6)

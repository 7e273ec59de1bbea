"""Whole models: logits against fla's own and a plain float64 forward pass; what a checkpoint may not be."""

import copy
import json
import math
import os
import pickle
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import checkpoints
import linattn_edge as la
from cases import NOJIT
from linattn_edge.errors import CheckpointError, NotFiniteError, StateMismatchError

pytestmark = pytest.mark.nojit
GOLDEN = Path(os.environ.get("LINATTN_GOLDEN", Path(__file__).parents[2] / "shared" / "golden"))
IDS = np.random.default_rng(5).integers(0, 19, 90)
T = 12 if NOJIT else 90  # interpreted kernels are slow

VARIANTS = {
    "elu": ("linear_attn", {}),
    "elu, not normalised": ("linear_attn", {"norm_feature_map": False}),
    "relu, tied": ("linear_attn", {"feature_map": "relu", "tie_word_embeddings": True, "norm_feature_map": False}),
    "identity": ("linear_attn", {"feature_map": "identity", "norm_feature_map": False}),
    "dpfp": ("linear_attn", {"feature_map": "dpfp"}),
    "hedgehog": ("linear_attn", {"feature_map": "hedgehog", "num_kv_heads": 2}),
    "hedgehog, tied map": ("linear_attn", {"feature_map": "hedgehog", "tie_feature_map_qk": True}),
    "t2r": ("linear_attn", {"feature_map": "t2r", "norm_feature_map": False}),
    "product": ("linear_attn", {"feature_map": "elementwise_product", "norm_feature_map": False}),
    "sums": ("linear_attn", {"norm_q": True, "norm_k": True, "num_kv_heads": 1}),
    "sum of k": ("linear_attn", {"norm_k": True, "norm_feature_map": False, "expand_k": 0.5, "expand_v": 2.0}),
    "no weights in norms": ("linear_attn", {"elementwise_affine": None}),
    "gla": ("gla", {}),
    "gla, fused names": ("gla", {"fuse_norm": True}),
    "gla, clamp": ("gla", {"clamp_min": -0.05, "gate_logit_normalizer": 2}),
    "gla, convolutions": ("gla", {"use_short_conv": True, "num_kv_heads": 1}),
    "gla, short convolutions": ("gla", {"use_short_conv": True, "conv_size": 2, "expand_k": 1.0}),
    "gla, no gate": ("gla", {"use_output_gate": False, "norm_eps": 1e-3}),
    **{f"gla, {act}": ("gla", {"feature_map": act}) for act in ("relu", "sqrelu", "swish", "sigmoid", "gelu")},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name → (folder, logits [T, vocab] of IDS)."""
    found = {}

    def make(name):
        if name not in found:
            kind, changes = VARIANTS[name]
            config = checkpoints.BASE[kind] | changes
            tensors = checkpoints.make_tensors(config)
            folder = checkpoints.write(tmp_path_factory.mktemp("model") / "m", config, tensors)
            found[name] = folder, checkpoints.forward(config, tensors, IDS)
        return found[name]

    return make


def by_steps(model, ids):
    state = model.init_state(len(ids))
    return np.stack([model.step(column, state) for column in ids.T], axis=1)


@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_the_plain_forward_pass(name, made):
    folder, expected = made(name)
    ids, expected = IDS[:T], expected[:T]
    model = la.load_model(folder)
    state = model.init_state(1)
    whole = model.prefill(ids[None], state)
    assert whole.dtype == np.float32
    np.testing.assert_allclose(whole[0], expected, rtol=0, atol=2e-5)
    np.testing.assert_array_equal(by_steps(model, ids[None]), whole)  # any split rounds alike
    state = model.init_state(1)
    parts = [
        model.prefill(ids[None, :7], state),
        model.step(ids[7:8], state)[:, None],
        model.prefill(ids[None, 8:], state),
    ]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    assert state.position == T


@pytest.mark.parametrize("name", ["elu", "gla, convolutions", "hedgehog"])
def test_ragged_batches(name, made):
    folder, expected = made(name)
    model = la.load_model(folder)
    lengths = [T, 0, T // 7, T - 6]
    ids = np.zeros((4, T), int)
    for row, length in zip(ids, lengths, strict=True):
        row[:length] = IDS[:length]
    state = model.init_state(4)
    logits = model.prefill(ids, state, lengths)
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(logits[row, :length], expected[:length], rtol=0, atol=2e-5)
        assert not logits[row, length:].any()
    assert state.position.tolist() == lengths
    last = model.prefill(ids, model.init_state(4), lengths, logits="last")
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(last[row], expected[length - 1] if length else 0, rtol=0, atol=2e-5)
    following = model.step(IDS[[0, 0, *lengths[2:]]], state)  # and the streams go on where they were
    np.testing.assert_allclose(following[1:], expected[[0, *lengths[2:]]], rtol=0, atol=2e-5)


@pytest.mark.parametrize("folder", sorted(GOLDEN.glob("*/config.json")), ids=lambda path: path.parent.name)
def test_logits_are_those_of_fla(folder):
    folder = folder.parent
    if json.loads((folder / "config.json").read_text())["model_type"] not in ("linear_attn", "gla"):
        pytest.skip("another model type")
    tokens, expected = np.load(folder / "tokens.npy"), np.load(folder / "logits.npy")
    model = la.load_model(folder)
    np.testing.assert_allclose(model.prefill(tokens, model.init_state(2)), expected, rtol=0, atol=2e-5)
    np.testing.assert_allclose(by_steps(model, tokens), expected, rtol=0, atol=2e-5)
    ragged = model.prefill(tokens, model.init_state(2), lengths=[24, 11])
    np.testing.assert_allclose(ragged[1, :11], expected[1, :11], rtol=0, atol=2e-5)


def test_the_golden_checkpoints_are_there():
    if not list(GOLDEN.glob("*/config.json")):
        pytest.skip("no golden checkpoints beside the project; set LINATTN_GOLDEN to their folder")


@pytest.mark.parametrize(("weights", "off"), [("float16", 2e-2), ("int8", 0.4)])
@pytest.mark.parametrize("name", ["elu", "gla"])
def test_smaller_weights_give_nearly_the_same(name, weights, off, made):
    folder, expected = made(name)
    logits = la.load_model(folder, weights).prefill(IDS[None], la.load_model(folder, weights).init_state(1))[0]
    assert 0 < np.abs(logits - expected).max() < off


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_checkpoints(dtype, made, tmp_path):
    config = checkpoints.BASE["gla"]
    kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    tensors = {name: a.astype(kind) for name, a in checkpoints.make_tensors(config).items()}
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_raw(folder / "model.safetensors", tensors, "F16" if dtype == "float16" else "BF16")
    model = la.load_model(folder)
    rounded = {name: a.astype(np.float32) for name, a in tensors.items()}
    expected = checkpoints.forward(config, rounded, IDS)
    np.testing.assert_allclose(model.prefill(IDS[None], model.init_state(1))[0], expected, rtol=0, atol=2e-5)


def write_raw(path, tensors, dtype):
    """A safetensors file by hand: safetensors.numpy has no bfloat16."""
    header, data = {}, b""
    for name, a in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(a.shape), "data_offsets": [len(data), len(data) + a.nbytes]}
        data += a.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_shards(made, tmp_path):
    config = checkpoints.BASE["linear_attn"]
    tensors = checkpoints.make_tensors(config)
    folder = tmp_path / "shards"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in files.items():
        save_file({name: tensors[name] for name in some}, folder / file)
    where = {name: file for file, some in files.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    model = la.load_model(folder)
    np.testing.assert_allclose(model.prefill(IDS[None], model.init_state(1))[0], made("elu")[1], rtol=0, atol=2e-5)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors: there is no such file"):
        la.load_model(folder)
    where[names[0]] = "../elsewhere.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CheckpointError, match="names a file outside the folder"):
        la.load_model(folder)


# what is refused


def broken(tmp_path, config=None, tensors=None, base="linear_attn"):
    c = checkpoints.BASE[base] | (config or {})
    t = checkpoints.make_tensors(checkpoints.BASE[base])
    for name, change in (tensors or {}).items():
        if change is None:
            del t[name]
        else:
            t[name] = change
    return checkpoints.write(tmp_path / "broken", c, t)


NORM = "model.layers.1.attn_norm.weight"


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"model_type": "rwkv9"}, {}, r"config\.json: model_type 'rwkv9' is not supported; known: linear_attn, gla"),
        ({"attn": {"layers": [1]}}, {}, "settings that are not supported: attn = "),
        ({"attnres_block_size": 4}, {}, "not supported: attnres_block_size = 4"),
        ({"surprise": 1}, {}, "not supported: surprise = 1"),
        ({"hidden_act": "relu"}, {}, "hidden_act = 'relu' is not supported"),
        ({"feature_map": "cosine"}, {}, "feature_map = 'cosine' is not supported"),
        ({"hidden_size": "24"}, {}, "hidden_size: expected int, got '24'"),
        ({"num_heads": 5}, {}, "num_heads = 5"),
        ({"num_heads": True}, {}, "num_heads: expected int, got True"),
        ({"num_kv_heads": 0}, {}, "num_kv_heads: expected a whole number of at least 1"),
        ({"norm_eps": -1}, {}, "norm_eps: expected a number from 0 to 1000, got -1"),
        ({"norm_eps": math.nan}, {}, "norm_eps"),
        ({"norm_eps": 10**400}, {}, "norm_eps"),
        ({"window": 0}, {}, "not supported: window = 0"),
        ({"intermediate_size": 21}, {}, r"gate_proj\.weight has shape \[20, 24\], expected \[21, 24\]"),
        ({"intermediate_size": None}, {}, r"gate_proj\.weight has shape \[20, 24\], expected \[256, 24\]"),
        ({"elementwise_affine": False}, {}, "unknown tensors"),
        ({}, {NORM: None}, r"attn_norm\.weight is missing"),
        ({"num_hidden_layers": 3}, {}, r"tensor model\.layers\.2\."),
        ({}, {"lm_head.weight": None}, r"tensor lm_head\.weight is missing"),
        ({}, {"model.extra": np.ones(2, np.float32)}, r"unknown tensors: model\.extra"),
        ({}, {NORM: np.ones(23, np.float32)}, r"model\.layers\.1\.attn_norm\.weight has shape \[23\], expected \[24\]"),
        ({}, {NORM: np.ones(24)}, r"model\.layers\.1\.attn_norm\.weight is F64, expected one of F32"),
        ({}, {NORM: np.full(24, np.nan, np.float32)}, r"model\.layers\.1\.attn_norm\.weight holds NaN or inf"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_named(config, tensors, message, tmp_path):
    with pytest.raises(CheckpointError, match=message) as caught:
        la.load_model(broken(tmp_path, config, tensors))
    assert "\n" not in str(caught.value)


def test_gla_settings_that_are_not_supported(tmp_path):
    for config in ({"use_gk": False}, {"use_gv": True}, {"feature_map": "softmax"}, {"gate_fn": "relu"}):
        with pytest.raises(CheckpointError, match="is not supported"):
            la.load_model(broken(tmp_path, config, base="gla"))
    for config in ({"clamp_min": 5.0}, {"clamp_min": math.nan}, {"gate_logit_normalizer": 0}):
        with pytest.raises(CheckpointError, match="expected a number from"):
            la.load_model(broken(tmp_path, config, base="gla"))


def test_maps_that_say_they_are_tied_and_are_not(tmp_path):
    config = checkpoints.BASE["linear_attn"] | {"feature_map": "hedgehog"}
    tensors = checkpoints.make_tensors(config)
    folder = checkpoints.write(tmp_path / "m", config | {"tie_feature_map_qk": True}, tensors)
    with pytest.raises(CheckpointError, match="different weights for q and k"):
        la.load_model(folder)
    for name in list(tensors):
        if name.endswith("feature_map_q.layer.bias"):
            del tensors[name]
    with pytest.raises(CheckpointError, match=r"feature_map_q\.layer\.bias is missing"):
        la.load_model(checkpoints.write(tmp_path / "m", config, tensors))


def test_weights_beyond_float16_are_refused(tmp_path):
    folder = broken(tmp_path, tensors={"lm_head.weight": np.full((19, 24), 1e5, np.float32)})
    la.load_model(folder)
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight holds 100000, which float16 can't"):
        la.load_model(folder, "float16")


def test_int8_of_the_smallest_numbers():
    from linattn_edge.kernels import program
    from linattn_edge.models.assembly import Matrix

    tiny = Matrix.pack("m", np.array([[2.6e-43, -1e-43], [0, 0], [1, -0.5]], np.float32), "int8")
    assert tiny.numbers.shape == (1, 2, program.LANES)  # rows lie side by side
    assert tiny.numbers[0, :, :3].T.tolist() == [[0, 0], [0, 0], [127, -64]]


def test_a_named_pipe_is_no_checkpoint(tmp_path):
    if not hasattr(os, "mkfifo"):
        pytest.skip("this system has no named pipes")
    folder = broken(tmp_path)
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="there is no such file"):
        la.load_model(folder)


def test_states_of_other_convolutions_are_refused(made, tmp_path):
    """The same layers, but a decoder that would look for past tokens where there are none."""
    config = checkpoints.BASE["gla"] | {"num_kv_heads": 1}
    plain = la.load_model(checkpoints.write(tmp_path / "m", config, checkpoints.make_tensors(config))).init_state(1)
    model = la.load_model(made("gla, convolutions")[0])
    assert [s._fingerprint for s in plain.layers] == [layer.fingerprint for layer in model.layers]
    with pytest.raises(StateMismatchError, match="another model"):
        model.step([3], plain)


def test_room_for_other_sizes_is_given_back(made):
    model = la.load_model(made("elu")[0])
    for n in range(1, 9):
        model.prefill(np.zeros((n, n), int), model.init_state(n))
    assert len(model._work) <= 2


def test_damaged_files_are_one_line(tmp_path):
    folder = broken(tmp_path)
    path = folder / "model.safetensors"
    good = path.read_bytes()
    cases = [b"", good[:4], good[:100], good[:-8], struct.pack("<Q", 2**60) + good[8:], good[:8] + b"[" + good[9:]]
    header = json.loads(good[8 : 8 + struct.unpack("<Q", good[:8])[0]])
    for change in ({"shape": [-1, 24]}, {"data_offsets": [0, 2**50]}, {"shape": None}, {"dtype": 4}):
        name = "model.embeddings.weight"
        text = json.dumps(header | {name: header[name] | change}).encode()
        cases.append(struct.pack("<Q", len(text)) + text + good)
    for data in cases:
        path.write_bytes(data)
        with pytest.raises(CheckpointError) as caught:
            la.load_model(folder)
        assert "\n" not in str(caught.value)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: there is no such file"):
        la.load_model(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json: not readable as JSON"):
        la.load_model(folder)
    with pytest.raises(CheckpointError, match=r"config\.json: there is no such file"):
        la.load_model(tmp_path)
    with pytest.raises(ValueError, match="weights: expected one of float32, float16, int8"):
        la.load_model(folder, weights="int4")


def test_misuse_of_a_model(made):
    model = la.load_model(made("elu")[0])
    state = model.init_state(2)
    for tokens, message in (
        ([1], "tokens: expected shape"),
        ([1, 19], "tokens: expected ids from 0 to 18, got 1 to 19"),
        ([-1, 1], "tokens: expected ids from 0 to 18"),
        ([0.5, 1.0], "tokens: expected integers"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            model.step(tokens, state)
    assert not state.position.any()
    with pytest.raises(StateMismatchError, match="another model"):
        model.step([1, 2], la.load_model(made("gla")[0]).init_state(2))
    with pytest.raises(StateMismatchError, match="expected a ModelState"):
        model.step([1, 2], None)
    with pytest.raises(ValueError, match="logits: expected 'all' or 'last'"):
        model.prefill([[1], [2]], state, logits="none")
    assert model.prefill(np.zeros((2, 0), int), state).shape == (2, 0, 19)
    assert model.prefill(np.zeros((2, 0), int), state, logits="last").shape == (2, 19)
    assert model.step(np.zeros(0, int), model.init_state(0)).shape == (0, 19)
    assert model.prefill(np.zeros((0, 3), int), model.init_state(0)).shape == (0, 3, 19)


# states


@pytest.mark.parametrize("name", ["elu", "gla, convolutions"])
def test_states_copy_select_reset_save_and_load(name, made, tmp_path):
    folder, expected = made(name)
    model = la.load_model(folder)
    state = model.init_state(2)
    model.prefill(np.stack([IDS[:20], IDS[20:40]]), state)
    twin = state.copy()
    both = state.select([1, 0, 0])
    state.save(tmp_path / "state.safetensors")
    loaded = model.load_state(tmp_path / "state.safetensors")
    right = model.step([IDS[20], 3], state)
    np.testing.assert_allclose(right[0], expected[20], rtol=0, atol=2e-5)
    np.testing.assert_array_equal(model.step([IDS[20], 3], twin), right)
    np.testing.assert_array_equal(model.step([IDS[20], 3], loaded), right)
    np.testing.assert_array_equal(model.step([3, IDS[20], IDS[20]], both), right[[1, 0, 0]])
    state.reset([0])
    np.testing.assert_allclose(model.step([IDS[0], 1], state)[0], expected[0], rtol=0, atol=2e-5)
    other = la.load_model(made("gla" if name == "elu" else "elu")[0])
    with pytest.raises(StateMismatchError, match="another model"):
        other.load_state(tmp_path / "state.safetensors")
    assert state.nbytes == model.init_state(1).nbytes * 2


@pytest.mark.parametrize("name", ["elu", "gla, convolutions"])
def test_copies_hold_addresses_of_their_own(name, made):
    """A state knows where its arrays are: a copy that pointed to another's would change it, or read what is gone."""
    model = la.load_model(made(name)[0])
    state = model.init_state(2)
    model.prefill(IDS[:10].reshape(2, 5), state)
    twins = [copy.copy(state), copy.deepcopy(state), pickle.loads(pickle.dumps(state))]
    right = model.step([1, 2], state)
    later = model.step([3, 4], state)
    del state
    for twin in twins:
        np.testing.assert_array_equal(model.step([1, 2], twin), right)
        np.testing.assert_array_equal(model.step([3, 4], twin), later)
    with pytest.raises(AttributeError):
        twin.layers = ()
    assert copy.copy(model) is copy.deepcopy(model) is model
    with pytest.raises(TypeError, match="load_model"):
        pickle.dumps(model)


def test_a_state_file_with_nan_is_refused(made, tmp_path):
    model = la.load_model(made("elu")[0])
    state = model.init_state(1)
    state.layers[1].S[...] = np.nan
    state.save(tmp_path / "nan.safetensors")
    with pytest.raises(NotFiniteError, match=r"layers\.1\.S holds NaN"):
        model.load_state(tmp_path / "nan.safetensors")


# generation


def test_generation_is_what_stepping_gives(made):
    model = la.load_model(made("gla")[0])
    got = list(model.generate(IDS[:5], 12, temperature=0))
    ids = IDS[:5].tolist()
    for _ in range(12):
        ids.append(int(np.argmax(model.prefill([ids], model.init_state(1))[0, -1])))
    assert got == ids[5:]


def test_a_seed_gives_the_same_tokens(made):
    model = la.load_model(made("elu")[0])
    once, again, other = (list(model.generate([1, 2], 40, seed=seed)) for seed in (7, 7, 8))
    assert once == again != other


def test_stop_and_state(made):
    model = la.load_model(made("elu")[0])
    free = list(model.generate([1, 2], 30, seed=3))
    stopped = list(model.generate([1, 2], 30, seed=3, stop=[free[10]]))
    assert stopped == free[: free.index(free[10])]
    state = model.init_state(1)
    list(model.generate([1, 2], 4, seed=3, state=state))
    assert state.position == 5  # the last token has not been read in
    assert list(model.generate([1], 0)) == []


def test_what_generation_refuses(made):
    model = la.load_model(made("elu")[0])
    for arguments, message in (
        ({"prompt": []}, "prompt: expected at least one id"),
        ({"prompt": [[1]]}, r"prompt: expected ids \[T\]"),
        ({"prompt": [99]}, "tokens: expected ids"),
        ({"prompt": [1], "temperature": -1}, "temperature"),
        ({"prompt": [1], "top_k": 0}, "top_k"),
        ({"prompt": [1], "top_p": 0.0}, "top_p"),
        ({"prompt": [1], "stop": [19]}, "stop"),
        ({"prompt": [1], "stop": 5}, "stop: expected ids"),
        ({"prompt": [1], "seed": -1}, "seed"),
        ({"prompt": [1], "state": "x"}, "expected a ModelState"),
        ({"prompt": [1], "max_tokens": -1}, "max_tokens"),
        ({"prompt": [1], "state": model.init_state(2)}, "state: generate runs one stream"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            model.generate(**arguments)  # at once, not at the first token


def test_probabilities_are_those_of_the_definitions():
    from linattn_edge.models import Sampler

    logits = np.array([1.0, 3.0, 2.0, 0.0], np.float32)
    p = np.exp(logits.astype(float)) / np.exp(logits.astype(float)).sum()
    np.testing.assert_allclose(Sampler().probabilities(logits), p)
    np.testing.assert_allclose(Sampler(top_k=2).probabilities(logits), np.array([0, p[1], p[2], 0]) / (p[1] + p[2]))
    np.testing.assert_allclose(Sampler(top_p=0.7).probabilities(logits), np.array([0, p[1], p[2], 0]) / (p[1] + p[2]))
    np.testing.assert_allclose(Sampler(top_p=0.1).probabilities(logits), [0, 1, 0, 0])
    np.testing.assert_allclose(Sampler(temperature=0).probabilities(logits), [0, 1, 0, 0])
    hot = np.exp(logits.astype(float) / 2)
    np.testing.assert_allclose(Sampler(temperature=2).probabilities(logits), hot / hot.sum())
    random = np.random.default_rng(0)
    counts = np.bincount([Sampler().choose(logits, random) for _ in range(20000)], minlength=4) / 20000
    np.testing.assert_allclose(counts, p, atol=0.012)  # four standard errors
    with pytest.raises(NotFiniteError):
        Sampler().choose(np.array([0, np.nan], np.float32), random)

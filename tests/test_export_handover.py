"""A live stream moves between the Python runtime and exported files, and a wrong state is refused."""

import json

import numpy as np
import pytest

import cases
import linattn_edge as la
import linattn_export as lx
import naive
from exported import FLAVORS, Exported, onnx
from linattn_edge.errors import DtypeError, NotFiniteError, ShapeError, StateMismatchError

LAYERS = [
    ("linear", None, "mha", "elu"),
    ("linear", None, "gqa", "cosformer"),
    ("gated", "channel", "gva", "identity"),
    ("delta", None, "gqa", "hedgehog heads"),
    ("gated_delta", "head", "mha", "taylor"),
]


def make(rule, gate, layout, phi, **more):
    return cases.make(rule, gate, layout, phi, normalize=rule == "linear", start=phi != "taylor", **({"T": 18} | more))


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer[0]} {layer[3]}")
def test_a_stream_moves_through_every_runtime(layer, tmp_path):
    """Python, then each flavor, then Python again: three tokens each, as if nothing had happened."""
    rule, gate, *rest = layer
    case = make(rule, gate, *rest)
    state, pieces = case.start(), []
    homes = [None, "fused", None, "portable", "standard", None]
    for n, flavor in enumerate(homes):
        part = slice(3 * n, 3 * n + 3)
        if flavor is None:
            pieces.append(case.prefill(state, part))
            continue
        folder = tmp_path / flavor
        folder.mkdir()
        exported = Exported(case, folder, flavor)
        kept = state.copy()
        feeds = lx.state_feeds(state, exported.path)
        outputs = exported.run(exported.tokens(part) | feeds)
        pieces.append(outputs["output"].reshape(pieces[0].shape))
        np.testing.assert_array_equal(kept.S, state.S)  # the feeds were copies
        position = state.position + 3
        state = lx.state_from_outputs(outputs, case.attn, exported.path, position)
        np.testing.assert_array_equal(state.position, position)
    case.check(np.concatenate(pieces, axis=1), state, 2e-5)


def test_layout_of_the_feeds(tmp_path):
    case = make("linear", None, "gqa", "cosformer")
    path = Exported(case, tmp_path, "fused").path
    state = case.start()
    state.position = [4, 7]
    feeds = lx.state_feeds(state, path)
    assert set(feeds) == {"past_state", "past_position"}
    assert feeds["past_state"].shape == (2, 2, 8, 6) and feeds["past_state"].dtype == np.float32
    np.testing.assert_array_equal(feeds["past_state"][..., :5], state.S)
    np.testing.assert_array_equal(feeds["past_state"][..., 5], state.z)
    np.testing.assert_array_equal(feeds["past_position"], [4, 7])
    for array in feeds.values():
        assert array.flags.c_contiguous and not np.may_share_memory(array, state.S)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_states_of_other_dtypes_are_fed_as_float32(dtype, tmp_path):
    case = make("gated", "head", "mha", "identity")
    path = Exported(case, tmp_path, "fused").path
    state = case.start(dtype=dtype)
    feed = lx.state_feeds(state, path)["past_state"]
    assert feed.dtype == np.float32
    np.testing.assert_array_equal(feed, state.S.astype(np.float32))


@pytest.fixture
def moved(tmp_path):
    """An exported cosformer layer, its path and good outputs."""
    case = make("linear", None, "mha", "cosformer")
    exported = Exported(case, tmp_path, "fused")
    return case, exported.path, exported.run(exported.tokens() | exported.start())


@pytest.mark.parametrize(
    ("name", "change", "error", "message"),
    [
        ("present_state", None, StateMismatchError, "outputs: present_state not among them; got "),
        ("present_position", None, StateMismatchError, "outputs: present_position not among them"),
        ("present_state", lambda a: a[..., :-1], ShapeError, r"present_state: expected shape \[B, 2, 8, 6\]"),
        ("present_state", lambda a: a[:, :, 0], ShapeError, r"present_state: expected shape"),
        ("present_state", lambda a: a.swapaxes(2, 3), ShapeError, r"present_state: expected shape"),
        ("present_state", lambda a: a.astype(np.float64), DtypeError, "present_state: expected float32, got float64"),
        ("present_state", lambda a: np.where(a == a.max(), np.nan, a), NotFiniteError, "present_state: holds NaN"),
        ("present_state", lambda a: np.where(a == a.max(), np.inf, a), NotFiniteError, "present_state: holds NaN"),
        ("present_position", lambda a: a[:1], ShapeError, r"present_position: expected shape \[B\]"),
        ("present_position", lambda a: a - 100, ValueError, "present_position: expected positions of at least 0"),
        ("present_position", lambda a: a.astype(np.int32), DtypeError, "present_position: expected int64, got int32"),
        ("present_state", lambda a: "state", DtypeError, "present_state: expected"),
    ],
)
def test_wrong_outputs_are_refused(moved, name, change, error, message):
    case, path, outputs = moved
    wrong = dict(outputs)
    if change is None:
        del wrong[name]
    else:
        wrong[name] = change(wrong[name])
    with pytest.raises(error, match=message) as caught:
        lx.state_from_outputs(wrong, case.attn, path)
    assert "\n" not in str(caught.value)
    lx.state_from_outputs(outputs, case.attn, path)


def test_other_layers_are_refused(moved):
    _, path, outputs = moved
    other = la.LinearAttention(2, 4, 5, feature_map=la.CosFormer(max_len=91))
    for call in (
        lambda: lx.state_feeds(other.init_state(2), path),
        lambda: lx.state_from_outputs(outputs, other, path),
    ):
        with pytest.raises(StateMismatchError, match=r"belongs to another layer: feature_map: .*90.* instead of .*91"):
            call()
    with pytest.raises(DtypeError, match="state: expected a State"):
        lx.state_feeds(outputs, path)
    with pytest.raises(DtypeError, match="attn: expected a LinearAttention"):
        lx.state_from_outputs(outputs, "elu", path)


def test_a_fixed_batch_is_kept(tmp_path):
    case = make("gated", "head", "mha", "identity")
    path = tmp_path / "m.onnx"
    lx.export_layer(case.attn, path, batch_size=3)
    with pytest.raises(StateMismatchError, match="takes 3 streams, the state has 2"):
        lx.state_feeds(case.start(), path)
    with pytest.raises(ShapeError, match=r"present_state: expected shape"):
        lx.state_from_outputs({"present_state": case.S0}, case.attn, path)


def test_metadata_alone_drives_a_file(tmp_path):
    """A loop that knows nothing but what `metadata_props` say."""
    for (rule, gate, layout, phi), flavor in [(layer, flavor) for layer in LAYERS for flavor in FLAVORS]:
        case = cases.make(rule, gate, layout, phi, normalize=rule == "linear", T=18)
        exported = Exported(case, tmp_path, flavor)
        said = {p.key: p.value for p in onnx.load(exported.path).metadata_props}
        contract = json.loads(said["linattn_edge"])
        B, T = 2, 18
        sizes = {"B": B, "T": T}
        arrays = exported.tokens()
        assert [t["name"] for t in contract["inputs"]] == list(arrays)
        for tensor in contract["inputs"]:
            shape = tuple(sizes.get(s, s) for s in tensor["shape"])
            assert arrays[tensor["name"]].shape == shape and arrays[tensor["name"]].dtype == tensor["dtype"]
        carried = {
            s["past"]: np.full([sizes.get(n, n) for n in s["shape"]], s["initial"], s["dtype"])
            for s in contract["states"]
        }
        block, start, pieces = contract["tokens"] or contract["block_length"] or T, 0, []
        while start < T:
            feeds = {n: a[:, start : start + block] for n, a in arrays.items()}
            found = exported.run(feeds | carried)
            pieces.append(found[contract["outputs"][0]["name"]])
            for s in contract["states"]:
                present = found[s["present"]]
                assert present.shape == carried[s["past"]].shape and present.dtype == carried[s["past"]].dtype
                carried[s["past"]] = present
            start += block
        naive.assert_close(np.concatenate(pieces, axis=1).reshape(case.expected[0].shape), case.expected[0], 2e-5)
        (layer,) = contract["layers"]
        assert layer["update_rule"] == rule and layer["feature_map"]["name"] == case.attn.layer.phi.name
        assert {"scale", "eps", "eps_mode", "normalize", "qk_norm"} <= set(layer)
        assert contract["format_version"] == 1 and contract["exporter_version"] == la.__version__


def test_reading_a_contract(tmp_path):
    attn = la.LinearAttention(2, 4)
    written = lx.export_layer(attn, tmp_path / "m.onnx", "portable", tokens=1)
    read = lx.read_contract(tmp_path / "m.onnx")
    assert read.states == written.states and read.inputs == written.inputs and read.tokens == 1
    assert read.lengths(3) == [1, 1, 1]
    assert lx.export_layer(attn, tmp_path / "m.onnx", "portable").lengths(300) == [128, 128, 44]
    assert lx.export_layer(attn, tmp_path / "m.onnx").lengths(300) == [300]
    with pytest.raises(ValueError, match="takes 2 tokens a call; 3 is no multiple"):
        lx.export_layer(attn, tmp_path / "m.onnx", tokens=2).lengths(3)


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "m.onnx"
    with pytest.raises(FileNotFoundError):
        lx.read_contract(path)
    path.write_bytes(b"\xff\x00 not a model")
    with pytest.raises(StateMismatchError, match="not an ONNX file"):
        lx.read_contract(path)
    lx.export_layer(la.LinearAttention(2, 4), path)
    model = onnx.load(path)
    del model.metadata_props[:]
    onnx.save(model, path)
    with pytest.raises(StateMismatchError, match="not written by linattn_export"):
        lx.read_contract(path)


def damage(change):
    def apply(said):
        change(said)
        return json.dumps(said)

    return apply


@pytest.mark.parametrize(
    "write",
    [
        lambda said: "{",
        lambda said: "[" * 100_000,
        lambda said: "[]",
        lambda said: "3",
        damage(lambda said: said.update(format_version=2)),
        damage(lambda said: said.update(format_version=None)),
        damage(lambda said: said.pop("states")),
        damage(lambda said: said.update(states={})),
        damage(lambda said: said["states"][0].update(dtype="object")),
        damage(lambda said: said["states"][0].update(shape=["B", -1])),
        damage(lambda said: said["states"][0].update(shape="B")),
        damage(lambda said: said["states"][0].update(shape=[["B"]])),
        damage(lambda said: said["states"][0].update(shape=[None])),
        damage(lambda said: said["states"][0].update(past=3)),
        damage(lambda said: said["states"][0].update(past="query")),
        damage(lambda said: said["states"][0].update(layer=1)),
        damage(lambda said: said["states"][0].update(holds="secrets")),
        damage(lambda said: said["states"][0].update(initial="0")),
        damage(lambda said: said.update(layers=["x"])),
        damage(lambda said: said.update(kind="graph")),
        damage(lambda said: said.update(flavor=["fused"])),
        damage(lambda said: said.update(batch_size="many")),
        damage(lambda said: said.update(tokens=True)),
        damage(lambda said: said["inputs"].append(3)),
        damage(lambda said: said.update(tokens=0)),
        damage(lambda said: said.update(states=[])),
        damage(lambda said: said.update(inputs=[])),
        damage(lambda said: said["states"][0].update(shape=[])),
        damage(lambda said: said["states"][0].update(shape=["B", "T", 3])),
        damage(lambda said: said["states"][0].update(initial=10**400)),
        lambda said: json.dumps(said).replace('"initial": 0.0', '"initial": ' + "9" * 5000),
    ],
)
def test_damaged_metadata_is_refused_in_one_line(write, tmp_path):
    path = tmp_path / "m.onnx"
    attn = la.LinearAttention(2, 4)
    lx.export_layer(attn, path)
    model = onnx.load(path)
    (entry,) = model.metadata_props
    entry.value = write(json.loads(entry.value))
    onnx.save(model, path)
    for call in (lambda: lx.read_contract(path), lambda: lx.state_feeds(attn.init_state(), path)):
        with pytest.raises(StateMismatchError, match=r"metadata|format_version") as caught:
            call()
        assert "\n" not in str(caught.value)


def test_metadata_that_are_no_text(tmp_path):
    path = tmp_path / "m.onnx"
    lx.export_layer(la.LinearAttention(2, 4), path)
    path.write_bytes(path.read_bytes().replace(b'"flavor"', b'"fl\xffvor"'))
    with pytest.raises(StateMismatchError, match=r"not an ONNX file|not JSON"):
        lx.read_contract(path)


def test_a_contract_that_names_other_tensors_is_followed(tmp_path):
    """Names come from the file, not from habit."""
    attn = la.LinearAttention(2, 4)
    path = tmp_path / "m.onnx"
    lx.export_layer(attn, path)
    model = onnx.load(path)
    (entry,) = model.metadata_props
    entry.value = entry.value.replace("past_state", "before").replace("present_state", "after")
    onnx.save(model, path)
    feeds = lx.state_feeds(attn.init_state(), path)
    assert list(feeds) == ["before"]
    state = lx.state_from_outputs({"after": feeds["before"] + 1}, attn, path)
    assert (state.S == 1).all() and (state.z == 1).all()

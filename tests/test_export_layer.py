"""Exported layers in ONNX Runtime against the float64 oracles: every rule, map, head layout and flavor."""

import itertools
import math
import sys

import numpy as np
import pytest

import cases
import linattn_edge as la
import linattn_export as lx
import naive
from exported import FLAVORS, Exported, decay_kind, onnx, ort, session
from linattn_edge.features import MAPS
from linattn_export.graph import Graph
from linattn_export.maps import NODES

CHAIN = [1, 2, 7, 64, 128]
EVERY_MAP = [*cases.SAMPLES, *cases.OF_HEADS]
LAYOUTS = list(cases.LAYOUTS)


def positive(phi):
    return cases.sample(phi).positive and phi not in ("taylor", "taylor3")


def make(rule, gate, layout, phi, T, **more):
    """A case of T tokens; normalised where the rule has a normaliser and the map is positive."""
    rest = {"B": 1, "K": 4, "V": 5, "normalize": rule in ("linear", "gated") and positive(phi)}
    rest["start"] = phi not in cases.SERIES
    return cases.make(rule, gate, layout, phi, T=T, **(rest | more))


def chained(rule, gate, layout, phi, whole=True):
    """202 tokens; 74 where that is enough, and within cosformer's horizon of 90."""
    T = sum(CHAIN) if whole and phi != "cosformer" else sum(CHAIN[:4])
    if (gate, phi in cases.SERIES) != ("channel", True):
        return make(rule, gate, layout, phi, T)
    case = make(rule, "head", layout, phi, T)  # the oracle's series has no channels: it takes the library's φ
    layer = case.attn.layer
    g = -0.1 * abs(np.random.default_rng(5).standard_normal((*case.g.shape, layer.F)))
    cases.harden(g, np.random.default_rng(6))
    case = case.with_(g=g.astype(np.float32))
    case.expected = case.oracle(phi=naive.Map(layer.phi.query))
    return case


def check_every_flavor(case, folder):
    lengths = CHAIN if case.q.shape[1] == sum(CHAIN) else CHAIN[:4]
    for flavor in FLAVORS:
        Exported(case, folder, flavor).check(lengths, what=flavor)
    Exported(case, folder, "portable", tokens=1).check([1] * case.q.shape[1], what="portable step")


@pytest.mark.parametrize("phi", EVERY_MAP)
@pytest.mark.parametrize(("rule", "gate"), cases.VARIANTS)
def test_every_rule_and_map(rule, gate, phi, tmp_path):
    """The head layouts take turns, so that every map and every rule meets each of them; all at once is slow."""
    turn = cases.VARIANTS.index((rule, gate)) + EVERY_MAP.index(phi)
    check_every_flavor(chained(rule, gate, LAYOUTS[turn % len(LAYOUTS)], phi, whole=False), tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("rule", "gate"), cases.VARIANTS)
def test_every_rule_and_layout(rule, gate, layout, tmp_path):
    check_every_flavor(chained(rule, gate, layout, "elu" if rule == "linear" else "identity"), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("phi", EVERY_MAP)
@pytest.mark.parametrize(("rule", "gate"), cases.VARIANTS)
def test_every_combination(rule, gate, phi, layout, tmp_path):
    check_every_flavor(chained(rule, gate, layout, phi), tmp_path)


@pytest.mark.parametrize(("rule", "gate"), cases.VARIANTS)
@pytest.mark.parametrize("splits", [[1] * 15, [15], [3, 1, 11], [8, 7], [9, 6]])
def test_any_split_and_batch(rule, gate, splits, tmp_path):
    case = make(rule, gate, "gqa", "elu" if rule == "linear" else "identity", 15, B=3)
    for flavor in FLAVORS:
        Exported(case, tmp_path, flavor).check(splits, what=flavor)


@pytest.mark.parametrize(("rule", "gate"), cases.VARIANTS)
@pytest.mark.parametrize("layout", ["mha", "gqa"])
@pytest.mark.parametrize("tokens", [1, 2, 13, 64])
def test_fixed_sizes(rule, gate, layout, tokens, tmp_path):
    case = make(rule, gate, layout, "elu" if rule == "linear" else "identity", 2 * tokens, B=2)
    for flavor in FLAVORS:
        exported = Exported(case, tmp_path, flavor, batch_size=2, tokens=tokens)
        exported.check([tokens, tokens], what=flavor)
        assert all(isinstance(n, int) for i in exported.session.get_inputs() for n in i.shape)


def hard_keys(kind, K, T, rng):
    """Keys [1, T, 1, K] that break a careless inverse."""
    if kind == "identical":
        keys = np.tile(rng.standard_normal(K), (T, 1))
    elif kind == "cosine 0.8":
        common = rng.standard_normal(K)
        other = rng.standard_normal((T, K))
        other -= np.outer(other @ common, common) / (common @ common)
        keys = 0.8**0.5 * common / np.linalg.norm(common) + 0.2**0.5 * other / np.linalg.norm(
            other, axis=1, keepdims=True
        )
    else:
        keys = np.maximum(rng.standard_normal((T, K)), 0) + 1e-3
    return (keys / np.linalg.norm(keys, axis=1, keepdims=True))[None, :, None]


@pytest.mark.parametrize("rule", ["delta", "gated_delta"])
@pytest.mark.parametrize("beta", [0.9, 1.0, 1.9])
@pytest.mark.parametrize("kind", ["identical", "cosine 0.8", "relu"])
def test_keys_that_repeat(kind, beta, rule, tmp_path):
    rng = np.random.default_rng(7)
    T = 192
    case = make(rule, "head" if rule == "gated_delta" else None, "gva", "identity", T, K=16, V=8)
    k = np.repeat(hard_keys(kind, 16, T, rng), 2, axis=2).astype(np.float32)
    g = None if case.g is None else np.where(rng.random(case.g.shape) < 0.02, -np.inf, -0.01).astype(np.float32)
    case = case.with_(k=k, beta=np.full_like(case.beta, beta), g=g)
    for flavor in FLAVORS:
        Exported(case, tmp_path, flavor).check([128, 64], what=flavor)


@pytest.mark.parametrize(("rule", "gate"), cases.VARIANTS)
def test_silence_through_a_map(rule, gate, tmp_path):
    """The same token over and over."""
    case = make(rule, gate, "mha", "elu", 128)
    same = {n: np.repeat(getattr(case, n)[:, :1], 128, axis=1) for n in ("q", "k", "v")}
    if case.beta is not None:
        same["beta"] = np.repeat(case.beta[:, :1], 128, axis=1)
    case = case.with_(**same)
    for flavor in FLAVORS:
        Exported(case, tmp_path, flavor).check([128], what=flavor)


@pytest.mark.parametrize(("rule", "gate"), [v for v in cases.VARIANTS if v[1]])
@pytest.mark.parametrize("value", [-np.inf, -1e30, -104.0, math.log(1e-12), -1e-7, 0.0])
def test_one_decay_for_every_token_and_among_others(value, rule, gate, tmp_path):
    case = make(rule, gate, "mha", "identity", 128, hard=False, normalize=False)
    rng = np.random.default_rng(3)
    for g in (np.full_like(case.g, value), np.where(rng.random(case.g.shape) < 0.3, value, case.g)):
        hard = case.with_(g=g.astype(np.float32))
        for flavor in FLAVORS:
            Exported(hard, tmp_path, flavor).check([128], what=flavor)


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
@pytest.mark.parametrize("shape", ["head", "channel"])
def test_constant_decay(rule, shape, flavor, tmp_path):
    constant = np.array([[-0.3, -0.02, -np.inf, -50], [-1e-3, -1.0, 0.0, -5]])[:, : 1 if shape == "head" else 4]
    case = make(rule, "channel", "mha", "identity", 70, hard=False, B=2)
    case = case.with_(g=np.broadcast_to(constant[None, None], (2, 70, *constant.shape)).astype(np.float32))
    given = case.with_(options={"decay": constant[:, 0] if shape == "head" else constant})
    given.expected = case.expected
    for tokens in [None, 1] if flavor == "portable" else [None]:
        exported = Exported(given, tmp_path, flavor, tokens=tokens)
        assert "decay" not in [tensor.name for tensor in exported.contract.inputs]
        exported.check([1] * 70 if tokens else [1, 5, 64])


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize(
    "options",
    [
        {"scale": 0.7},
        {"scale": -2.0},
        {"qk_norm": True},
        {"normalize": True, "eps": 0.5, "eps_mode": "add"},
        {"normalize": True, "eps": 0.0, "eps_mode": "add"},
        {"normalize": True, "eps": 2.0},
        {"normalize": True, "eps": 1e-30, "qk_norm": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("phi", ["elu", "identity"])
def test_options(options, phi, flavor, tmp_path):
    options = {"normalize": False} | options
    case = make("gated", "head", "gqa", phi, 21, **options)
    if options["normalize"] and phi == "identity":  # keep the denominator away from zero
        case = case.with_(q=abs(case.q) + 0.1, k=abs(case.k), z0=abs(case.z0))
    Exported(case, tmp_path, flavor).check([1, 20])
    if flavor == "portable":
        Exported(case, tmp_path, flavor, tokens=1).check([1] * 21)


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_denominator_near_zero_keeps_its_sign(sign, flavor, tmp_path):
    case = make("linear", None, "mha", "identity", 1, normalize=True, eps=1e-2)
    case = case.with_(q=np.full_like(case.q, 1), k=np.zeros_like(case.k), z0=np.full_like(case.z0, sign * 1e-4))
    for tokens in [None, 1] if flavor == "portable" else [None]:
        Exported(case, tmp_path, flavor, tokens=tokens).check([1])


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize(("rule", "gate"), cases.VARIANTS)
def test_float16(rule, gate, flavor, tmp_path):
    case = make(rule, gate, "gqa", "elu" if rule == "linear" else "identity", 74, dtype=np.float16, hard=False)
    if gate is not None:
        case.g[:, [3, 40, 41], 0] = -np.inf
        case.g[:, [8, 50], 1] = -25
    exported = Exported(case, tmp_path, flavor, dtype="float16")
    exported.check([1, 2, 7, 64], bound=1e-3)
    kinds = {i.name: i.type for i in [*exported.session.get_inputs(), *exported.session.get_outputs()]}
    assert kinds["past_state"] == kinds["present_state"] == "tensor(float)"
    assert {kinds[n] for n in kinds if not n.endswith("_state")} == {"tensor(float16)"}


@pytest.mark.parametrize("flavor", FLAVORS)
@pytest.mark.parametrize("layout", ["mha", "gqa", "gva"])
@pytest.mark.parametrize(("rule", "gate"), cases.VARIANTS)
def test_past_and_present_in_one_buffer(rule, gate, layout, flavor, tmp_path):
    case = make(rule, gate, layout, "elu" if rule == "linear" else "identity", 40)
    for tokens in [None, 1, 20] if flavor == "portable" else [None]:
        exported = Exported(case, tmp_path, flavor, tokens=tokens)
        lengths = [1] * 40 if tokens == 1 else [20, 20] if tokens else [1, 7, 32]
        state = ort.OrtValue.ortvalue_from_numpy(exported.start()["past_state"])
        pieces, start = [], 0
        for length in lengths:
            feeds = {n: np.ascontiguousarray(a) for n, a in exported.tokens(slice(start, start + length)).items()}
            binding = exported.session.io_binding()
            for name, array in feeds.items():
                binding.bind_cpu_input(name, array)
            binding.bind_ortvalue_input("past_state", state)
            binding.bind_ortvalue_output("present_state", state)
            binding.bind_output("output")
            exported.session.run_with_iobinding(binding)
            pieces.append(binding.get_outputs()[1].numpy().copy())
            start += length
        want, S, z = case.expected
        y = np.concatenate(pieces, axis=1).reshape(want.shape)
        naive.assert_close(y, want, 2e-5, f"output, tokens = {tokens}")
        S = S if z is None else np.concatenate([S, z[..., None]], axis=-1)
        naive.assert_close(state.numpy().copy(), S, 2e-5, "state")


def every_graph():
    """A file of each flavor and form for rules and maps of each kind."""
    for flavor, (rule, gate), phi in itertools.product(FLAVORS, cases.VARIANTS, ["elu", "cosformer", "hedgehog heads"]):
        for sizes in ({}, {"tokens": 1}, {"batch_size": 2, "tokens": 16}):
            yield flavor, rule, gate, phi, sizes


def test_every_file_passes_the_checker_and_has_all_shapes(tmp_path):
    for flavor, rule, gate, phi, sizes in every_graph():
        case = make(rule, gate, "gqa", phi, 1)
        lx.export_layer(case.attn, tmp_path / "m.onnx", flavor, decay=gate or "head", **sizes)
        onnx.checker.check_model(str(tmp_path / "m.onnx"), full_check=True)
        model = onnx.load(tmp_path / "m.onnx")
        assert model.ir_version <= 10
        assert model.opset_import[0].version == (27 if flavor == "standard" else 17)
        inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True).graph
        known = {v.name: v.type.tensor_type for v in [*inferred.input, *inferred.output, *inferred.value_info]}
        for node in inferred.node:
            for name in node.output:
                assert name in known and known[name].elem_type and known[name].HasField("shape"), (flavor, rule, name)
        if flavor == "portable":
            assert not model.functions
            assert not {"Scan", "Loop", "If"} & {node.op_type for node in model.graph.node}
            assert {node.domain for node in model.graph.node} == {""}


@pytest.mark.parametrize(("rule", "gate"), cases.VARIANTS)
def test_fixing_the_sizes_leaves_no_open_ones(rule, gate, tmp_path):
    case = make(rule, gate, "gqa", "elu", 1)
    lx.export_layer(case.attn, tmp_path / "m.onnx", "portable", decay=gate or "head", batch_size=1, tokens=1)
    ops = [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node]
    assert not {"Shape", "Slice", "Expand", "Range"} & set(ops)
    assert len(ops) < 40


@pytest.mark.parametrize(("rule", "gate"), cases.VARIANTS)
def test_standard_agrees_with_the_reference_evaluator(rule, gate, tmp_path):
    from onnx.reference import ReferenceEvaluator

    for layout in LAYOUTS:
        case = make(rule, gate, layout, "identity", 9, normalize=False)
        exported = Exported(case, tmp_path, "standard")
        nodes = [node for node in onnx.load(exported.path).graph.node if node.op_type == "LinearAttention"]
        assert [(node.domain, [a.f for a in node.attribute if a.name == "scale"]) for node in nodes] == [("", [0.5])]
        found = ReferenceEvaluator(str(exported.path)).run(None, exported.tokens() | exported.start())
        y, S, _ = case.expected
        naive.assert_close(found[0].reshape(y.shape), y, 2e-5)
        naive.assert_close(found[1], S, 2e-5)


def test_the_function_in_a_fused_file_gives_the_same(tmp_path):
    """What a runtime without the operator makes of the file."""
    from onnx.inliner import inline_local_functions

    for (rule, gate), layout in itertools.product(cases.VARIANTS, LAYOUTS):
        case = make(rule, gate, layout, "elu" if rule == "linear" else "identity", 20)
        exported = Exported(case, tmp_path, "fused")
        model = inline_local_functions(onnx.load(exported.path))
        assert not model.functions and "LinearAttention" not in {node.op_type for node in model.graph.node}
        onnx.save(model, exported.path)
        exported.session = session(exported.path)
        exported.check([1, 5, 14], what=f"{rule} {gate} {layout}")


def test_no_tokens(tmp_path):
    """Not `standard`: ONNX Runtime's expansion of the operator has no T = 0."""
    for (rule, gate), flavor in itertools.product(cases.VARIANTS, ["fused", "portable"]):
        case = make(rule, gate, "gqa", "elu" if rule == "linear" else "identity", 3)
        exported = Exported(case, tmp_path, flavor)
        found = exported.run(exported.tokens(slice(0, 0)) | exported.start())
        assert found["output"].shape == (1, 0, 4 * 5)
        np.testing.assert_array_equal(found["present_state"], exported.start()["past_state"])


@pytest.mark.parametrize(("rule", "gate"), [v for v in cases.VARIANTS if v[0] != "linear"])
def test_a_block_that_is_too_long_fails_loudly(rule, gate, tmp_path):
    case = make(rule, gate, "mha", "identity", 129, normalize=False)
    exported = Exported(case, tmp_path, "portable")
    assert exported.contract.block_length == 128
    with pytest.raises(Exception, match=r"(?i)dimension|shape|broadcast"):
        exported.chain([129])


def test_every_map_has_nodes():
    assert set(NODES) == set(MAPS)


@pytest.mark.parametrize("phi", cases.FUNCTIONS)
def test_functions_are_refused(phi, tmp_path):
    attn = la.LinearAttention(2, 4, feature_map=cases.sample(phi))
    with pytest.raises(ValueError, match=r"feature_map: FunctionMap.*supported: identity, elu, "):
        lx.export_layer(attn, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flavor": "tflite"}, "flavor: expected one of fused, standard, portable; got 'tflite'"),
        ({"opset": 16}, "opset: expected a whole number from 17"),
        ({"opset": 999}, "opset: expected a whole number from 17"),
        ({"flavor": "standard", "opset": 26}, "opset: expected a whole number from 27"),
        ({"dtype": "bfloat16"}, "dtype: expected one of float32, float16; got 'bfloat16'"),
        ({"decay": "token"}, "decay: expected one of head, channel; got 'token'"),
        ({"batch_size": 0}, "batch_size: expected a whole number of at least 1"),
        ({"tokens": 1.0}, "tokens: expected a whole number"),
        ({"flavor": "portable", "tokens": 129}, "tokens: expected a whole number from 1 to 128, got 129"),
    ],
)
def test_refusals(options, message, tmp_path):
    (tmp_path / "m.onnx").write_bytes(b"before")
    with pytest.raises(ValueError, match=message):
        lx.export_layer(la.LinearAttention(2, 4), tmp_path / "m.onnx", **options)
    assert (tmp_path / "m.onnx").read_bytes() == b"before"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_missing_onnx_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ImportError, match=r"needs onnx, which is not installed: pip install 'linattn-edge\[export\]'"):
        lx.export_layer(la.LinearAttention(2, 4), tmp_path / "m.onnx")


def test_only_layers_are_exported(tmp_path):
    with pytest.raises(TypeError, match="attn: expected a LinearAttention, got SoftmaxAttention"):
        lx.export_layer(la.SoftmaxAttention(2, 4), tmp_path / "m.onnx")


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "m.onnx"
    lx.export_layer(la.LinearAttention(2, 4), path)
    first = path.read_bytes()
    lx.export_layer(la.LinearAttention(2, 8), path)
    assert path.read_bytes() != first and [p.name for p in tmp_path.iterdir()] == ["m.onnx"]
    with pytest.raises(FileNotFoundError):
        lx.export_layer(la.LinearAttention(2, 4), tmp_path / "none" / "m.onnx")


@pytest.mark.parametrize(("flavor", "opset"), [("fused", 18), ("portable", 18), ("fused", 27), ("portable", 27)])
def test_a_newer_opset(flavor, opset, tmp_path):
    exported = Exported(make("gated_delta", "channel", "gqa", "hedgehog", 12), tmp_path, flavor, opset=opset)
    exported.check([12])
    assert exported.contract.opset == opset


def test_two_rules_share_no_fused_file():
    from linattn_export.fused import attend
    from linattn_export.recurrence import Parts
    from linattn_export.tokens import Tokens

    graph = Graph("fused", 17)
    names = [graph.input(n, "float32", ("B", "T", 8)) for n in ("q", "k", "v")] + [
        graph.input(n, "float32", s) for n, s in (("S", ("B", 2, 4, 4)), ("beta", ("B", "T", 2)))
    ]
    for rule, beta in (("linear", None), ("delta", names[4])):
        layer = la.LinearAttention(2, 4, feature_map="identity", update_rule=rule, normalize=False).layer
        q, k, v = (Tokens(n, 2, 4) for n in names[:3])
        if rule == "linear":
            attend(graph, Parts(layer, q, k, v, None, beta, names[3], 1))
        else:
            with pytest.raises(ValueError, match="update_rule: a file of flavor 'fused' holds layers of one rule"):
                attend(graph, Parts(layer, q, k, v, None, beta, names[3], 1))


def test_decay_kind_names_the_decay_input(tmp_path):
    case = make("gated", "channel", "gqa", "identity", 3)
    assert decay_kind(case) == "channel"
    contract = Exported(case, tmp_path, "fused").contract
    assert {t.name: t.shape for t in contract.inputs}["decay"] == ("B", "T", 2 * 4)

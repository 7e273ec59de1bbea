"""The ONNX standard's own LinearAttention cases, run through `LinearAttention` with the standard's tolerance."""

import importlib
import warnings

import numpy as np
import pytest

import linattn_edge as la

pytestmark = pytest.mark.nojit
onnx = pytest.importorskip("onnx")

NAMES = [
    "decode_step",
    "delta",
    "explicit_scale",
    "fp16",
    "gated",
    "gated_delta",
    "gated_delta_beta_scalar",
    "gated_delta_gqa",
    "gated_delta_mqa",
    "gated_per_head_decay",
    "linear",
    "linear_t1_no_past",
    "no_past_explicit_zeros",
    "prefill_with_past",
]


@pytest.fixture(scope="module")
def standard_cases():
    """The cases by name, without those that spell the operator out in primitives."""
    node = importlib.import_module("onnx.backend.test.case.node")
    np.random.seed(0)  # the cases draw from the global generator when they are collected
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other operators' cases overflow on purpose
        cases = node.collect_testcases("LinearAttention")
    prefix = "test_linear_attention_"
    whole = [c for c in cases if len(c.model.graph.node) == 1 and c.model.graph.node[0].op_type == "LinearAttention"]
    return {c.name.removeprefix(prefix): c for c in whole}


def test_the_standard_has_fourteen_cases(standard_cases):
    assert sorted(standard_cases) == NAMES
    assert len(NAMES) == 14


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("way", ["prefill", "step", "function"])
def test_standard_case(standard_cases, name, backend, way):
    case = standard_cases[name]
    node = case.model.graph.node[0]
    given = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    H, N = given["q_num_heads"], given["kv_num_heads"]
    rule = given.get("update_rule", b"gated_delta").decode()
    symbols = ("query", "key", "value", "past_state", "decay", "beta")
    for inputs, (output, present) in case.data_sets:
        arrays = dict(zip((n for n in node.input if n), inputs, strict=True))
        assert set(arrays) <= set(symbols)
        B, T, _ = arrays["query"].shape
        q = arrays["query"].reshape(B, T, H, -1)
        k, v = (arrays[n].reshape(B, T, N, -1) for n in ("key", "value"))
        K, V = q.shape[-1], v.shape[-1]
        rest = {}
        if "decay" in arrays:  # H_kv · d_k values per token, or one per head
            decay = arrays["decay"]
            rest["g"] = decay if decay.shape[-1] == N else decay.reshape(B, T, N, K)
        if "beta" in arrays:  # the standard lets all heads share one
            rest["beta"] = np.broadcast_to(arrays["beta"], (B, T, N))
        options = {"feature_map": "identity", "update_rule": rule, "backend": backend, "normalize": False}
        options["scale"] = given.get("scale", 0.0) or None  # 0 stands for 1/√K, which is our default
        past = arrays.get("past_state")
        if way == "function":
            y, state = la.linear_attention(q, k, v, **rest, **options, initial_state=past)
        else:
            attn = la.LinearAttention(H, K, V, num_kv_heads=N if N != H else None, **options)
            state = attn.init_state(B) if past is None else la.State.from_arrays(attn, past)
            if way == "prefill":
                y = attn.prefill(q, k, v, state, **rest)
            else:
                now = [{n: a[:, t] for n, a in rest.items()} for t in range(T)]
                y = [attn.step(q[:, t], k[:, t], v[:, t], state, **now[t]) for t in range(T)]
                y = np.stack(y, axis=1)
        assert y.dtype == output.dtype
        np.testing.assert_allclose(y.reshape(output.shape), output, rtol=case.rtol, atol=case.atol)
        np.testing.assert_allclose(state.S.astype(present.dtype), present, rtol=case.rtol, atol=case.atol)

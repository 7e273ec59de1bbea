"""Update rules: the table, and each entry's recurrence and loop on numbers small enough to check by hand."""

import inspect

import numpy as np
import pytest

import linattn_edge as la
from linattn_edge import rules
from linattn_edge.rules import LOOPS, RULES

pytestmark = pytest.mark.nojit

ONE = np.ones


def test_the_table():
    assert list(RULES) == ["linear", "gated", "delta", "gated_delta"]  # the ONNX operator's names
    takes = {name: (rule.decay, rule.beta, rule.normaliser) for name, rule in RULES.items()}
    assert takes == {
        "linear": (False, False, True),
        "gated": (True, False, True),
        "delta": (False, True, False),
        "gated_delta": (True, True, False),
    }
    for name, rule in RULES.items():
        assert rule.name == name
        assert rule.loop in LOOPS
        assert rule.source
    assert "numba" not in inspect.getsource(rules)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear", [[1 + 2 * 10, 2 + 2 * 20], [3 + 3 * 10, 4 + 3 * 20]]),
        ("gated", [[0.5 + 2 * 10, 1 + 2 * 20], [0.75 + 3 * 10, 1 + 3 * 20]]),
        # Sᵀk = (2 + 9, 4 + 12); β(v − Sᵀk) = 0.5 · (−1, 4)
        ("delta", [[1 - 1.0, 2 + 4.0], [3 - 1.5, 4 + 6.0]]),
        # ΛS = [[0.5, 1], [0.75, 1]]; (ΛS)ᵀk = (3.25, 5); β(v − …) = 0.5 · (6.75, 15)
        ("gated_delta", [[0.5 + 6.75, 1 + 15.0], [0.75 + 10.125, 1 + 22.5]]),
    ],
)
def test_one_write_by_hand(name, expected):
    """S = [[1, 2], [3, 4]], k = (2, 3), v = (10, 20), Λ = diag(1/2, 1/4), β = 1/2: every number is exact."""
    rule = RULES[name]
    S, k, v = np.array([[1.0, 2], [3, 4]]), np.array([2.0, 3]), np.array([10.0, 20])
    decay = np.array([0.5, 0.25]) if rule.decay else ONE(2)
    beta = np.array(0.5 if rule.beta else 1.0)
    before = S.copy()
    np.testing.assert_array_equal(rule.write(S, k, v, decay, beta), expected)
    np.testing.assert_array_equal(S, before)

    # the same through a layer, both ways; q picks the first row of S
    attn = la.LinearAttention(1, 2, feature_map="identity", update_rule=name, scale=1.0)
    given = {"beta": [[0.5]]} if rule.beta else {}
    if rule.decay:
        given["g"] = np.log([[[0.5, 0.25]]])
    for dtype in ("float32", "float64"):
        for sequence in (False, True):
            state = la.State.from_arrays(attn, S[None, None], dtype=dtype)
            q, kk, vv = np.array([[[1.0, 0]]]), k[None, None], v[None, None]
            if sequence:
                more = {n: np.asarray(a)[:, None] for n, a in given.items()}
                y = attn.prefill(q[:, None], kk[:, None], vv[:, None], state, **more)[:, 0]
            else:
                y = attn.step(q, kk, vv, state, **given)
            np.testing.assert_allclose(state.S[0, 0], expected, rtol=3e-7)
            np.testing.assert_allclose(y[0, 0], expected[0], rtol=3e-7)


@pytest.mark.parametrize("name", RULES)
def test_write_takes_any_leading_axes(name):
    rng = np.random.default_rng(0)
    S, k, v = (
        rng.standard_normal((3, 2, 4, 5)),
        rng.standard_normal((3, 2, 4)),
        rng.standard_normal((3, 2, 5)),
    )
    decay, beta = rng.random((3, 2, 4)), rng.random((3, 2))
    new = RULES[name].write(S, k, v, decay, beta)
    for i in np.ndindex(3, 2):
        kept = decay[i][:, None] * S[i]
        if RULES[name].beta:
            wanted = kept + beta[i] * np.outer(k[i], v[i] - kept.T @ k[i])
        else:
            wanted = kept + np.outer(k[i], v[i])
        np.testing.assert_allclose(new[i], wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("stronger", [True, False])
def test_a_delta_rule_with_beta_one_recalls_exactly(stronger):
    """With orthonormal keys and β = 1 a key's value is replaced, not added to: read back as it was last written."""
    attn = la.LinearAttention(1, 4, feature_map="identity", update_rule="delta", scale=1.0)
    state = attn.init_state(1)
    keys, values = np.eye(4), np.arange(16.0).reshape(4, 4)
    for v in (values, values[::-1] if stronger else values):
        attn.write(keys[None, :, None], v[None, :, None], state, beta=ONE((1, 4, 1)))
    np.testing.assert_array_equal(attn.read(keys[None, :, None], state)[0, :, 0], v)


def test_gates_that_do_nothing():
    """g = 0 makes `gated` the linear rule; β = 0 makes the delta rules write nothing."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 9, 2, 4)).astype(np.float32)
    nothing = np.zeros((2, 9, 2), np.float32)
    options = {"feature_map": "identity"}
    plain, S = la.linear_attention(q, k, v, **options)
    gated, G = la.linear_attention(q, k, v, nothing, update_rule="gated", **options)
    np.testing.assert_array_equal(plain, gated)
    np.testing.assert_array_equal(S.S, G.S)
    for rule, g in (("delta", None), ("gated_delta", nothing)):
        y, state = la.linear_attention(q, k, v, g, nothing, update_rule=rule, **options)
        assert not y.any()
        assert not state.S.any()


def test_a_decay_of_the_layer_is_g_given_at_every_token():
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 2, 9, 2, 4)).astype(np.float32)
    beta = np.full((2, 9, 2), 0.1, np.float32)
    for rule in ("gated", "gated_delta"):
        b = beta if RULES[rule].beta else None
        for decay in (np.array([-0.5, -0.25]), -np.arange(8.0).reshape(2, 4) / 8):
            g = np.broadcast_to(decay.astype(np.float32), (2, 9, *decay.shape))
            options = {"update_rule": rule, "feature_map": "identity"}
            y, state = la.linear_attention(q, k, v, None, b, decay=decay, **options)
            z, other = la.linear_attention(q, k, v, g, b, **options)
            np.testing.assert_allclose(y, z, rtol=1e-6, atol=1e-6)
            np.testing.assert_allclose(state.S, other.S, rtol=1e-6, atol=1e-6)


def test_beta_and_decay_are_refused_where_a_rule_has_none():
    for name, rule in RULES.items():
        if not rule.decay:
            with pytest.raises(ValueError, match=r"^decay: "):
                la.LinearAttention(2, 4, update_rule=name, decay=[-1, -1])
        if not rule.normaliser:
            with pytest.raises(ValueError, match=r"^normalize: "):
                la.LinearAttention(2, 4, update_rule=name, normalize=True)

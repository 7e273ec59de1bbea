"""The published constant decays, against their formulas in plain Python."""

import math

import numpy as np
import pytest

import linattn_edge as la

pytestmark = pytest.mark.nojit


def test_retnet_by_hand():
    """γ = 1 − 2^(−5−h): 31/32, 63/64, 127/128 (Sun et al. 2023, section 3.1)."""
    g = la.retnet_decay(3)
    assert g.dtype == np.float64
    np.testing.assert_allclose(np.exp(g), [31 / 32, 63 / 64, 127 / 128], rtol=1e-15)


def test_retnet_keeps_the_slowest_heads():
    """log(1 − ε) for ε down to 2^−64, where 1 − ε is 1 in float64."""
    g = la.retnet_decay(60)
    assert g.shape == (60,)
    assert (np.diff(g) > 0).all()
    assert (g < 0).all()
    for h in (0, 10, 30, 59):
        e = 2.0 ** (-5 - h)
        np.testing.assert_allclose(g[h], -math.fsum(e**n / n for n in range(1, 12)), rtol=1e-14)


def test_lightning_by_hand():
    """log λ_h = −(8h/H)(1 − l/L) for h = 0 … H − 1: strongest at the first layer, weaker with depth."""
    np.testing.assert_allclose(la.lightning_decay(4), [0, -2, -4, -6], rtol=1e-15)
    np.testing.assert_allclose(la.lightning_decay(4, layer=0, num_layers=2), [0, -2, -4, -6], rtol=1e-15)
    np.testing.assert_allclose(la.lightning_decay(4, layer=1, num_layers=2), [0, -1, -2, -3], rtol=1e-15)
    np.testing.assert_allclose(la.lightning_decay(2, layer=3, num_layers=4), [0, -1], rtol=1e-15)
    assert la.lightning_decay(8).dtype == np.float64


@pytest.mark.parametrize(("layer", "num_layers"), [(1, 1), (-1, 4), (4, 4), (0, 0)])
def test_lightning_refuses_layers_that_are_not_there(layer, num_layers):
    with pytest.raises(ValueError, match="layer"):
        la.lightning_decay(4, layer=layer, num_layers=num_layers)


@pytest.mark.parametrize("num_heads", [0, -1, 2.5, "4", True])
@pytest.mark.parametrize("decay", [la.retnet_decay, la.lightning_decay])
def test_num_heads(decay, num_heads):
    with pytest.raises((TypeError, ValueError), match="num_heads"):
        decay(num_heads)


@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
def test_layers_take_them(rule):
    """Read after n empty tokens, a state that was 1 shows γⁿ."""
    for g in (la.retnet_decay(3), la.lightning_decay(3, layer=1, num_layers=4)):
        attn = la.LinearAttention(3, 4, feature_map="identity", update_rule=rule, decay=g, scale=1.0)
        state = la.State.from_arrays(attn, np.ones((1, 3, 4, 4)))
        nothing = np.zeros((1, 5, 3, 4), np.float32)
        attn.write(nothing, nothing, state, beta=np.ones((1, 5, 3)) if rule == "gated_delta" else None)
        one = np.tile(np.eye(1, 4, dtype=np.float32), (1, 3, 1))
        expected = np.broadcast_to(np.exp(5 * g)[:, None], (3, 4))
        np.testing.assert_allclose(attn.read(one, state)[0], expected, rtol=2e-6)


def test_a_decay_that_is_no_logarithm_is_refused():
    with pytest.raises(ValueError, match=r"at most 0 \(log\(0.9\), not 0.9\); the largest is 0.9"):
        la.LinearAttention(2, 4, update_rule="gated", decay=[0.9, -0.1])

"""Calls that once read past an array, lost a state or crashed: refused or right, and the state as it was."""

import copy
import os
import subprocess
import sys

import numpy as np
import pytest

import linattn_edge as la
from linattn_edge.errors import StateMismatchError

NOJIT = os.environ.get("NUMBA_DISABLE_JIT") == "1"
pytestmark = pytest.mark.nojit


def tokens(seed=0, H=2, K=8):
    return np.random.default_rng(seed).standard_normal((3, 1, H, K), dtype=np.float32)


@pytest.mark.parametrize("shape", [(0, 2), (0, 3, 8), (1, 0), (0, 1, 2**40)])
def test_empty_decay_of_a_warm_layer_without_decay_is_refused(shape):
    attn = la.LinearAttention(2, 8)
    state = attn.init_state()
    q, k, v = tokens()
    attn.step(q, k, v, state)  # from now on the compiled entry sees the arguments first
    before = state.S.copy()
    with pytest.raises(ValueError, match=r"^g: "):
        attn.step(q, k, v, state, g=np.zeros(shape, np.float32))
    np.testing.assert_array_equal(state.S, before)


def test_views_of_the_state_may_be_inputs():
    attn = la.LinearAttention(2, 8)
    q, k, v = tokens()
    state, other = attn.init_state(), attn.init_state()
    for s in (state, other):
        attn.step(q, k, v, s)
    np.testing.assert_array_equal(attn.step(state.z, k, v, state), attn.step(other.z.copy(), k, v, other))


def test_unit_keys_of_huge_vectors():
    attn = la.LinearAttention(1, 8, feature_map="identity", update_rule="gated", qk_norm=True, scale=1.0)
    x = np.full((1, 1, 8), 1e19, np.float32)  # x² is beyond float32
    y = attn.step(x, x, np.ones_like(x), attn.init_state(), g=np.zeros((1, 1), np.float32))
    np.testing.assert_allclose(y, 1, rtol=1e-6)  # unit q and k: qᵀk = 1


def test_cache_positions_are_read_only_and_copies_are_whole():
    attn = la.SoftmaxAttention(2, 8)
    q, k, v = tokens()
    state = attn.init_state()
    attn.step(q, k, v, state)
    with pytest.raises(ValueError, match="read-only"):
        state.position[:] = 10**8
    twin = copy.copy(state)
    attn.step(q, k, v, twin)
    np.testing.assert_array_equal((state.position, twin.position), [[1], [2]])


def test_logits_beyond_float32_on_either_side():
    attn = la.SoftmaxAttention(1, 8)
    x = np.full((1, 1, 8), 1e19, np.float32)
    for k in (x, -10 * x):
        np.testing.assert_array_equal(attn.step(x, k, np.ones_like(x), attn.init_state()), 1)


def test_a_refused_write_does_not_grow_the_cache():
    attn = la.SoftmaxAttention(1, 8)
    state = attn.init_state(capacity=4)
    before = state.nbytes
    with pytest.raises(ValueError, match=r"^v: "):
        attn.write(np.ones((1, 5000, 1, 8), np.float32), np.full((1, 5000, 1, 8), np.nan, np.float32), state)
    assert state.nbytes == before


def test_wrong_objects_are_told_apart(tmp_path):
    attn, soft = la.LinearAttention(2, 8), la.SoftmaxAttention(2, 8)
    q, k, v = tokens()
    for layer in (attn, soft):
        with pytest.raises(StateMismatchError, match=r"^state: "):
            layer.step(q, k, v, None, active=[True])
    attn.init_state().save(tmp_path / "s")
    with pytest.raises(TypeError, match=r"^attn: "):
        la.State.load(tmp_path / "s", soft)


def changed_elu(factor, name="elu"):
    """A map of the caller's own: `factor` times elu, as a subclass."""

    class Mine(la.Elu):
        def define(self, x, weights, position):
            return factor * super().define(x, weights, position)

        @staticmethod
        def loop(x, y, weights, position):
            for i in range(x.size):
                y[i] = factor * (x[i] + 1 if x[i] >= 0 else np.exp(x[i]))

    Mine.name = name
    return Mine()


def test_equal_names_of_different_maps_do_not_share_states():
    mine = changed_elu(3)
    assert la.Elu() != mine
    assert mine != la.Elu()
    attn, theirs = la.LinearAttention(2, 8), la.LinearAttention(2, 8, feature_map=mine)
    for layer, other in ((attn, theirs), (theirs, attn)):
        with pytest.raises(StateMismatchError, match="feature_map"):
            layer.step(*tokens(), other.init_state())


@pytest.mark.parametrize("name", ["elu", "mine"])
def test_a_subclass_of_a_map_runs_its_own_loop(name):
    """Maps of one name: kernels that are kept under the name alone would be the library's, or the first one's."""
    q, k, v = tokens()
    options = {"normalize": False, "scale": 1.0}
    want = la.LinearAttention(2, 8, **options)
    y = want.step(q, k, v, want.init_state())
    for factor, backend in ((3, "cpu"), (5, "cpu"), (3, "reference")):
        attn = la.LinearAttention(2, 8, feature_map=changed_elu(factor, name), backend=backend, **options)
        np.testing.assert_allclose(attn.step(q, k, v, attn.init_state()), factor**2 * y, rtol=2e-6)


CUT = """
import sys, warnings, numpy as np, linattn_edge as la
x = np.ones((1, 1, 4), np.float32)
attn = la.SoftmaxAttention(1, 4)  # the smallest kernel
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    print(attn.step(x, x, x, attn.init_state()).tolist(), len(seen))
"""


@pytest.mark.skipif(NOJIT, reason="there is no cache without the JIT")
def test_a_cut_kernel_cache_is_compiled_around(tmp_path):
    """Power can fail while a cache is written; the library must still run."""

    def run():
        env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
        return subprocess.run([sys.executable, "-c", CUT], capture_output=True, text=True, env=env, check=True).stdout

    assert run() == "[[[1.0, 1.0, 1.0, 1.0]]] 0\n"
    files = [path for path in tmp_path.rglob("*.nb*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(path.read_bytes()[:20])
    assert run() == "[[[1.0, 1.0, 1.0, 1.0]]] 1\n"


def test_finiteness_is_settled_when_a_layer_is_made():
    """It is compiled into the layer's plan: an assignment that did nothing would be worse than an error."""
    attn = la.LinearAttention(1, 4, check_finite=False)
    assert attn.check_finite is False
    with pytest.raises(AttributeError):
        attn.check_finite = True

"""float16 and bfloat16 states: refused where they would be wrong, close where they are not."""

import os
import pickle

import ml_dtypes
import numpy as np
import pytest

import linattn_edge as la
import naive

NOJIT = os.environ.get("NUMBA_DISABLE_JIT") == "1"
HALVES = {"float16": (np.float16, 2.0**-11), "bfloat16": (ml_dtypes.bfloat16, 2.0**-8)}  # rounding error of one store
pytestmark = pytest.mark.nojit


def layer(rule="gated", backend="cpu", **options):
    return la.LinearAttention(
        2, 8, 13, feature_map="identity", update_rule=rule, qk_norm=True, backend=backend, **options
    )


def tokens(T, rule="gated", seed=0):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, 1, T, 2, 8), dtype=np.float32)
    given = {"q": q, "k": k, "v": rng.standard_normal((1, T, 2, 13), dtype=np.float32)}
    if "gated" in rule:
        given["g"] = np.full((1, T, 2), np.log(0.9), np.float32)
    if "delta" in rule:
        given["beta"] = np.full((1, T, 2), 0.8, np.float32)
    return given


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rule", ["linear"])
def test_a_rule_that_never_forgets_is_refused(rule, dtype):
    with pytest.raises(TypeError, match="44 %"):
        layer(rule).init_state(dtype=dtype)
    with pytest.raises(TypeError, match="cache"):
        la.SoftmaxAttention(2, 8).init_state(dtype=dtype)


@pytest.mark.parametrize("dtype", HALVES)
def test_one_write_is_rounded_to_nearest(dtype):
    """S of one token is kvᵀ, rounded once: to nearest, ties to even, as the dtype's own conversion does."""
    kind, _ = HALVES[dtype]
    attn = la.LinearAttention(1, 16, 40, feature_map="identity", update_rule="gated")
    rng = np.random.default_rng(1)
    k, v = rng.standard_normal((1, 1, 16), dtype=np.float32), rng.standard_normal((1, 1, 40), dtype=np.float32)
    v[..., 0], k[..., 0] = 1 + 2.0**-8 + 2.0**-11, 1  # halfway between two numbers of one of the dtypes
    state = attn.init_state(dtype=dtype)
    attn.step(k, k, v, state, g=np.zeros((1, 1), np.float32))
    assert state.S.dtype == kind == state.dtype
    np.testing.assert_array_equal(state.S[0, 0], (k[0, 0, :, None] * v[0, 0]).astype(kind))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rule", ["gated", "delta", "gated_delta"])
def test_outputs_stay_close_to_float64(rule, dtype, backend):
    """Errors are those of the stores that are still remembered, about ten at decay 0.9, as a random walk."""
    T = 60 if NOJIT else 400
    given = tokens(T, rule)
    attn = layer(rule, backend)
    exact = layer(rule, "reference")
    want = exact.prefill(**{n: a.astype(np.float64) for n, a in given.items()}, state=exact.init_state(dtype="float64"))
    state, stepped = attn.init_state(dtype=dtype), attn.init_state(dtype=dtype)
    y = attn.prefill(**given, state=state)
    steps = np.stack([attn.step(**{n: a[:, t] for n, a in given.items()}, state=stepped) for t in range(T)], axis=1)
    bound = 10 * HALVES[dtype][1]
    for got in (y, steps):
        assert got.dtype == np.float32
        assert naive.rms_ratio(got, want) < bound
    assert naive.rms_ratio(steps, want) > HALVES[dtype][1] / 100  # the state is really stored in half precision


@pytest.mark.parametrize("dtype", HALVES)
def test_a_half_state_moves_like_any_other(dtype, tmp_path):
    attn = layer("gated", normalize=True)
    state = attn.init_state(3, dtype)
    given = {n: np.repeat(a, 3, axis=0) for n, a in tokens(9).items()}
    attn.prefill(**given, state=state, lengths=[9, 4, 0])
    assert state.z.dtype == np.float32
    assert state.nbytes == 3 * (2 * 8 * 13 * 2 + 2 * 8 * 4 + 8)
    state.save(tmp_path / "s")
    for other in (
        state.copy(),
        state.select([0, 1, 2]),
        pickle.loads(pickle.dumps(state)),
        la.State.load(tmp_path / "s", attn),
    ):
        assert other.dtype == state.dtype
        np.testing.assert_array_equal(other.S, state.S)
        np.testing.assert_array_equal(other.z, state.z)
        np.testing.assert_array_equal(other.position, [9, 4, 0])


@pytest.mark.nojit
def test_every_nan_stays_one_in_a_bfloat16_state():
    """Rounding to the nearest adds to the bits, which must not carry a NaN over into zero."""
    pytest.importorskip("ml_dtypes")
    attn = la.LinearAttention(1, 8, feature_map="identity", update_rule="gated", check_finite=False)
    for bits in (0x7FFFFFFF, 0x7F800001, 0x7FC00000, 0xFFFFFFFF):
        state = attn.init_state(1, "bfloat16")
        v = np.full((1, 1, 8), bits, np.uint32).view(np.float32)
        attn.write(np.ones((1, 1, 8), np.float32), v, state, g=np.zeros((1, 1), np.float32))
        assert np.isnan(np.asarray(state.S, np.float32)).all()

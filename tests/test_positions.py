"""Cosformer, whose φ depends on the position: its formula, where positions come from, what is beyond the horizon."""

import math

import numpy as np
import pytest

import linattn_edge as la
import naive
from cases import NOJIT, make
from linattn_edge.errors import ShapeError

pytestmark = pytest.mark.nojit
BACKENDS = ["cpu", "reference"]
both = pytest.mark.parametrize("backend", BACKENDS)
M = 8


def tokens(B=2, T=M, H=2, K=4, V=3, seed=0):
    rng = np.random.default_rng(seed)
    return (np.abs(a) for a in rng.standard_normal((3, B, T, H, K)).astype(np.float32))


def at(t, *arrays):
    """The tokens at t as the compiled entry of a step takes them; other layouts go another way."""
    return [np.ascontiguousarray(a[:, t]) for a in arrays]


def layer(max_len=M, **options):
    return la.LinearAttention(2, 4, feature_map=la.CosFormer(max_len), **options)


# φ


def plain(x, i, M):
    """Qin et al. 2022, eq. 10-12."""
    r = [max(a, 0.0) for a in x]
    angle = math.pi * i / (2 * M)
    return [a * math.cos(angle) for a in r] + [a * math.sin(angle) for a in r]


@pytest.mark.parametrize("M", [1, 2, 7, 100, 10**6])
def test_features_are_the_formula(M):
    x = np.random.default_rng(M).standard_normal((20, 3)) * 2
    place = np.random.default_rng(1).integers(0, M, 20)
    place[:2] = 0, M - 1
    exact = np.array([plain(row, i, M) for row, i in zip(x.tolist(), place.tolist(), strict=True)])
    phi = la.CosFormer(M)
    assert phi.dim(3) == 6
    for side in (phi, phi.query, phi.key):
        np.testing.assert_allclose(side(x, place), exact, rtol=1e-13, atol=1e-15)
    single = phi(x.astype(np.float32), place)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, exact, rtol=1e-6, atol=1e-6)


def test_kernel_is_the_cosine_of_the_distance():
    """κ(q_i, k_j) = relu(q)·relu(k) · cos(π(i − j)/2M): positive as long as both positions are below M."""
    phi = la.CosFormer(M)
    q, k = np.random.default_rng(2).standard_normal((2, M, M, 5))
    i, j = np.mgrid[:M, :M]
    kappa = phi.kernel(q, k, i, j)
    for a, b in np.ndindex(M, M):
        product = math.fsum(max(x, 0) * max(y, 0) for x, y in zip(q[a, b].tolist(), k[a, b].tolist(), strict=True))
        assert kappa[a, b] == pytest.approx(product * math.cos(math.pi * (a - b) / (2 * M)), rel=1e-12, abs=1e-15)
    assert (kappa >= 0).all()


def test_by_hand():
    phi = la.CosFormer(2)  # a quarter turn in two steps
    x = np.array([3.0, -4.0])
    np.testing.assert_array_equal(phi(x, 0), [3, 0, 0, 0])
    np.testing.assert_allclose(phi(x, 1), [3 * math.sqrt(0.5), 0, 3 * math.sqrt(0.5), 0], rtol=1e-15)
    np.testing.assert_allclose(phi.kernel(x, x, 1, 0), 9 * math.sqrt(0.5), rtol=1e-15)
    np.testing.assert_array_equal(la.CosFormer(1)(x, 0), [3, 0, 0, 0])


def test_positions_broadcast():
    phi = la.CosFormer(M)
    x = np.random.default_rng(0).standard_normal((2, 5, 3, 4))
    y = phi(x, np.arange(5)[:, None])
    assert y.shape == (2, 5, 3, 8)
    for t in range(5):
        np.testing.assert_array_equal(y[:, t], phi(x[:, t], t))
    np.testing.assert_array_equal(phi(x, np.uint8(3)), phi(x, [[3]]))
    assert phi(np.zeros((0, 4)), np.zeros(0, int)).shape == (0, 8)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_kernels_angle_is_exact_far_out(dtype):
    """At position 10⁶ − 1 of 10⁶, the cosine is what is left of a quarter turn: float32 positions would lose it."""
    M = 10**6
    attn = la.LinearAttention(1, 1, 1, feature_map=la.CosFormer(M), normalize=False)
    for position in (0, 1, 12345, M // 2, M - 1000, M - 1):
        state = attn.init_state(1, dtype)
        state.position = position
        attn.write(np.ones((1, 1, 1)), np.ones((1, 1, 1)), state)
        bound = 1e-7 if dtype == "float32" else 1e-15
        np.testing.assert_allclose(state.S.ravel(), plain([1.0], position, M), rtol=bound, atol=bound)


# positions are those of the state


@both
@pytest.mark.parametrize("rule", ["linear", "gated", "gated_delta"])
def test_positions_come_from_the_state(rule, backend):
    """Rows that started at other times, by steps and blocks, in the middle of a prefill's pieces too."""
    T = 70 if backend == "cpu" and not NOJIT else 7
    case = make(rule, "head", "gqa", "cosformer", B=3, T=T, position=np.array([20, 0, 3]), start=True, backend=backend)
    for way in (case.prefill, case.steps, lambda state: case.steps(state, quick=True)):
        state = case.start()
        case.check(way(state), state, 1e-5)
    elsewhere = case.with_(position=0).oracle()[0]
    assert naive.rms_ratio(elsewhere[0], case.expected[0][0]) > 1e-3


@both
def test_read_answers_at_the_last_position(backend):
    """A read is the second half of a step: it stands where the last token was written, and does not move."""
    attn = layer(backend=backend)
    q, k, v = tokens()
    stepped, halves = attn.init_state(2), attn.init_state(2)
    stepped.position = halves.position = [2, 0]
    for t in range(M - 2):
        y = attn.step(*at(t, q, k, v), stepped)
        attn.write(k[:, t], v[:, t], halves)
        for _ in range(2):
            naive.assert_close(attn.read(q[:, t], halves), y.astype(np.float64), 1e-6)
        many = attn.read(np.stack([q[:, t]] * 3, axis=1), halves)
        for s in range(3):
            naive.assert_close(many[:, s], y.astype(np.float64), 1e-6)
        np.testing.assert_array_equal(halves.position, np.array([2, 0]) + t + 1)
    assert not attn.read(q[:, 0], attn.init_state(2)).any()


@both
def test_reset_select_and_files_keep_positions(backend, tmp_path):
    attn = layer(backend=backend)
    q, k, v = tokens()
    state = attn.init_state(2)
    attn.prefill(q[:, :5], k[:, :5], v[:, :5], state)
    state.save(tmp_path / "state")
    want = attn.step(*at(5, q, k, v), state.copy())
    for other in (la.State.load(tmp_path / "state", attn), state.select([0, 1])):
        np.testing.assert_array_equal(attn.step(*at(5, q, k, v), other), want)
    state.reset([1])
    fresh = attn.init_state(2)
    y = attn.prefill(q[:, :3], k[:, :3], v[:, :3], state, lengths=[0, 3])
    np.testing.assert_array_equal(y[1], attn.prefill(q[:, :3], k[:, :3], v[:, :3], fresh)[1])


# the horizon


def refused(call, state, row, position):
    """The error names the row and the position, and the state is as it was."""
    before = state.copy()
    with pytest.raises(ValueError, match=rf"cosformer: stream {row}\b.*position {position}\b.*max_len = {M}") as caught:
        call()
    assert "\n" not in str(caught.value)
    np.testing.assert_array_equal(state.S, before.S)
    np.testing.assert_array_equal(state.z, before.z)
    np.testing.assert_array_equal(state.position, before.position)


@both
def test_the_whole_horizon_can_be_used(backend):
    attn = layer(backend=backend)
    q, k, v = tokens()
    state, stepped = attn.init_state(2), attn.init_state(2)
    y = attn.prefill(q, k, v, state)
    for t in range(M):
        naive.assert_close(attn.step(*at(t, q, k, v), stepped), y[:, t].astype(np.float64), 1e-6)
    np.testing.assert_array_equal(stepped.position, M)
    naive.assert_close(attn.read(q[:, -1], state), y[:, -1].astype(np.float64), 1e-6)


@both
def test_beyond_the_horizon(backend):
    attn = layer(backend=backend)
    q, k, v = tokens(3)
    state = attn.init_state(3)
    state.position = [2, M, M - 1]
    one = at(0, q, k, v)
    refused(lambda: attn.step(*one, state), state, 1, M)
    refused(lambda: attn.step(*one, state), state, 1, M)  # by the compiled entry, once it is there
    refused(lambda: attn.step(*one, state, active=[True, True, False]), state, 1, M)
    refused(lambda: attn.write(one[1], one[2], state), state, 1, M)
    refused(lambda: attn.prefill(q[:, :2], k[:, :2], v[:, :2], state), state, 1, M + 1)
    refused(lambda: attn.prefill(q[:, :3], k[:, :3], v[:, :3], state, lengths=[1, 0, 2]), state, 2, M)
    refused(lambda: attn.prefill(q, k, v, state, lengths=[7, 0, 1]), state, 0, M)
    refused(lambda: attn.write(k, v, state, lengths=[0, 3, 1]), state, 1, M + 2)


@pytest.mark.parametrize("check_finite", [True, False])
def test_a_warm_step_beyond_the_horizon(check_finite):
    """The compiled entry sees the call first; unchecked layers have a horizon too."""
    attn = layer(check_finite=check_finite)
    q, k, v = tokens()
    state = attn.init_state(2)
    for t in range(M):
        attn.step(*at(t, q, k, v), state)
    refused(lambda: attn.step(*at(0, q, k, v), state), state, 0, M)
    out = np.full((2, 2, 4), 7, np.float32)
    refused(lambda: attn.step(*at(0, q, k, v), state, out=out), state, 0, M)
    assert (out == 7).all()


@both
def test_rows_that_are_full_may_rest(backend):
    """Inactive rows and empty segments write nothing, so there is nothing to refuse."""
    attn = layer(backend=backend)
    q, k, v = tokens(3)
    state = attn.init_state(3)
    state.position = [2, M, M - 1]
    attn.step(*at(0, q, k, v), state, active=[True, False, True])
    np.testing.assert_array_equal(state.position, [3, M, M])
    attn.prefill(q, k, v, state, lengths=[5, 0, 0])
    np.testing.assert_array_equal(state.position, M)
    attn.write(k, v, state, lengths=[0, 0, 0])
    attn.prefill(q[:, :0], k[:, :0], v[:, :0], state)
    np.testing.assert_array_equal(state.position, M)


@both
def test_padding_may_reach_beyond_the_horizon(backend):
    """The last real token is what counts, not how long the arrays are."""
    attn = layer(backend=backend)
    q, k, v = (np.concatenate([a, a], axis=1) for a in tokens())
    state, other = attn.init_state(2), attn.init_state(2)
    state.position = other.position = [1, 4]
    y = attn.prefill(q, k, v, state, lengths=[7, 4])
    for t in range(7):
        row = attn.step(*at(t, q, k, v), other, active=[True, t < 4])
        naive.assert_close(y[:, t], row.astype(np.float64), 1e-6)
    np.testing.assert_array_equal(state.position, M)


@both
def test_positions_set_beyond_the_horizon(backend):
    """By hand, or from a file of another stream: nothing may be asked of such a row."""
    attn = layer(backend=backend)
    q, k, v = tokens()
    state = attn.init_state(2)
    for position in (M + 1, 10**12, 2**62):
        state.position = [0, position]
        refused(lambda: attn.read(q[:, 0], state), state, 1, position - 1)
        refused(lambda: attn.read(q, state), state, 1, position - 1)
        refused(lambda: attn.step(*at(0, q, k, v), state), state, 1, position)
        refused(lambda: attn.prefill(q, k, v, state), state, 1, position + M - 1)
    state.position = [0, M]
    attn.read(q[:, 0], state)


@both
def test_in_the_pure_function(backend):
    q, k, v = tokens()
    options = {"feature_map": la.CosFormer(M), "backend": backend}
    _, state = la.linear_attention(q, k, v, **options)
    np.testing.assert_array_equal(state.position, M)
    with pytest.raises(ValueError, match="cosformer: stream 0"):
        la.linear_attention(q[:, :1], k[:, :1], v[:, :1], initial_state=state, **options)


def test_without_positions():
    phi = la.CosFormer(M)
    x = np.ones((2, 3))
    for call in (lambda: phi(x), lambda: phi.key(x), lambda: phi.kernel(x, x), lambda: phi.kernel(x, x, 0)):
        with pytest.raises(ValueError, match="cosformer: needs the position"):
            call()


@pytest.mark.parametrize("position", [-1, [0, -3], 0.5, [1.0, 2.0], True, "1", [None, 1], 1j], ids=str)
def test_what_is_no_position(position):
    with pytest.raises((ValueError, TypeError), match="cosformer: position"):
        la.CosFormer(M)(np.ones((2, 3)), position)


def test_positions_beyond_the_horizon_of_phi():
    with pytest.raises(ValueError, match=rf"cosformer: position {M} .*max_len = {M}"):
        la.CosFormer(M)(np.ones((2, 3)), [0, M])


@pytest.mark.parametrize("position", [[0, 1, 2], [[0], [1], [2]], np.zeros((2, 3), int)], ids=str)
def test_positions_of_another_shape(position):
    with pytest.raises(ShapeError, match="cosformer: position"):
        la.CosFormer(M)(np.ones((2, 3)), position)


@pytest.mark.parametrize("max_len", [0, -1, 8.0, None, "8", True])
def test_bad_horizons(max_len):
    with pytest.raises(ValueError, match="cosformer: max_len"):
        la.CosFormer(max_len)


def test_horizons_tell_maps_apart():
    assert la.CosFormer(8) == la.CosFormer(np.int32(8)) == la.feature_map("cosformer", max_len=8)
    assert la.CosFormer(8) != la.CosFormer(9)
    with pytest.raises(ValueError, match="feature_map"):
        layer(9).read(np.ones((1, 2, 4), np.float32), layer(8).init_state())

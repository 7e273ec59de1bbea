"""FunctionMap, and maps of the caller's own class: right on every path, asked only what they are to be asked."""

import copy
import pickle

import numpy as np
import pytest

import linattn_edge as la
import naive
from cases import NOJIT, double, doubled, make
from linattn_edge.errors import NotFiniteError, ShapeError, StateMismatchError

pytestmark = pytest.mark.nojit
BACKENDS = ["cpu", "reference"]
both = pytest.mark.parametrize("backend", BACKENDS)


def tokens(B=2, T=5, H=2, K=4, V=3, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return (*rng.standard_normal((2, B, T, H, K)).astype(dtype), rng.standard_normal((B, T, H, V)).astype(dtype))


def at(t, *arrays):
    """The tokens at t as the compiled entry of a step takes them; other layouts go another way."""
    return [np.ascontiguousarray(a[:, t]) for a in arrays]


def layer(phi, H=2, K=4, V=3, **options):
    return la.LinearAttention(H, K, V, feature_map=phi, **options)


def check(attn, function, key_function=None, **given):
    """Prefill, steps and the two halves against the oracle."""
    q, k, v = tokens(K=attn.layer.K)
    normalize = attn.layer.normalize
    oracle = naive.Map(function, key=key_function)
    want, S, z = naive.attention(q, k, v, phi=oracle, normalize=normalize, scale=attn.layer.scale, **given)
    states = [attn.init_state(2) for _ in range(3)]
    naive.assert_close(attn.prefill(q, k, v, states[0]), want, 2e-6, "prefill")
    y = [attn.step(*at(t, q, k, v), states[1]) for t in range(5)]
    naive.assert_close(np.stack(y, axis=1), want, 2e-6, "step")
    attn.write(k[:, 0], v[:, 0], states[2])
    attn.write(k[:, 1:], v[:, 1:], states[2])
    naive.assert_close(attn.read(q[:, 4], states[2]), want[:, 4], 2e-6, "read")
    for state in states:
        naive.assert_close(state.S, S, 2e-6, "S")
        if normalize:
            naive.assert_close(state.z, z, 2e-6, "z")


# right on every path


@both
@pytest.mark.parametrize(
    "function",
    [lambda x: 3 * x, np.square, lambda x: x + 1, np.cos, lambda x: x[..., ::-1], lambda x: np.cumsum(x, axis=-1)],
    ids=["times 3", "square", "plus 1", "cos", "backwards", "sums"],
)
def test_a_function_of_the_same_width_is_no_identity(function, backend):
    """F = K, one output for one input: what φ = x looks like from outside."""
    check(layer(la.FunctionMap(function, 4), backend=backend), function)


@both
@pytest.mark.parametrize("F", [1, 3, 4, 9])
def test_functions_to_any_width(F, backend):
    W = np.random.default_rng(F).standard_normal((4, F))

    def function(x):
        return np.tanh(x @ W.astype(x.dtype))

    check(layer(la.FunctionMap(function, F), backend=backend), function)
    check(layer(la.FunctionMap(function, lambda K: F), backend=backend), function)


@both
def test_keys_may_have_a_function_of_their_own(backend):
    phi = la.FunctionMap(np.cos, 4, np.square)
    check(layer(phi, backend=backend), np.cos, np.square)
    x = np.float32([[1, 2, 3, 4]])
    np.testing.assert_array_equal(phi.query(x), np.cos(x))
    np.testing.assert_array_equal(phi.key(x), np.square(x))
    np.testing.assert_allclose(phi.kernel(x, x), np.sum(np.cos(x) * x * x, axis=-1), rtol=1e-6)


def calls_numba(x, y):
    for i in range(x.size):
        y[i] = half_square(x[i])


def half_square(a):
    return a * a / 2


def compiled(function):
    return pytest.importorskip("numba").njit(function)


@pytest.mark.parametrize("kind", ["plain", "compiled", "calls a compiled one"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_loops_run_in_the_kernels(kind, dtype, monkeypatch):
    asked = []

    def watched(x):
        asked.append(x.shape)
        return function(x)

    loop, function, F = doubled, double, 8
    if kind == "compiled":
        loop = compiled(doubled)
    elif kind == "calls a compiled one":
        monkeypatch.setitem(globals(), "half_square", compiled(half_square))
        loop, function, F = calls_numba, lambda x: x * x / 2, 4
    attn = layer(la.FunctionMap(watched, F, loop=loop))
    asked.clear()  # a layer asks once whether the two agree
    q, k, v = tokens(dtype=dtype)
    want, S, _ = naive.attention(q, k, v, phi=naive.Map(function), scale=0.5)
    for way in ("prefill", "steps"):
        state = attn.init_state(2, dtype)
        if way == "prefill":
            y = attn.prefill(q, k, v, state)
        else:
            y = np.stack([attn.step(*at(t, q, k, v), state) for t in range(5)], axis=1)
        naive.assert_close(y, want, 1e-6 if dtype == "float32" else 1e-14)
        naive.assert_close(state.S, S, 1e-6 if dtype == "float32" else 1e-14)
    assert not asked
    layer(la.FunctionMap(watched, F, loop=loop), backend="reference").prefill(q, k, v, attn.init_state(2))
    assert (2, 2, 4) in asked or len(asked) > 2


def test_two_loops_under_one_name_are_two():
    def other(x, y):
        for i in range(x.size):
            y[i] = 5 * x[i]

    def third(x, y):
        for i in range(x.size):
            y[i] = 7 * x[i]

    check(layer(la.FunctionMap(lambda x: 5 * x, 4, loop=other)), lambda x: 5 * x)
    check(layer(la.FunctionMap(lambda x: 7 * x, 4, loop=third)), lambda x: 7 * x)
    check(layer(la.FunctionMap(lambda x: 5 * x, 4, loop=other)), lambda x: 5 * x)


@pytest.mark.parametrize("loop", [None, doubled])
def test_threads_do_not_change_the_result(loop):
    """Streams and heads enough for two threads to share."""
    B, H, K, V = (4, 8, 16, 256) if not NOJIT else (1, 1, 4, 3)
    q, k, v = tokens(B, 3, H, K, V)
    y = []
    for threads in (1, 2):
        attn = layer(la.FunctionMap(double, 2 * K, loop=loop), H, K, V, num_threads=threads)
        state = attn.init_state(B)
        y.append([attn.prefill(q, k, v, state), attn.step(*at(0, q, k, v), state), state.S])
    assert NOJIT or state.S.nbytes >= 1 << 20
    for one, two in zip(*y, strict=True):
        np.testing.assert_array_equal(one, two)
    want = naive.attention(q, k, v, phi=naive.Map(double), scale=K**-0.5)[0]
    naive.assert_close(y[1][0], want, 2e-6)


@both
@pytest.mark.parametrize("loop", [None, doubled])
@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
def test_with_other_rules_and_layouts(rule, loop, backend):
    case = make(rule, "channel", "gva", "function", T=6, start=True, hard=False, backend=backend)
    attn = case.layer(feature_map=la.FunctionMap(double, 8, loop=loop))
    for way in (case.prefill, case.steps):
        state = case.start(attn)
        case.check(way(state, attn=attn), state, 5e-6, rule)


@both
def test_in_the_pure_function(backend):
    q, k, v = tokens()
    phi = la.FunctionMap(np.square, 4, positive=True)
    o, state = la.linear_attention(q, k, v, feature_map=phi, backend=backend)
    want, S, z = naive.attention(q, k, v, phi=naive.Map(np.square), normalize=True)
    naive.assert_close(o, want, 2e-6)
    naive.assert_close(state.S, S, 2e-6)
    naive.assert_close(state.z, z, 2e-6)


def test_positive_maps_normalise():
    assert layer(la.FunctionMap(np.exp, 4, positive=True)).layer.normalize
    assert not layer(la.FunctionMap(np.exp, 4)).layer.normalize
    check(layer(la.FunctionMap(np.exp, 4, positive=True)), np.exp)


@both
@pytest.mark.parametrize("loop", [None, doubled])
def test_qk_norm_comes_first(loop, backend):
    attn = layer(la.FunctionMap(double, 8, loop=loop), qk_norm=True, backend=backend)
    check(attn, lambda x: double(naive.unit(x)))


@pytest.mark.parametrize("loop", [None, doubled])
def test_qk_norm_of_huge_vectors(loop):
    """Their squares are beyond float32; their unit vectors are not."""
    attn = layer(la.FunctionMap(double, 8, loop=loop), 1, 4, 1, qk_norm=True, normalize=False)
    state = attn.init_state()
    x = np.float32([[[3e19, -4e19, 0, 0]]])
    attn.write(x, np.ones((1, 1, 1), np.float32), state)
    np.testing.assert_allclose(state.S.ravel(), [0.72, 1.28, 0, 0, 1.6, 0.2, 1, 1], rtol=1e-6)


# what a function is given, and what becomes of its results


def recorded(seen, function=np.square):
    def record(x):
        seen.append(x.copy())
        return function(x)

    return record


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_function_is_given_vectors_of_the_states_dtype(dtype):
    seen = []
    attn = layer(la.FunctionMap(recorded(seen), 4))
    q, k, v = tokens(dtype=np.float16)
    attn.prefill(q, k, v, attn.init_state(2, dtype))
    attn.step(*at(0, q, k, v), attn.init_state(2, dtype))
    assert [x.dtype for x in seen] == [dtype] * 4
    assert all(x.shape[-1] == 4 for x in seen)
    np.testing.assert_array_equal(seen[0].reshape(q.shape), q)
    np.testing.assert_array_equal(seen[1].reshape(k.shape), k)


@both
@pytest.mark.parametrize("fill", [np.nan, np.inf, 1e30])
def test_what_stands_in_padding_is_not_shown(fill, backend):
    seen = []
    attn = layer(la.FunctionMap(recorded(seen), 4), backend=backend)
    q, k, v = tokens()
    lengths = [5, 2]
    want, S, _ = naive.attention(q, k, v, phi=naive.Map(np.square), scale=0.5, lengths=lengths)
    for a in (q, k, v):
        a[1, 2:] = fill
    state = attn.init_state(2)
    naive.assert_close(attn.prefill(q, k, v, state, lengths=lengths), want, 2e-6)
    naive.assert_close(state.S, S, 2e-6)
    attn.step(q[:, 4], k[:, 4], v[:, 4], state, active=[True, False])
    np.testing.assert_array_equal(state.position, [6, 2])
    for x in seen:
        assert np.isfinite(x).all()
        assert np.abs(x).max() < 10


@both
def test_a_function_without_a_value_at_zero_may_be_padded(backend):
    """Zeros stand for padding; what a function makes of them is not looked at either."""

    def inverse(x):
        with np.errstate(divide="ignore"):
            return 1 / x

    attn = layer(la.FunctionMap(inverse, 4), backend=backend)
    q, k, v = tokens()
    want, S, _ = naive.attention(q, k, v, phi=naive.Map(inverse), scale=0.5, lengths=[5, 2])
    state = attn.init_state(2)
    naive.assert_close(attn.prefill(q, k, v, state, lengths=[5, 2]), want, 2e-6)
    naive.assert_close(state.S, S, 2e-6)


@both
def test_a_function_may_work_in_place(backend):
    def function(x):
        x *= 2
        return x

    q, k, v = tokens()
    kept = [a.copy() for a in (q, k, v)]
    attn = layer(la.FunctionMap(function, 4), backend=backend)
    want = naive.attention(q, k, v, phi=naive.Map(lambda x: 2 * x), scale=0.5)[0]
    naive.assert_close(attn.prefill(q, k, v, attn.init_state(2)), want, 2e-6)
    for a, b in zip((q, k, v), kept, strict=True):
        np.testing.assert_array_equal(a, b)
    phi = la.FunctionMap(function, 4)
    np.testing.assert_array_equal(phi(q), 2 * kept[0])
    np.testing.assert_array_equal(q, kept[0])


def test_a_function_may_return_the_same_array_every_time():
    """q's features must not become k's."""
    room = {}

    def function(x):
        y = room.setdefault(x.shape, np.empty_like(x))
        np.multiply(x, 2, out=y)
        return y

    attn = layer(la.FunctionMap(function, 4))
    q, k, v = tokens()
    want = naive.attention(q, k, v, phi=naive.Map(lambda x: 2 * x), scale=0.5)[0]
    naive.assert_close(attn.prefill(q, k, v, attn.init_state(2)), want, 2e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: np.asfortranarray(np.square(x)),
        lambda x: np.repeat(np.square(x), 2, axis=-1)[..., ::2],
        lambda x: np.square(x).astype(np.float64),
        lambda x: np.square(x).tolist(),
        lambda x: np.square(x).astype(x.dtype.newbyteorder()),
    ],
    ids=["fortran", "strided", "float64", "list", "other-endian"],
)
def test_results_of_any_layout(function):
    check(layer(la.FunctionMap(function, 4)), np.square)


def test_results_of_small_types():
    x = np.float32([[1, 2, 3, 4]])
    for dtype in (np.int8, np.uint16, np.float16):
        y = la.FunctionMap(lambda x, dtype=dtype: x.astype(dtype), 4)(x)
        assert y.dtype == np.float32
        np.testing.assert_array_equal(y, x)


@both
def test_empty_calls(backend):
    attn = layer(la.FunctionMap(np.square, 4), backend=backend)
    state = attn.init_state(2)
    q, k, v = tokens()
    assert attn.prefill(q[:, :0], k[:, :0], v[:, :0], state).shape == (2, 0, 2, 3)
    assert attn.step(q[:0, 0], k[:0, 0], v[:0, 0], attn.init_state(0)).shape == (0, 2, 3)
    assert not state.S.any()
    assert la.FunctionMap(np.square, 4)(np.zeros((0, 4))).shape == (0, 4)


# what is refused


def refused(attn, words, kind=ValueError):
    """Every call that reads q or k, and the state as it was."""
    q, k, v = tokens()
    state = attn.init_state(2)
    calls = [
        lambda: attn.prefill(q, k, v, state),
        lambda: attn.step(*at(0, q, k, v), state),
        lambda: attn.write(k, v, state),
        lambda: attn.read(q, state),
    ]
    for call in calls:
        with pytest.raises(kind, match=words) as caught:
            call()
        assert "\n" not in str(caught.value)
        assert not state.S.any()
        assert not state.position.any()


@both
@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda x: x[..., :3], "3]"),
        (lambda x: x[..., 0], ""),
        (lambda x: x[None], ""),
        (lambda x: np.zeros(4), r"\[4\]"),
        (lambda x: 1.0, r"\[\]"),
        (lambda x: None, "object"),
        (lambda x: x > 0, "bool"),
        (lambda x: x + 1j, "complex"),
        (lambda x: x.astype(str), "U"),
    ],
    ids=["narrow", "flat", "deep", "one vector", "number", "none", "bool", "complex", "text"],
)
def test_results_that_are_no_features(function, got, backend):
    attn = layer(la.FunctionMap(function, 4, name="mine"), backend=backend)
    refused(attn, rf"mine.*{got}.*expected", ShapeError)
    with pytest.raises(ShapeError, match="mine"):
        la.FunctionMap(function, 4, name="mine")(np.ones((2, 4)))


def test_results_that_differ_in_shape_are_told_which_was_expected():
    with pytest.raises(ShapeError, match=r"\[2, 3\].*\[2, 4\].*\[2, 5\]"):
        la.FunctionMap(lambda x: x[..., :3], 5)(np.ones((2, 4)))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_results_that_are_not_finite(bad):
    refused(layer(la.FunctionMap(lambda x: x * 0 + np.where(x == x.max(), bad, 0), 4)), "φ", NotFiniteError)


def test_which_side_is_not_finite():
    q, k, v = tokens()
    for function, key, side in ((np.cos, lambda x: x * np.nan, "k"), (lambda x: x * np.nan, np.cos, "q")):
        attn = layer(la.FunctionMap(function, 4, key))
        with pytest.raises(NotFiniteError, match=rf"^φ\({side}\)"):
            attn.prefill(q, k, v, attn.init_state(2))


def test_unchecked_results():
    attn = layer(la.FunctionMap(lambda x: x * np.nan, 4), check_finite=False)
    q, k, v = tokens()
    assert np.isnan(attn.prefill(q, k, v, attn.init_state(2))).all()


def test_results_beyond_float32_are_not_finite():
    """Refused in words, not by a warning of NumPy's."""
    refused(layer(la.FunctionMap(lambda x: x.astype(np.float64) + 1e300, 4)), "φ", NotFiniteError)


@both
def test_nan_and_inf_are_refused_before_the_function_sees_them(backend):
    seen = []
    attn = layer(la.FunctionMap(recorded(seen), 4), backend=backend)
    q, k, v = tokens()
    k[1, 2, 1, 3] = np.nan
    state = attn.init_state(2)
    for call in (
        lambda: attn.prefill(q, k, v, state),
        lambda: attn.step(*at(2, q, k, v), state),
        lambda: attn.write(k, v, state),
    ):
        with pytest.raises(NotFiniteError, match=r"^k: nan"):
            call()
    assert not seen
    assert not state.position.any()


@both
def test_what_a_function_raises_comes_through_and_changes_nothing(backend):
    def function(x):
        raise KeyError("mine")

    refused(layer(la.FunctionMap(function, 4), backend=backend), "mine", KeyError)


@pytest.mark.parametrize("function", [None, 3, "square", np.ones(3)], ids=str)
def test_what_is_no_function(function):
    for options in (
        {"function": function},
        *([{"function": np.square, n: function} for n in ("key_function", "loop") if function is not None]),
    ):
        with pytest.raises(TypeError, match=r"FunctionMap: .*function"):
            la.FunctionMap(features=4, **options)


def test_a_loop_and_a_key_function_do_not_go_together():
    with pytest.raises(ValueError, match="key_function"):
        la.FunctionMap(double, 8, np.square, doubled)


@pytest.mark.parametrize("features", [0, -1, 2.0, "4", None, True, [4]])
def test_numbers_of_features(features):
    with pytest.raises(ValueError, match="FunctionMap: features"):
        la.FunctionMap(np.square, features)
    phi = la.FunctionMap(np.square, lambda K: features)
    with pytest.raises(ValueError, match="features"):
        layer(phi)
    with pytest.raises(ValueError, match="features"):
        phi(np.zeros(4))


def test_too_many_features():
    for features in (65537, lambda K: K * 20000):
        with pytest.raises(ValueError, match="65536"):
            layer(la.FunctionMap(np.square, features))


def test_features_as_a_function_of_the_width():
    phi = la.FunctionMap(lambda x: np.concatenate([x, x], axis=-1), lambda K: 2 * K)
    for K in (1, 3, 8):
        assert phi.dim(K) == 2 * K
        assert phi(np.ones((3, K))).shape == (3, 2 * K)
        assert layer(phi, K=K).init_state(1).S.shape == (1, 2, 2 * K, 3)


@pytest.mark.parametrize("name", ["", "elu", "favor", None, 3, b"x"])
def test_names_that_are_taken_or_none(name):
    with pytest.raises(ValueError, match="FunctionMap: name"):
        la.FunctionMap(np.square, 4, name=name)


@pytest.mark.parametrize("positive", [1, None, "yes"])
def test_positive_is_true_or_false(positive):
    with pytest.raises(ValueError, match="FunctionMap: positive"):
        la.FunctionMap(np.square, 4, positive=positive)


@pytest.mark.parametrize("loop", [None, doubled])
def test_a_layer_with_code_in_it_cannot_be_saved(loop, tmp_path):
    attn = layer(la.FunctionMap(double, 8, loop=loop, name="mine"))
    with pytest.raises(ValueError, match=r"feature_map: .*mine.*saved"):
        attn.save(tmp_path / "layer")
    assert not list(tmp_path.iterdir())


# states, copies, comparison


@pytest.mark.parametrize("loop", [None, doubled])
def test_states_can_be_saved(loop, tmp_path):
    attn = layer(la.FunctionMap(double, 8, loop=loop))
    q, k, v = tokens()
    state = attn.init_state(2)
    attn.prefill(q, k, v, state)
    state.save(tmp_path / "state")
    again = la.State.load(tmp_path / "state", layer(la.FunctionMap(double, 8, loop=loop)))
    np.testing.assert_array_equal(again.S, state.S)
    for other in (again, state.copy(), copy.deepcopy(state), state.select([0, 1])):
        kept = state.copy()
        np.testing.assert_array_equal(attn.step(*at(0, q, k, v), other), attn.step(*at(0, q, k, v), kept))
    with pytest.raises(StateMismatchError, match="feature_map"):
        la.State.load(tmp_path / "state", layer(la.FunctionMap(double, 8, name="other")))


def test_equality():
    one = la.FunctionMap(double, 8)
    assert one == la.FunctionMap(np.square, 8)  # one name, F and class: documented as equal
    assert hash(one) == hash(la.FunctionMap(np.square, 8))
    assert one != la.FunctionMap(double, 8, name="other")
    assert one != la.FunctionMap(double, 9)
    assert one != la.FunctionMap(double, lambda K: 8)
    assert one != la.Elu()
    assert "custom" in repr(one)
    assert "\n" not in repr(la.FunctionMap(double, lambda K: 8))


def test_states_of_functions_of_another_name_are_refused():
    q, k, v = (a[:, 0] for a in tokens())
    for other in (la.FunctionMap(np.square, 4, name="other"), la.FunctionMap(np.square, 8), la.Elu()):
        with pytest.raises(StateMismatchError, match="feature_map"):
            layer(la.FunctionMap(np.square, 4)).step(q, k, v, layer(other, normalize=False).init_state(2))


def squares(x, y):
    for i in range(x.size):
        y[i] = x[i] * x[i]


@pytest.mark.parametrize("made_with_a_loop", [True, False])
def test_a_state_of_the_same_map_with_or_without_a_loop(made_with_a_loop):
    """They count as equal: the state is right for both, or refused. What the kernels read is another thing."""
    attn, other = (layer(la.FunctionMap(np.square, 4, loop=loop)) for loop in (squares, None))
    if not made_with_a_loop:
        attn, other = other, attn
    q, k, v = tokens()
    want, S, _ = naive.attention(q, k, v, phi=naive.Map(np.square), scale=0.5)
    for way in ("prefill", "step"):
        state = attn.init_state(2)
        try:
            if way == "prefill":
                y = other.prefill(q, k, v, state)
            else:
                other.step(*at(0, q, k, v), other.init_state(2))  # the compiled entry is ready
                y = np.stack([other.step(*at(t, q, k, v), state) for t in range(5)], axis=1)
        except StateMismatchError:
            continue
        naive.assert_close(y, want, 2e-6)
        naive.assert_close(state.S, S, 2e-6)


@pytest.mark.parametrize("loop", [None, doubled])
def test_copies_of_a_map_and_its_layer(loop):
    phi = la.FunctionMap(double, 8, loop=loop)
    q, k, v = tokens()
    want = layer(phi).prefill(q, k, v, layer(phi).init_state(2))
    for twin in (copy.copy(phi), copy.deepcopy(phi)):
        assert twin == phi
        assert twin.has_loop == phi.has_loop
        np.testing.assert_array_equal(layer(twin).prefill(q, k, v, layer(twin).init_state(2)), want)
    attn = copy.deepcopy(layer(phi))
    np.testing.assert_array_equal(attn.prefill(q, k, v, layer(phi).init_state(2)), want)


@pytest.mark.parametrize("loop", [None, doubled])
def test_pickled_maps_of_functions_that_can_be(loop):
    """double and doubled are functions of a module: pickle finds them there."""
    phi = la.FunctionMap(double, 8, loop=loop)
    twin = pickle.loads(pickle.dumps(phi))
    assert twin == phi
    assert twin.has_loop == phi.has_loop
    attn = layer(phi)
    state = attn.init_state(2)
    q, k, v = tokens()
    y = attn.prefill(q, k, v, state)
    again, other = pickle.loads(pickle.dumps((attn, state)))
    np.testing.assert_array_equal(other.S, state.S)
    np.testing.assert_array_equal(again.prefill(q, k, v, again.init_state(2)), y)


# classes of the caller's own


class Shifted(la.FeatureMap):
    """φ(x) = [x + n, n], with a number of its own and no loop."""

    name = "shifted"
    positive = False

    def dim(self, K):
        return K + 1

    def numbers(self, K):
        return np.full((1, 1, 1), 0.5)

    def define(self, x, weights, position):
        return np.concatenate([x + weights[0], np.zeros_like(x[..., :1]) + weights[0]], axis=-1)


class Looped(Shifted):
    @staticmethod
    def loop(x, y, weights, position):
        for i in range(x.size):
            y[i] = x[i] + weights[0]
        y[x.size] = weights[0]


@both
@pytest.mark.parametrize("cls", [Shifted, Looped])
def test_a_class_with_and_without_a_loop(cls, backend):
    check(layer(cls(), backend=backend), lambda x: np.concatenate([x + 0.5, np.full_like(x[..., :1], 0.5)], axis=-1))


class Doubled(la.Elu):
    """What φ is, is said; the loop is the parent's."""

    def define(self, x, weights, position):
        return 2 * super().define(x, weights, position)


@both
def test_a_subclass_that_defines_anew_without_a_loop_does_not_run_its_parents(backend):
    check(layer(Doubled(), backend=backend), lambda x: 2 * naive.ELU.features(x))


class Placed(la.FeatureMap):
    """φ(x) = (1 + i) x at position i."""

    name = "placed"
    positive = False
    horizon = 8

    def define(self, x, weights, position):
        return x * (1 + position[..., None]).astype(x.dtype)


class PlacedLoop(Placed):
    @staticmethod
    def loop(x, y, weights, position):
        for i in range(x.size):
            y[i] = x[i] * (1 + position)


@both
@pytest.mark.parametrize("cls", [Placed, PlacedLoop])
def test_a_class_that_reads_positions(cls, backend):
    attn = layer(cls(), backend=backend)
    q, k, v = tokens()
    oracle = naive.Map(lambda x, position: x * (1 + position[..., None]), placed=True)
    want, S, _ = naive.attention(q, k, v, phi=oracle, scale=0.5)
    for way in ("prefill", "steps"):
        state = attn.init_state(2)
        if way == "prefill":
            y = attn.prefill(q, k, v, state)
        else:
            y = np.stack([attn.step(*at(t, q, k, v), state) for t in range(5)], axis=1)
        naive.assert_close(y, want, 2e-6)
        naive.assert_close(state.S, S, 2e-6)
        naive.assert_close(attn.read(q[:, 4], state), want[:, 4], 2e-6)
    with pytest.raises(ValueError, match="placed: stream 0"):
        attn.prefill(q, k, v, state)


def test_code_of_the_callers_own_is_not_saved(tmp_path):
    for phi in (Shifted(), Doubled()):
        with pytest.raises(ValueError, match="feature_map"):
            layer(phi, normalize=False).save(tmp_path / "layer")
    assert not list(tmp_path.iterdir())


def test_a_loop_that_says_something_else_is_refused():
    def wrong(x, y):
        for i in range(x.size):
            y[i] = 2 * x[i]

    def idle(x, y):
        pass

    for loop in (wrong, idle):
        phi = la.FunctionMap(lambda x: 3 * x, lambda K: K, loop=loop)
        with pytest.raises(ValueError, match="loop and function of 'custom' differ at K = 4"):
            la.LinearAttention(1, 4, feature_map=phi)

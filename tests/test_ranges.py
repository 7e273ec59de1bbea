"""Large vectors: φ stays finite in the kernels, or the layer says up to which norm it would."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linattn_edge as la
from cases import FUNCTIONS, NOJIT, SAMPLES, sample
from linattn_edge.errors import NotFiniteError

pytestmark = pytest.mark.nojit
K = 4
BACKENDS = ["cpu", "reference"]
LARGEST = {dtype: float(np.finfo(dtype).max) for dtype in ("float32", "float64")}
UNLIMITED = ["identity", "elu", "relu", "cosformer"]
LIMITED = [name for name in SAMPLES if name not in UNLIMITED]
dtypes = pytest.mark.parametrize("dtype", LARGEST)
both = pytest.mark.parametrize("backend", BACKENDS)


def layer(phi, width=K, **options):
    phi = sample(phi, width) if isinstance(phi, str) else phi
    given = {"feature_map": phi, "update_rule": "gated", "normalize": False, "scale": 1.0}
    return la.LinearAttention(1, width, 1, **(given | options))


def written(attn, x, dtype="float32"):
    """φ of each row of x [n, K] as the kernels make it: one write of v = 1 into an empty state, [n, F]."""
    x = np.asarray(x, dtype)[:, None]
    state = attn.init_state(len(x), dtype)
    ones = np.ones((len(x), 1), dtype)
    attn.write(x, ones[..., None], state, g=ones - np.inf)
    return np.array(state.S[:, 0, :, 0])


def directions(phi, dtype, width=K):
    """Unit vectors: each axis both ways, the diagonal, at random, and along the rows that the map multiplies with."""
    rng = np.random.default_rng(0)
    rows = [*np.eye(width), *-np.eye(width), np.ones(width), *rng.standard_normal((20, width))]
    numbers = phi.weights(width)[-1, 0]
    if phi.name in ("favor", "rff"):
        rows += [*numbers[1:].reshape(-1, width)]
    elif phi.name in ("hedgehog", "t2r", "elementwise_product"):
        R = (numbers.size - 1) // (width + 1)
        rows += [s * row for row in numbers[1 : 1 + R * width].reshape(R, width) for s in (1, -1)]
    rows = np.array(rows)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


# below and above the limit


def test_which_maps_have_a_limit():
    for name in SAMPLES:
        for largest in LARGEST.values():
            limit = sample(name).limit(K, largest)
            assert (limit == math.inf) == (name in UNLIMITED), name
            assert limit > 1


@dtypes
@pytest.mark.parametrize("name", LIMITED)
def test_just_below_the_limit(name, dtype):
    phi = sample(name)
    limit = phi.limit(K, LARGEST[dtype])
    for part in (1 - 2e-4, 0.99, 0.5):
        x = directions(phi, dtype) * (part * limit)
        y = written(layer(phi), x, dtype)
        assert np.isfinite(y).all()
        with np.errstate(under="ignore"):
            assert np.isfinite(phi.query(x.astype(dtype))).all()


@dtypes
@pytest.mark.parametrize("name", LIMITED)
def test_at_the_limit_it_is_finite_or_refused(name, dtype):
    """To the last bit: whether a vector is let through is itself decided with rounding."""
    phi = sample(name)
    attn = layer(phi)
    limit = phi.limit(K, LARGEST[dtype])
    unit = directions(phi, dtype)
    eps = float(np.finfo(dtype).eps)
    taken = 0
    for n in (-1000, -30, *range(-6, 7), 30, 1000):
        with np.errstate(over="ignore", invalid="ignore"):
            x = (unit * (limit * (1 + n * eps / 4))).astype(dtype)
        for row in x[np.isfinite(x).all(axis=1)]:
            try:
                y = written(attn, row[None], dtype)
            except ValueError:
                continue
            taken += 1
            assert np.isfinite(y).all(), (n, row)
    assert taken


@dtypes
@both
@pytest.mark.parametrize("name", LIMITED)
def test_above_the_limit(name, backend, dtype):
    """Every call that reads q or k says which, the map and the norms, and changes nothing."""
    phi = sample(name)
    limit = phi.limit(K, LARGEST[dtype])
    attn = layer(phi, backend=backend)
    good = np.full((2, 3, 1, K), 0.1, dtype)
    bad = good.copy()
    with np.errstate(over="ignore"):
        bad[1, 2, 0] = directions(phi, dtype)[-1].astype(dtype) * dtype_value(limit * 1.001, dtype)
    if not np.isfinite(bad).all():  # the largest numbers are within the limit, but not many of them together
        bad[1, 2, 0] = LARGEST[dtype]
    v, g = np.ones((2, 3, 1, 1), dtype), np.zeros((2, 3, 1), dtype)
    state = attn.init_state(2, dtype)
    one, far = (np.ascontiguousarray(x[:, 2]) for x in (good, bad))  # as the compiled entry takes them
    rest = np.ones((2, 1, 1), dtype), state, np.zeros((2, 1), dtype)
    attn.step(one, one, *rest)  # it is ready
    before = state.copy()
    calls = {
        "prefill q": lambda: attn.prefill(bad, good, v, state, g=g),
        "prefill k": lambda: attn.prefill(good, bad, v, state, g=g),
        "step q": lambda: attn.step(far, one, *rest),
        "step k": lambda: attn.step(one, far, *rest),
        "slices k": lambda: attn.step(good[:, 2], bad[:, 2], *rest),
        "active k": lambda: attn.step(one, far, *rest, active=[False, True]),
        "write k": lambda: attn.write(bad, v, state, g=g),
        "read q": lambda: attn.read(bad, state),
        "lengths q": lambda: attn.prefill(bad, good, v, state, g=g, lengths=[0, 3]),
    }
    for label, call in calls.items():
        with pytest.raises(ValueError, match=rf"^{label[-1]}: .*norm") as caught:
            call()
        message = str(caught.value)
        assert "\n" not in message
        assert f"{limit:.6g}" in message
        assert dtype in message
        assert repr(phi) in message
        assert not isinstance(caught.value, NotFiniteError)
        np.testing.assert_array_equal(state.S, before.S)
        np.testing.assert_array_equal(state.position, before.position)


def dtype_value(x, dtype):
    return np.dtype(dtype).type(x)


def padded(bad):
    """Two streams; what is bad stands where nothing is looked at."""
    x = np.full((2, 3, 1, K), 0.1, np.float32)
    x[1, 1:] = bad
    return x, np.ones((2, 3, 1, 1), np.float32), np.zeros((2, 3, 1), np.float32)


@both
@pytest.mark.parametrize("bad", [3e38, np.inf, np.nan])
@pytest.mark.parametrize("name", LIMITED)
def test_padded_places_are_not_looked_at(name, backend, bad):
    attn = layer(name, backend=backend)
    x, v, g = padded(bad)
    y, state, other = [], attn.init_state(2), attn.init_state(2)
    y.append(attn.prefill(x, x, v, state, g=g, lengths=[3, 1]))
    y.append(attn.step(x[:, 2], x[:, 2], v[:, 2], state, g=g[:, 2], active=[True, False]))
    attn.write(x, v, other, g=g, lengths=[3, 1])
    assert all(np.isfinite(a).all() for a in (*y, state.S, other.S))
    np.testing.assert_array_equal(state.position, [4, 1])


@pytest.mark.parametrize("name", LIMITED)
def test_unchecked_layers_let_everything_through(name):
    if NOJIT and name == "rff":
        pytest.skip("Python's own cosine of inf is an error")
    attn = layer(name, check_finite=False)
    x = np.full((1, 1, K), 3e38, np.float32)
    state = attn.init_state(1)
    attn.step(x, x, np.ones((1, 1, 1), np.float32), state, g=np.zeros((1, 1), np.float32))
    assert state.position == 1


@both
@dtypes
@pytest.mark.parametrize("name", [*SAMPLES, *FUNCTIONS])
def test_qk_norm_lifts_the_limit(name, dtype, backend):
    """φ sees unit vectors, whatever comes in."""
    attn = layer(name, qk_norm=True, backend=backend)
    size = 1e18 if name in FUNCTIONS else 1e38 if dtype == "float32" else 1e150
    x = np.array([[1, -1, 0, 1], [0, 0, 0, -1], [1, 1, 1, 1]]) * size
    root = np.sqrt(np.array([3, 1, 4]))[:, None]
    unit = (np.sign(x) / root).astype(dtype)
    want = sample(name).key(unit.astype(np.float64), 0)
    y = written(attn, x, dtype)
    np.testing.assert_allclose(y, want, rtol=2e-6, atol=2e-6)


@both
def test_unit_vectors_of_the_largest_numbers(backend):
    """The norm itself is beyond the range; float64 in NumPy can't say so of float32."""
    for dtype in LARGEST if backend == "cpu" else ("float32",):
        y = written(layer("identity", qk_norm=True, backend=backend), np.full((1, K), LARGEST[dtype]), dtype)
        np.testing.assert_allclose(y, 0.5, rtol=1e-6)


@both
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    "phi",
    [
        la.Hedgehog([[200.0]]),
        la.Hedgehog([[1.0]], [200.0]),
        la.T2R([[1.0]], [3.5e38]),
        la.T2R([[3.5e38]]),
        la.ElementwiseProduct([[3e19]], [[3e19]]),
        la.Favor(4),
    ],
    ids=["weight", "bias", "bias beyond float32", "weight beyond float32", "product", "harmless"],
)
def test_weights_so_large_that_the_limit_is_below_1(phi, qk_norm, backend):
    """φ of a unit vector, or even of zero, is beyond float32: to be refused, by the layer or by its calls."""
    for x in (0.0, 0.4, 0.9, 3.0):
        try:
            y = written(layer(phi, 1, qk_norm=qk_norm, backend=backend), [[x]])
        except ValueError as error:
            assert type(phi).__name__ in str(error)  # noqa: PT017
            assert phi.name != "favor"
        else:
            assert np.isfinite(y).all(), x


# any numbers at all


def finite(width):
    return st.floats(allow_nan=False, allow_infinity=False, width=width)


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("name", SAMPLES)
def test_any_finite_vector_is_finite_or_refused(name, dtype):
    attn = layer(name)

    @given(x=st.lists(finite(8 * np.dtype(dtype).itemsize), min_size=K, max_size=K))
    @settings(max_examples=25 if not NOJIT else 15, derandomize=True, database=None)
    def check(x):
        try:
            y = written(attn, [x], dtype)
        except ValueError as error:
            assert "norm" in str(error)  # noqa: PT017
            assert attn.layer.phi.limit(K, LARGEST[dtype]) < 2 * math.hypot(*x)
        else:
            assert np.isfinite(y).all()

    check()


@dtypes
@pytest.mark.parametrize("name", UNLIMITED)
def test_maps_without_a_limit_take_the_largest_numbers(name, dtype):
    x = np.array([[1, 1, 1, 1], [-1, -1, -1, -1], [1, -1, 0, 1]]) * LARGEST[dtype]
    y = written(layer(name), x, dtype)
    assert np.isfinite(y).all()
    assert y.max() >= 0.99 * LARGEST[dtype]


@pytest.mark.parametrize("name", SAMPLES)
def test_the_smallest_numbers_and_zero(name):
    """0, subnormal and tiny: what is divided by is never 0."""
    x = np.zeros((4, K), np.float32)
    x[1], x[2, 1], x[3] = 1e-45, -1e-45, [1e-30, -1e-38, 1e-42, 0]
    phi = sample(name)
    y = written(layer(phi), x)
    assert np.isfinite(y).all()
    want = phi.key(x.astype(np.float64), 0)
    if name != "dpfp sum":  # products of such numbers are 0 in float32, which is all that a sum can be made of
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("name", ["favor", "favor hyperbolic", "rff", "hedgehog", "t2r", "product", "relu2"])
def test_wide_heads(name, width):
    """The limit falls with the size of the weights, of which wide heads have more."""
    if NOJIT and width > 64:
        pytest.skip("slow when interpreted")
    phi = sample(name, width)
    limit = phi.limit(width, LARGEST["float32"])
    assert limit > 20  # vectors of 256 ordinary numbers have norm 16
    unit = directions(phi, "float32", width)
    y = written(layer(phi, width), unit[-12:] * limit * (1 - 2e-4))
    assert np.isfinite(y).all()
    with pytest.raises(ValueError, match="norm"):
        written(layer(phi, width), unit[-1:] * limit * 1.01)


BOUNDED = [
    "dpfp sum",
    "hedgehog softmax",
    "hedgehog joint",
    "favor",
    "favor hyperbolic",
]  # only what is in between is not


@pytest.mark.parametrize("name", LIMITED)
def test_the_limit_is_not_far_too_low(name):
    """Refusing what would have been right is no way to be safe: twice the limit does leave the range."""
    phi = sample(name)
    limit = phi.limit(K, LARGEST["float32"])
    if name in BOUNDED:
        assert limit > 1e17
    else:
        with np.errstate(over="ignore"):
            assert np.abs(phi.key(directions(phi, "float32") * (2 * limit))).max() > LARGEST["float32"]

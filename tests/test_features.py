"""Feature maps: φ against its formula, κ(q, k) against the closed form, and what is refused."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linattn_edge as la
from cases import SAMPLES, sample
from linattn_edge.errors import ShapeError
from linattn_edge.features import MAPS, MAX_FEATURES

pytestmark = pytest.mark.nojit

ALL = [
    la.Identity(),
    la.Elu(),
    la.Relu(),
    la.Relu2(),
    la.Polynomial(),
    la.Polynomial(degree=1, bias=0.0),
    la.Polynomial(degree=3, bias=0.0),
    la.Polynomial(degree=4, bias=0.3),
    la.Taylor(order=0),
    la.Taylor(order=1),
    la.Taylor(),
    la.Taylor(order=5),
    la.Dpfp(),
    la.Dpfp(nu=3),
    la.Dpfp(nu=2, sum_norm=True),
]


def plain_dpfp(x, nu, sum_norm):
    """Schlag et al. 2021, eq. 37-38, entry by entry, and their sum normalisation."""
    r = [max(a, 0.0) for a in x] + [max(-a, 0.0) for a in x]
    y = [r[i] * r[(i - j) % len(r)] for j in range(1, nu + 1) for i in range(len(r))]
    return [a / math.fsum(y) for a in y] if sum_norm and any(y) else y


def similarity(phi, q, k):
    """κ(q, k) in float64, from the formulas and not from φ."""
    name = phi.name
    if name in ("polynomial", "taylor"):
        x = math.fsum(a * b for a, b in zip(q, k, strict=True)) / math.sqrt(len(q))
        if name == "polynomial":
            return (x + phi.bias) ** phi.degree
        return math.fsum(x**n / math.factorial(n) for n in range(phi.order + 1))
    one = {
        "identity": lambda x: x,
        "elu": lambda x: [a + 1 if a >= 0 else math.exp(a) for a in x],
        "relu": lambda x: [max(a, 0.0) for a in x],
        "relu2": lambda x: [max(a, 0.0) ** 2 for a in x],
        "dpfp": lambda x: plain_dpfp(x, phi.nu, phi.sum_norm),
    }[name]
    return math.fsum(a * b for a, b in zip(one(q), one(k), strict=True))


@pytest.mark.parametrize("K", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("phi", ALL, ids=repr)
def test_kernel_is_the_closed_form(phi, K):
    rng = np.random.default_rng(K)
    q, k = rng.standard_normal((2, 20, K)) * 1.5
    exact = np.array([similarity(phi, *pair) for pair in zip(q.tolist(), k.tolist(), strict=True)])
    size = np.array([math.sqrt(similarity(phi, x, x) * similarity(phi, y, y)) for x, y in zip(q, k, strict=True)])
    # the inner product of φ rounds relative to |φ(q)| |φ(k)|, which cancellation can leave far above κ
    assert np.abs(phi.kernel(q, k) - exact).max() <= 1e-13 * size.max()
    np.testing.assert_allclose(np.sum(phi.query(q) * phi.key(k), -1), phi.kernel(q, k), rtol=1e-12)
    single = phi.kernel(q.astype(np.float32), k.astype(np.float32))
    assert single.dtype == np.float32
    assert (np.abs(single - exact) <= 2e-6 * size + 1e-7).all()


@pytest.mark.parametrize(
    ("phi", "F"),
    [
        (la.Identity(), lambda K: K),
        (la.Elu(), lambda K: K),
        (la.Relu(), lambda K: K),
        (la.Relu2(), lambda K: K),
        (la.Dpfp(), lambda K: 2 * K),
        (la.Dpfp(nu=3), lambda K: 6 * K),
        (la.Polynomial(), lambda K: math.comb(K + 2, 2)),
        (la.Polynomial(degree=3), lambda K: math.comb(K + 3, 3)),
        (la.Polynomial(degree=1, bias=0), lambda K: K),
        (la.Polynomial(degree=3, bias=0), lambda K: math.comb(K + 2, 3)),
        (la.Taylor(order=0), lambda K: 1),
        (la.Taylor(order=1), lambda K: K + 1),
        (la.Taylor(order=4), lambda K: math.comb(K + 4, 4)),
    ],
    ids=repr,
)
def test_width(phi, F):
    for K in (1, 2, 5, 16):
        assert phi.dim(K) == F(K)
        assert phi(np.zeros(K)).shape == (F(K),)
    assert la.LinearAttention(1, 5, feature_map=phi).init_state(1).S.shape == (1, 1, F(5), 5)


@pytest.mark.parametrize(("phi", "K"), [(la.Polynomial(), 3), (la.Polynomial(3, 0.5), 3), (la.Taylor(4), 2)])
def test_every_symmetric_term_is_there_once(phi, K):
    """As many different products as F: no term twice, none left out. Primes tell the products apart."""
    x = np.array([2.0, 3.0, 5.0][:K])
    degrees = range(phi._order() + 1)
    terms = [t for d in degrees for t in itertools.combinations_with_replacement(range(K), d)]
    assert len(terms) == phi.dim(K)
    scale = phi(np.ones(K))  # the coefficients alone
    got = sorted(np.rint(phi(x) / scale).astype(int).tolist())
    assert got == sorted(int(math.prod(x[i] for i in term)) for term in terms)


@pytest.mark.parametrize("K", [1, 2, 3, 4])
@pytest.mark.parametrize("order", range(9))
def test_taylor_is_within_its_error_bound(order, K):
    """|exp(x) − κ| ≤ |x|^{n+1}/(n+1)! · max(1, eˣ), x = qᵀk/√K (Taylor's theorem)."""
    rng = np.random.default_rng(order * 10 + K)
    q, k = rng.standard_normal((2, 60, K)) * np.linspace(0.1, 2, 60)[:, None]
    x = np.array([math.fsum(a * b) / math.sqrt(K) for a, b in zip(q, k, strict=True)])
    bound = np.abs(x) ** (order + 1) / math.factorial(order + 1) * np.maximum(1, np.exp(x))
    phi = la.Taylor(order=order)
    rounding = 1e-14 * np.sqrt(phi.kernel(q, q) * phi.kernel(k, k))
    error = np.abs(phi.kernel(q, k) - np.exp(x))
    assert (error <= bound + rounding).all()
    assert (error >= 0.3 * bound - rounding)[np.abs(x) < 1].all()  # and the bound is not idle


def test_odd_taylor_orders_go_negative_and_even_ones_do_not():
    q, k = np.array([[2.0]]), np.linspace(-4, 4, 81)[:, None]
    for order in range(1, 8):
        negative = (la.Taylor(order=order).kernel(q, k) < 0).any()
        assert negative == (order % 2 == 1)
        assert la.Taylor(order=order).positive == (not negative)


def test_which_maps_are_positive():
    """A layer that is not told divides by z only where κ ≥ 0 is certain."""
    signed = {"identity", "polynomial", "elementwise_product", "rff"}
    for phi in map(sample, SAMPLES):
        positive = phi.name not in signed and phi != la.Taylor(1) and phi != la.Taylor(3)
        assert phi.positive == positive
        assert la.LinearAttention(1, 4, feature_map=phi).layer.normalize == positive
        assert not la.LinearAttention(1, 4, feature_map=phi, update_rule="gated").layer.normalize


coordinates = st.lists(st.floats(-1, 1), min_size=4, max_size=4).map(np.array)
EXAMPLES = settings(derandomize=True, database=None, max_examples=300)


@pytest.mark.parametrize("order", [0, 2, 4, 6, 8])
@given(x=st.floats(-60, 60))
@EXAMPLES
def test_even_taylor_series_are_positive_for_every_x(order, x):
    """Σ xⁿ/n! to an even order has no zero; K = 1 and k = 1 make it φ(q)ᵀφ(k), in float64."""
    exact = sum((Fraction(x) ** n / math.factorial(n) for n in range(order + 1)), Fraction(0))
    assert exact > 0
    kappa = la.Taylor(order).kernel(np.array([x]), np.array([1.0]))
    size = math.fsum(abs(x) ** n / math.factorial(n) for n in range(order + 1))
    assert abs(kappa - float(exact)) <= 1e-15 * (order + 1) * size


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("order", [2, 4])
@given(q=coordinates, k=coordinates, scale=st.floats(0.01, 1))
@EXAMPLES
def test_packed_taylor_is_positive_where_rounding_cannot_reach_zero(order, dtype, q, k, scale):
    """κ is at least m, the least value of the series, and rounds by less than (F + order) ε Σ rⁿ/n!, r = ‖q‖‖k‖/√K.

    So it is positive up to the r where that is m; opposed vectors, for which it is least, included.
    """
    least = {2: 0.5, 4: 0.27}[order]
    phi, eps = la.Taylor(order), np.finfo(dtype).eps
    r = 1.0
    while (phi.dim(4) + order) * eps * sum((1.1 * r) ** n / math.factorial(n) for n in range(order + 1)) < least:
        r *= 1.1
    assert r > {2: 100, 4: 20}[order]
    for a, b in ((q, k), (q, -q)):
        size = np.linalg.norm(a) * np.linalg.norm(b) / 2
        if size > 1e-6:
            factor = math.sqrt(scale * r / size)
            a, b = (factor * a).astype(dtype), (factor * b).astype(dtype)
            assert phi.kernel(a, b) > 0


@pytest.mark.parametrize("phi", [phi for phi in ALL if phi.positive], ids=repr)
def test_positive_maps_have_no_negative_similarity(phi):
    q, k = np.random.default_rng(0).standard_normal((2, 500, 3)) * 2
    assert (phi.kernel(q, k) >= -1e-12 * np.sqrt(phi.kernel(q, q) * phi.kernel(k, k))).all()


# values by hand


def test_elu_far_below_zero_keeps_its_small_values():
    """elu(x) + 1 = exp(x): adding 1 after the fact loses everything below −18 in float32."""
    for dtype in (np.float32, np.float64):
        y = la.Elu()(np.array([-20, -80, -1e4, -8, 0, 1, -0.0], dtype))
        assert y.dtype == dtype
        expected = [math.exp(-20), math.exp(-80), 0.0, math.exp(-8), 1.0, 2.0, 1.0]
        np.testing.assert_allclose(y, expected, rtol=3e-7 if dtype == np.float32 else 1e-15)
    assert not np.isnan(la.Elu()(np.array([-np.inf, 3e38], np.float32))).any()


def test_elu_of_half_precision_inputs():
    """elu(−8) + 1 = 3.3546e-4, also when the input has few bits."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for dtype in (np.float16, ml_dtypes.bfloat16):
        y = la.Elu()(np.array([-8, -20], dtype))
        assert y.dtype == np.float32
        np.testing.assert_allclose(y, [3.3546262790251185e-4, 2.061153622438558e-9], rtol=3e-7)


def test_relu_maps_by_hand():
    x = np.array([-2.0, -0.0, 0.0, 0.5, 3.0])
    np.testing.assert_array_equal(la.Identity()(x), x)
    np.testing.assert_array_equal(la.Relu()(x), [0, 0, 0, 0.5, 3])
    np.testing.assert_array_equal(la.Relu2()(x), [0, 0, 0, 0.25, 9])


def test_dpfp_by_hand():
    """x = (2, −3): r = (2, 0, 0, 3), times r turned by one place, (3, 2, 0, 0), and by two, (0, 3, 2, 0)."""
    x = np.array([2.0, -3.0])
    np.testing.assert_array_equal(la.Dpfp()(x), [6, 0, 0, 0])
    np.testing.assert_array_equal(la.Dpfp(nu=2)(x), [6, 0, 0, 0, 0, 0, 0, 0])
    y = la.Dpfp(nu=2)(np.array([1.0, 2.0, -5.0]))  # r = (1, 2, 0, 0, 0, 5)
    np.testing.assert_array_equal(y, [5, 2, 0, 0, 0, 0, 0, 10, 0, 0, 0, 0])


def test_polynomial_by_hand():
    """Degree 2 in one variable: (x·y + 1)² = 1 + 2xy + x²y²."""
    np.testing.assert_allclose(la.Polynomial()(np.array([3.0])), [1, 3 * math.sqrt(2), 9], rtol=1e-15)
    np.testing.assert_allclose(la.Polynomial(2, 0)(np.array([3.0])), [9], rtol=1e-15)
    np.testing.assert_allclose(la.Taylor(2)(np.array([3.0])), [1, 3, 9 / math.sqrt(2)], rtol=1e-15)
    half = math.sqrt(0.5)  # K = 2: x_i x_j / √K, the mixed term √2 times
    np.testing.assert_allclose(la.Polynomial(2, 0)(np.array([3.0, 5.0])), [9 * half, 15, 25 * half], rtol=1e-15)


# the compiled loop is the definition


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("K", [1, 5])
@pytest.mark.parametrize("phi", ALL, ids=repr)
def test_the_loop_is_the_definition(phi, K, dtype):
    """One write of v = 1 into an empty state leaves φ(k) in S; a read with S = identity gives φ(q)."""
    x = np.random.default_rng(0).standard_normal((6, 1, K)).astype(dtype) * 2
    x[0] = 0
    x[1, 0, 0] = -30
    exact = phi(x.astype(np.float64))
    if dtype == "float32" and phi.name in ("elu",):
        exact = phi(x).astype(np.float64)
    F = phi.dim(K)
    attn = la.LinearAttention(1, K, F, feature_map=phi, normalize=False, scale=1.0)
    state = attn.init_state(6, dtype)
    attn.write(x, np.ones((6, 1, F), dtype), state)
    rtol = 1e-6 if dtype == "float32" else 1e-14
    np.testing.assert_allclose(state.S[:, :, :, 0], exact, rtol=rtol, atol=1e-37)
    state.S = np.broadcast_to(np.eye(F), state.S.shape)
    np.testing.assert_allclose(attn.read(x, state), exact, rtol=rtol, atol=1e-37)


def test_the_loop_of_elu_keeps_small_values():
    attn = la.LinearAttention(1, 4, 1, normalize=False)
    state = attn.init_state(1)
    attn.write(np.array([[[-20, -80, -1e4, -8]]], np.float32), np.ones((1, 1, 1)), state)
    expected = [math.exp(-20), math.exp(-80), 0, math.exp(-8)]
    np.testing.assert_allclose(state.S.ravel(), expected, rtol=3e-7)


@pytest.mark.parametrize("side", ["NumPy", "kernel"])
def test_elu_underflows_only_where_float32_does(side):
    """Below −87.3 values are subnormal, multiples of 2^−149; 0 is right from −103.973 on, with half of that left."""
    x = -np.linspace(80, 104.5, 3001).astype(np.float32)[:, None]
    if side == "NumPy":
        y = la.Elu()(x)[:, 0]
    else:
        attn = la.LinearAttention(1, 1, 1, normalize=False, check_finite=False)
        state = attn.init_state(len(x))
        attn.write(x[:, None], np.ones((len(x), 1, 1), np.float32), state)
        y = state.S[:, 0, 0, 0]
    exact = np.exp(x[:, 0].astype(np.float64))
    assert (np.abs(y - exact) <= 1e-6 * exact + 1.1 * 2.0**-149).all()
    assert (y[x[:, 0] > -103.97] > 0).all()
    assert (y[x[:, 0] < -104] == 0).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_loop_of_elu_takes_half_inputs_as_they_are(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kind = np.float16 if dtype == "float16" else ml_dtypes.bfloat16
    attn = la.LinearAttention(1, 4, 1, normalize=False)
    for call in ("write", "prefill", "step"):
        state = attn.init_state(1)
        x, v = np.array([[[-8, -20, -80, -0.5]]], kind), np.ones((1, 1, 1), kind)
        if call == "step":
            attn.step(x, x, v, state)
        elif call == "prefill":
            attn.prefill(x[None], x[None], v[None], state)
        else:
            attn.write(x, v, state)
        exact = [math.exp(-8), math.exp(-20), math.exp(-80), math.exp(-0.5)]
        np.testing.assert_allclose(state.S.ravel(), exact, rtol=1e-6)


def test_dpfp_divided_by_its_sum():
    """x = (1, 2): r = (1, 2, 0, 0), φ = (0, 2, 0, 0) + (0, 0, 0, 0) for nu = 2; the sum is 1, and 0 stays 0."""
    phi = la.Dpfp(nu=2, sum_norm=True)
    np.testing.assert_array_equal(phi(np.array([1.0, 2.0])), [0, 1, 0, 0, 0, 0, 0, 0])
    y = phi(np.array([1.0, 2.0, -5.0]))  # 5, 2, 10 of 17
    np.testing.assert_allclose(y, np.array([5, 2, 0, 0, 0, 0, 0, 10, 0, 0, 0, 0]) / 17, rtol=1e-15)
    for zero in (np.zeros(3), np.array([3.0, 0, 0]), np.array([0.0, 0, -1])):  # no two neighbours: every product is 0
        np.testing.assert_array_equal(la.Dpfp(sum_norm=True)(zero), 0)
    x = np.random.default_rng(0).standard_normal((50, 5))
    np.testing.assert_allclose(phi(x).sum(axis=1), 1, rtol=1e-14)
    np.testing.assert_allclose(phi(3 * x), phi(x), rtol=1e-14)  # the length does not matter


# shapes and dtypes


@pytest.mark.parametrize("phi", ALL, ids=repr)
def test_batches_are_row_by_row(phi):
    x = np.random.default_rng(0).standard_normal((2, 3, 4))
    y = phi(x)
    assert y.shape == (2, 3, phi.dim(4))
    for i, j in np.ndindex(2, 3):
        np.testing.assert_array_equal(y[i, j], phi(x[i, j]))
    assert phi(np.zeros((0, 4))).shape == (0, phi.dim(4))
    assert phi.kernel(x[:, :, None], x[:, None]).shape == (2, 3, 3)
    assert phi.kernel(x[0, 0], x).shape == (2, 3)
    np.testing.assert_array_equal(phi.query(x), y)
    np.testing.assert_array_equal(phi.key(x), y)


@pytest.mark.parametrize("phi", ALL, ids=repr)
def test_inputs_are_left_alone(phi):
    x = np.random.default_rng(0).standard_normal((3, 4))
    before = x.copy()
    x.flags.writeable = False
    y = phi(x)
    y[:] = 7  # and the result is the caller's own
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(phi(x), phi(before))


@pytest.mark.parametrize(("given", "got"), [("f2", "f4"), ("f4", "f4"), ("f8", "f8")])
@pytest.mark.parametrize("phi", ALL, ids=repr)
def test_precision(phi, given, got):
    assert phi(np.ones((2, 3), given)).dtype == np.dtype(got)
    assert phi.kernel(np.ones((2, 3), given), np.ones((2, 3), given)).dtype == np.dtype(got)


def test_lists_are_taken():
    assert la.Relu()([-1.0, 2.0]).tolist() == [0, 2]


def test_a_scalar_is_no_vector():
    with pytest.raises(ShapeError, match="elu"):
        la.Elu()(1.0)


# names, parameters, limits


def test_names():
    names = ["identity", "elu", "relu", "relu2", "polynomial", "taylor", "dpfp", "cosformer", "hedgehog", "t2r"]
    assert list(MAPS) == [*names, "elementwise_product", "favor", "rff"]
    assert {sample(name).name for name in SAMPLES} == set(MAPS)
    for name, cls in MAPS.items():
        if name not in ("cosformer", "hedgehog", "t2r", "elementwise_product"):
            assert la.feature_map(name) == cls()
        assert cls.name == name
        assert cls.__doc__
        assert cls in vars(la).values()
    assert la.feature_map("taylor", order=3) == la.Taylor(order=3)
    phi = la.Relu()
    assert la.feature_map(phi) is phi


@pytest.mark.parametrize("phi", ALL, ids=repr)
def test_equality_hash_and_config(phi):
    again = la.feature_map(**phi.config())
    assert again == phi
    assert hash(again) == hash(phi)
    assert again is not phi
    assert eval(repr(phi), vars(la)) == phi
    assert [other == phi for other in ALL].count(True) == 1
    assert phi != phi.name


def test_defaults():
    assert la.Polynomial() == la.Polynomial(degree=2, bias=1.0) == la.Polynomial(np.int64(2), 1)
    assert la.Taylor() == la.Taylor(order=2)
    assert la.Dpfp() == la.Dpfp(nu=1) == la.Dpfp(nu=1, sum_norm=False)
    assert la.Dpfp(2) != la.Dpfp(2, sum_norm=True)
    assert la.Favor() == la.Favor(num_features=64, seed=0, orthogonal=True, hyperbolic=False)
    assert la.Rff() == la.Rff(num_features=64, seed=0, orthogonal=True)
    assert la.Polynomial() != la.Polynomial(bias=2.0)
    assert la.Polynomial(2, 0.0) != la.Taylor(2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: la.Polynomial(degree=0), "degree.*0"),
        (lambda: la.Polynomial(degree=-1), "degree"),
        (lambda: la.Polynomial(degree=2.0), "degree"),
        (lambda: la.Polynomial(degree=True), "degree"),
        (lambda: la.Polynomial(bias=-0.1), "bias.*-0.1"),
        (lambda: la.Polynomial(bias=np.nan), "bias"),
        (lambda: la.Polynomial(bias=np.inf), "bias"),
        (lambda: la.Taylor(order=-1), "order.*-1"),
        (lambda: la.Taylor(order="2"), "order"),
        (lambda: la.Dpfp(nu=0), "nu"),
        (lambda: la.Dpfp(nu=1.5), "nu"),
        (lambda: la.Dpfp(sum_norm=1), "sum_norm.*1"),
        (lambda: la.Dpfp(sum_norm=None), "sum_norm.*None"),
        (lambda: la.feature_map("softmax"), "'softmax'"),
        (lambda: la.feature_map(None), "None"),
        (lambda: la.feature_map(la.Elu), "Elu"),
        (lambda: la.LinearAttention(1, 4, feature_map="eluu"), "eluu"),
    ],
)
def test_bad_parameters(make, words):
    with pytest.raises(ValueError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="feature_map: ") as caught:
        la.feature_map("softmax")
    assert all(name in str(caught.value) for name in MAPS)


@pytest.mark.parametrize(
    ("phi", "K", "F"),
    [
        (la.Taylor(order=4), 64, 814385),
        (la.Polynomial(degree=3, bias=0), 128, 357760),
        (la.Dpfp(nu=600), 64, 76800),
        (la.Taylor(order=60), 64, math.comb(124, 60)),
    ],
    ids=repr,
)
def test_too_many_features_are_refused_with_the_number(phi, K, F):
    for make in (lambda: la.LinearAttention(1, K, feature_map=phi), lambda: phi(np.zeros(K))):
        with pytest.raises(ValueError, match=str(F)) as caught:
            make()
        assert str(MAX_FEATURES) in str(caught.value)


@pytest.mark.parametrize("phi", [la.Taylor(200), la.Polynomial(1100), la.Polynomial(2, 1e300)], ids=repr)
def test_coefficients_beyond_float64_are_refused_in_words(phi):
    """F is small here, but the coefficients are not numbers that a float64 can hold."""
    with pytest.raises(ValueError, match=phi.name):
        la.LinearAttention(1, 1, feature_map=phi)


@pytest.mark.parametrize("K", [1, 2, 3, 4])
@pytest.mark.parametrize("order", range(9))
def test_packed_and_unpacked_taylor_agree(order, K):
    """Unpacked: all Kⁿ products of each degree n, x ⊗ … ⊗ x / √n!, as often as they come."""

    def unpacked(x):
        x = x / K**0.25
        parts, power = [np.ones(1)], np.ones(1)
        for n in range(1, order + 1):
            power = np.kron(power, x)
            parts.append(power / math.sqrt(math.factorial(n)))
        return np.concatenate(parts)

    q, k = np.random.default_rng(order * 10 + K).standard_normal((2, 10, K))
    expected = np.array([unpacked(a) @ unpacked(b) for a, b in zip(q, k, strict=True)])
    size = np.array([np.linalg.norm(unpacked(a)) * np.linalg.norm(unpacked(b)) for a, b in zip(q, k, strict=True)])
    assert (np.abs(la.Taylor(order=order).kernel(q, k) - expected) <= 1e-14 * size).all()
    assert la.Taylor(order=order).dim(K) == math.comb(K + order, order) <= unpacked(q[0]).size

"""The maps with given weights: φ entry by entry from the papers, weights for keys and heads, what is refused."""

import math

import numpy as np
import pytest

import linattn_edge as la
import naive
from cases import NOJIT
from linattn_edge.errors import ShapeError

pytestmark = pytest.mark.nojit

rng = np.random.default_rng(7)
K, R = 4, 3
W, U, X = rng.standard_normal((3, R, K))
b, c = rng.standard_normal((2, R))
MAPS = [la.T2R, la.Hedgehog, la.ElementwiseProduct]
by_class = pytest.mark.parametrize("cls", MAPS, ids=lambda cls: cls.name)


def made(cls, *weights, **options):
    """A map of that class; one that has two layers gets the second from U."""
    if cls is la.ElementwiseProduct and weights:
        weights = (weights[0], U if np.ndim(weights[0]) < 3 else np.stack([U] * len(weights[0])), *weights[1:])
    return cls(*weights, **options)


# φ


def affine(weight, bias, x):
    return [
        math.fsum([beta, *(w * a for w, a in zip(row, x, strict=True))]) for row, beta in zip(weight, bias, strict=True)
    ]


def plain_softmax(u):
    total = math.fsum(math.exp(a - max(u)) for a in u)
    return [math.exp(a - max(u)) / total for a in u]


def plain_t2r(x, weight, bias):
    """Kasai et al. 2021, eq. 5: relu(Wx + b)."""
    return [max(u, 0.0) for u in affine(weight, bias, x)]


def plain_hedgehog(x, weight, bias):
    """Zhang et al. 2024, eq. 5: [exp(Wx + b), exp(−Wx − b)]."""
    u = affine(weight, bias, x)
    return [math.exp(a) for a in u] + [math.exp(-a) for a in u]


def plain_softmax_hedgehog(x, weight, bias):
    """Zhang et al. 2024, appendix: each half a softmax."""
    u = affine(weight, bias, x)
    return plain_softmax(u) + plain_softmax([-a for a in u])


def plain_joint_hedgehog(x, weight, bias):
    """fla's HedgehogFeatureMap: softmax of [2u, −2u]."""
    u = affine(weight, bias, x)
    return plain_softmax([2 * a for a in u] + [-2 * a for a in u])


def plain_product(x, weight, other, bias, other_bias):
    """fla's HadamardFeatureMap: (W₁x + b₁) ⊙ (W₂x + b₂)."""
    return [p * r for p, r in zip(affine(weight, bias, x), affine(other, other_bias, x), strict=True)]


def zero():
    return np.zeros(R)


FORMULAS = {
    "t2r": (la.T2R(W, b), lambda x: plain_t2r(x, W, b)),
    "t2r without bias": (la.T2R(W), lambda x: plain_t2r(x, W, zero())),
    "hedgehog": (la.Hedgehog(W, b), lambda x: plain_hedgehog(x, W, b)),
    "hedgehog without bias": (la.Hedgehog(W), lambda x: plain_hedgehog(x, W, zero())),
    "hedgehog exp": (la.Hedgehog(W, b, variant="exp"), lambda x: plain_hedgehog(x, W, b)),
    "hedgehog softmax": (la.Hedgehog(W, b, variant="softmax"), lambda x: plain_softmax_hedgehog(x, W, b)),
    "hedgehog joint": (la.Hedgehog(W, b, variant="joint"), lambda x: plain_joint_hedgehog(x, W, b)),
    "product": (la.ElementwiseProduct(W, U, b, c), lambda x: plain_product(x, W, U, b, c)),
    "product, one bias": (la.ElementwiseProduct(W, U, bias2=c), lambda x: plain_product(x, W, U, zero(), c)),
}
all_formulas = pytest.mark.parametrize("name", FORMULAS)


def inputs(count=20):
    x = np.random.default_rng(1).standard_normal((count, K)) * 2
    x[0] = 0
    return x


@all_formulas
def test_features_are_the_formula(name):
    phi, formula = FORMULAS[name]
    x = inputs()
    exact = np.array([formula(row) for row in x])
    assert phi.dim(K) == exact.shape[1] == (R if name[:3] in ("t2r", "pro") else 2 * R)
    for side in (phi, phi.query, phi.key):
        np.testing.assert_allclose(side(x), exact, rtol=1e-13, atol=1e-14)
    single = phi(x.astype(np.float32))
    np.testing.assert_allclose(single, exact, rtol=2e-6 * np.abs(x).max(), atol=2e-6)


@all_formulas
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_loop_is_the_formula(name, dtype):
    """One write of v = 1 into an empty state leaves φ(k) in S; a read with S = identity gives φ(q)."""
    phi, formula = FORMULAS[name]
    x = inputs(6)[:, None].astype(dtype)
    exact = np.array([[formula(row[0].astype(float))] for row in x])
    F = exact.shape[2]
    attn = la.LinearAttention(1, K, F, feature_map=phi, normalize=False, scale=1.0)
    state = attn.init_state(6, dtype)
    attn.write(x, np.ones((6, 1, F), dtype), state)
    bound = {"rtol": 5e-6, "atol": 1e-6} if dtype == "float32" else {"rtol": 1e-13, "atol": 1e-14}
    np.testing.assert_allclose(state.S[..., 0], exact, **bound)
    state.S = np.broadcast_to(np.eye(F), state.S.shape)
    np.testing.assert_allclose(attn.read(x, state), exact, **bound)


def test_the_formulas_tell_the_three_hedgehogs_apart():
    x = inputs()
    y = [la.Hedgehog(W, b, variant=v)(x) for v in ("exp", "softmax", "joint")]
    assert np.abs(y[0] - y[1]).max() > 0.1
    assert np.abs(y[1] - y[2]).max() > 0.1
    np.testing.assert_allclose(y[1].sum(axis=1), 2, rtol=1e-14)
    np.testing.assert_allclose(y[2].sum(axis=1), 1, rtol=1e-14)
    np.testing.assert_allclose(y[0][:, :R] * y[0][:, R:], 1, rtol=1e-13)


def test_by_hand():
    x = np.array([1.0, -2.0])
    np.testing.assert_array_equal(la.T2R([[3, 1], [0, 1], [1, 0]], [0.5, 1, -3])(x), [1.5, 0, 0])
    np.testing.assert_array_equal(la.ElementwiseProduct([[3, 1]], [[0, 1]], [0.5], [-1])(x), [1.5 * -3])
    np.testing.assert_allclose(la.Hedgehog([[1, 1]], [0.25])(x), [math.exp(-0.75), math.exp(0.75)], rtol=1e-15)
    np.testing.assert_array_equal(la.Hedgehog([[1, 1]], variant="softmax")(x), [1, 1])
    e = math.exp(-4)  # u = −1: softmax(−2, 2)
    np.testing.assert_allclose(la.Hedgehog([[1, 1]], variant="joint")(x), [e / (1 + e), 1 / (1 + e)], rtol=1e-15)


@pytest.mark.parametrize("variant", ["softmax", "joint"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_softmax_of_large_numbers(variant, dtype):
    """exp would overflow from 89 on: the largest is taken off first."""
    phi = la.Hedgehog(np.eye(3), variant=variant)
    x = np.array([[1000.0, 999, -2000], [-3e4, -3e4, -3e4], [0, 0, 0]], dtype)[:, None]
    exact = np.array(
        [[(plain_softmax_hedgehog, plain_joint_hedgehog)[variant == "joint"](r[0], np.eye(3), zero())] for r in x]
    )
    np.testing.assert_allclose(phi(x[:, 0]), exact[:, 0], rtol=1e-6)
    attn = la.LinearAttention(1, 3, 1, feature_map=phi, normalize=False)
    state = attn.init_state(3, dtype)
    attn.write(x, np.ones((3, 1, 1)), state)
    np.testing.assert_allclose(state.S[..., 0], exact, rtol=1e-6, atol=1e-37)


@pytest.mark.parametrize("variant", ["exp", "softmax", "joint"])
def test_hedgehog_is_positive(variant):
    """For W = 1: exp(u)exp(u') + exp(−u)exp(−u') = 2cosh(u + u')."""
    phi = la.Hedgehog(np.eye(1), variant=variant)
    q, k = np.random.default_rng(0).standard_normal((2, 50, 1))
    kernel = phi.kernel(q, k)
    assert (kernel > 0).all()
    if variant == "exp":
        np.testing.assert_allclose(kernel, 2 * np.cosh(q + k)[:, 0], rtol=1e-14)


# weights for keys, and for heads


@by_class
def test_keys_may_have_weights_of_their_own(cls):
    mine, other = made(cls, W, bias1=b) if cls is la.ElementwiseProduct else cls(W, b), made(cls, X)
    options = {"bias1": b} if cls is la.ElementwiseProduct else {"bias": b}
    phi = made(cls, W, **options, key=other)
    x = inputs()
    np.testing.assert_array_equal(phi.query(x), mine.query(x))
    np.testing.assert_array_equal(phi.key(x), other.query(x))
    assert np.abs(phi.query(x) - phi.key(x)).max() > 0.1
    q, k = inputs()[:, None], inputs()[None]
    np.testing.assert_allclose(phi.kernel(q, k), np.einsum("qf,kf->qk", mine(x), other(x)), rtol=1e-13)
    state = la.LinearAttention(1, K, 1, feature_map=phi, normalize=False, scale=1.0)
    S = state.init_state(20, "float64")
    y = state.step(x[:, None], x[:, None], np.ones((20, 1, 1)), S)
    np.testing.assert_allclose(S.S[:, 0, :, 0], other(x), rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(y[:, 0, 0], np.sum(mine(x) * other(x), axis=1), rtol=1e-12)


@by_class
def test_the_key_side_of_the_key_map_does_not_matter(cls):
    """φ(q) and φ(k) of `key` are both one thing: what it does to queries."""
    assert made(cls, W, key=made(cls, X, key=made(cls, W))) == made(cls, W, key=made(cls, X))


@by_class
@pytest.mark.parametrize(
    ("H", "N", "keys"),
    [(h, n, keys) for h, n in ((4, 2), (2, 2), (2, 4), (3, 1)) for keys in ("their own", "one for all")]
    + [(2, 2, "the same"), (2, 4, "the same")],
)
def test_weights_of_heads(cls, H, N, keys):
    """Query head h uses row h of the query weights, key head n row n of the keys': GQA, MHA, GVA and MQA."""
    HK = min(H, N)
    rows = np.random.default_rng(H).standard_normal((H, R, K))
    own = np.random.default_rng(5).standard_normal((HK, R, K))
    key = {"their own": made(cls, own), "one for all": made(cls, X), "the same": None}[keys]
    phi = made(cls, rows, key=key)
    head = {"their own": lambda n: own[n], "one for all": lambda n: X, "the same": lambda n: rows[n]}[keys]
    query = [made(cls, rows[h]) for h in range(H)]
    single = [made(cls, head(n)) for n in range(HK)]

    x = np.random.default_rng(2).standard_normal((2, 5, H, K))
    k = np.random.default_rng(3).standard_normal((2, 5, HK, K))
    np.testing.assert_allclose(phi.query(x), np.stack([query[h](x[:, :, h]) for h in range(H)], axis=2), rtol=1e-13)
    fk = np.stack([single[n](k[:, :, n]) for n in range(HK)], axis=2)
    if keys != "one for all":
        np.testing.assert_allclose(phi.key(k), fk, rtol=1e-13)

    heads = {"num_kv_heads": N} if N < H else {"num_value_heads": N} if N > H else {}
    attn = la.LinearAttention(H, K, 2, **heads, feature_map=phi, normalize=False, scale=1.0)
    v = np.random.default_rng(4).standard_normal((2, 5, N, 2))
    oracle = naive.Map([f.query for f in query], key=[f.query for f in single])
    for run in ("prefill", "steps"):
        state = attn.init_state(2, "float64")
        if run == "prefill":
            y = attn.prefill(x, k, v, state)
        else:
            at = [[np.ascontiguousarray(a[:, t]) for a in (x, k, v)] for t in range(5)]
            y = np.stack([attn.step(*arrays, state) for arrays in at], axis=1)
        want, S, _ = naive.attention(x, k, v, phi=oracle)
        naive.assert_close(y, want, 1e-12)
        naive.assert_close(state.S, S, 1e-12)


@by_class
def test_weights_of_one_head_are_those_of_every_head(cls):
    one, each = made(cls, W), made(cls, np.stack([W, W]))
    x = np.random.default_rng(2).standard_normal((3, 2, K)).astype(np.float32)
    y = [
        (attn := la.LinearAttention(2, K, 2, feature_map=phi)).step(x, x, x[..., :2], attn.init_state(3))
        for phi in (one, each)
    ]
    np.testing.assert_array_equal(*y)


@by_class
def test_heads_that_are_packed_apart(cls):
    """Features so many that a prefill packs the heads one by one: each finds its own row."""
    H, T, F = 3, 4, 270
    rows = np.random.default_rng(H).standard_normal((2, H, F, K)) / 4
    phi = cls(*rows) if cls is la.ElementwiseProduct else cls(rows[0])
    q, k = np.random.default_rng(2).standard_normal((2, 1, T, H, K))
    v = np.ones((1, T, H, 1))
    attn = la.LinearAttention(H, K, 1, feature_map=phi, normalize=False, scale=1.0)
    state = attn.init_state(1, "float64")
    y = attn.prefill(q, k, v, state)
    single = [cls(*(r[h] for r in rows)) if cls is la.ElementwiseProduct else cls(rows[0, h]) for h in range(H)]
    oracle = naive.Map([f.query for f in single])
    want, S, _ = naive.attention(q, k, v, phi=oracle)
    naive.assert_close(y, want, 1e-12)
    naive.assert_close(state.S, S, 1e-12)


@by_class
@pytest.mark.skipif(NOJIT, reason="too large for interpreted loops")
def test_many_heads_and_threads(cls):
    """The heads are packed in groups, and shared among threads: each must find its own row."""
    H, T, V = 32, 70, 64
    rows = np.random.default_rng(H).standard_normal((H, R, K)) / 4
    phi = made(cls, rows)
    second = (U,) if cls is la.ElementwiseProduct else ()
    zeros = [0] * (1 + len(second))
    oracle = {"t2r": naive.t2r, "hedgehog": naive.hedgehog, "elementwise_product": naive.elementwise_product}[cls.name]

    def plain(x, row):
        return oracle(row, *second, *zeros).features(x.astype(np.float64))

    q, k = np.random.default_rng(2).standard_normal((2, 1, T, H, K)).astype(np.float32)
    v = np.random.default_rng(3).standard_normal((1, T, H, V)).astype(np.float32)
    y = []
    for threads in (1, 2):
        attn = la.LinearAttention(H, K, V, feature_map=phi, normalize=False, num_threads=threads)
        y.append(attn.prefill(q, k, v, attn.init_state()))
    np.testing.assert_array_equal(*y)
    fq, fk = (np.stack([plain(x[:, :, h], rows[h]) for h in range(H)], axis=2) for x in (q, k))
    sees = np.einsum("bthf,bshf->bhts", fq, fk) * np.tri(T) / math.sqrt(K)
    naive.assert_close(y[0], np.einsum("bhts,bshv->bthv", sees, v.astype(float)), 1e-5)


@by_class
def test_a_map_keeps_its_weights_to_itself(cls):
    mine, bias = W.copy(), b.copy()
    options = {"bias1": bias} if cls is la.ElementwiseProduct else {"bias": bias}
    phi = made(cls, mine, **options)
    y = phi(inputs())
    mine[:] = bias[:] = 0
    np.testing.assert_array_equal(phi(inputs()), y)
    with pytest.raises(ValueError, match="read-only"):
        phi.weights(K)[0, 0, 1] = 3


@by_class
@pytest.mark.parametrize("kind", [np.float16, np.float32, np.int8, "list"])
def test_weights_of_any_real_type(cls, kind):
    whole = np.array([[1, -2, 3, 0], [0, 1, 1, -1], [2, 2, -1, 1]])
    given = whole.tolist() if kind == "list" else whole.astype(kind)
    assert made(cls, given) == made(cls, whole.astype(float))


# what is refused


def error(kind, call):
    with pytest.raises(kind) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message
    return message


@by_class
def test_a_name_without_weights_lists_what_is_missing(cls):
    message = error(ValueError, lambda: la.feature_map(cls.name))
    assert cls.name in message
    assert cls.__name__ in message
    missing = ["weight1", "weight2"] if cls is la.ElementwiseProduct else ["weight"]
    assert all(name in message for name in missing)
    assert "bias" not in message
    assert "weight2" in error(ValueError, lambda: la.feature_map("elementwise_product", weight1=W))
    assert cls.name in error(ValueError, lambda: la.LinearAttention(1, K, feature_map=cls.name))
    assert la.feature_map("hedgehog", weight=W, variant="joint") == la.Hedgehog(W, variant="joint")


def test_cosformer_has_no_default_horizon():
    assert "max_len" in error(ValueError, lambda: la.feature_map("cosformer"))


@pytest.mark.parametrize("variant", ["nonsense", "Exp", "", None, 1, ["exp"], b"exp"])
def test_bad_variants(variant):
    message = error(ValueError, lambda: la.Hedgehog(W, variant=variant))
    assert repr(variant) in message
    assert all(name in message for name in ("hedgehog", "exp", "softmax", "joint"))


@by_class
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(cls, bad):
    spoiled, bias = W.copy(), b.copy()
    spoiled[1, 2] = bias[1] = bad
    for given in ({"weight": spoiled}, {"weight": W, "bias": bias}):
        renamed = {f"{n}1": a for n, a in given.items()} | {"weight2": U} if cls is la.ElementwiseProduct else given
        message = error(ValueError, lambda renamed=renamed: cls(**renamed))
        assert cls.name in message
        assert "NaN" in message


@by_class
@pytest.mark.parametrize(
    "weight",
    [1.0, [1.0, 2.0], np.zeros((2, 2, 2, 2)), np.zeros((0, K)), np.zeros((R, 0)), np.zeros((0, R, K)), [[], []]],
    ids=lambda w: str(np.shape(w)),
)
def test_weights_of_a_wrong_shape(cls, weight):
    layers = {"weight1": weight, "weight2": weight} if cls is la.ElementwiseProduct else {"weight": weight}
    message = error(ShapeError, lambda: cls(**layers))
    assert cls.name in message
    assert str(list(np.shape(weight))) in message


@by_class
@pytest.mark.parametrize("bias", [1.0, np.zeros(R + 1), np.zeros((2, R)), np.zeros((R, 1)), np.zeros((1, 1, R))])
def test_biases_of_a_wrong_shape(cls, bias):
    options = {"bias1": bias} if cls is la.ElementwiseProduct else {"bias": bias}
    message = error(ShapeError, lambda: made(cls, W, **options))
    assert "bias" in message
    assert str(list(np.shape(bias))) in message


@by_class
@pytest.mark.parametrize("weight", ["W", [["a"]], None, np.zeros((R, K), complex), np.zeros((R, K), bool)], ids=str)
def test_weights_that_are_no_numbers(cls, weight):
    assert "weight" in error((TypeError, ValueError), lambda: made(cls, weight))


def test_the_two_layers_of_a_product_have_one_shape():
    for other in (U[:2], U[:, :3], np.stack([U, U])):
        assert "weight1 and weight2" in error(ShapeError, lambda other=other: la.ElementwiseProduct(W, other))


@by_class
def test_weights_for_another_width(cls):
    phi = made(cls, W)
    for call in (
        lambda: la.LinearAttention(1, K + 1, feature_map=phi),
        lambda: phi(np.zeros(K - 1)),
        lambda: phi.dim(K + 2),
    ):
        message = error(ShapeError, call)
        assert cls.name in message
        assert f"K = {K}" in message


@by_class
def test_weights_for_another_number_of_heads(cls):
    three, two = made(cls, np.zeros((3, R, K))), made(cls, np.zeros((2, R, K)))
    assert "3 query heads" in error(ShapeError, lambda: la.LinearAttention(2, K, feature_map=three))
    keyed = made(cls, np.zeros((4, R, K)), key=three)
    message = error(ShapeError, lambda: la.LinearAttention(4, K, num_kv_heads=2, feature_map=keyed))
    assert "3 key heads" in message
    assert "has 2" in message
    grouped = made(cls, np.zeros((4, R, K)))  # its keys have 4 rows too
    assert "4 key heads" in error(ShapeError, lambda: la.LinearAttention(4, K, num_kv_heads=2, feature_map=grouped))
    la.LinearAttention(2, K, num_value_heads=4, feature_map=two)  # GVA: 2 query and 2 key heads
    error(ShapeError, lambda: la.LinearAttention(2, K, num_value_heads=4, feature_map=made(cls, np.zeros((4, R, K)))))
    for shape in ((K,), (3, K), (5, 3, K)):
        assert "2 heads" in error(ShapeError, lambda shape=shape: two(np.zeros(shape)))


@by_class
def test_key_maps_that_do_not_fit(cls):
    other = la.T2R(W) if cls is not la.T2R else la.Hedgehog(W)
    for key in (
        other,
        made(cls, W[:2]) if cls is not la.ElementwiseProduct else cls(W[:2], U[:2]),
        W,
        "t2r",
        la.Relu(),
    ):
        message = error(ValueError, lambda key=key: made(cls, W, key=key))
        assert cls.name in message
        assert "key" in message
    wide = np.zeros((R, K + 1))
    wider = cls(wide, wide) if cls is la.ElementwiseProduct else cls(wide)
    assert "key" in error(ValueError, lambda: made(cls, W, key=wider))


def test_a_hedgehog_and_its_key_map_are_of_one_variant():
    key = la.Hedgehog(W, variant="joint")
    assert "key" in error(ValueError, lambda: la.Hedgehog(W, key=key))
    la.Hedgehog(W, key=key, variant="joint")

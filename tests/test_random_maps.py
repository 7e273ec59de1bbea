"""Favor and Rff: φ from its formula, the mean and the error that the papers prove, draws that are the same anywhere."""

import hashlib
import math
import os
import subprocess
import sys

import numpy as np
import pytest

import linattn_edge as la
from linattn_edge.features import MAX_FEATURES, gaussian_rows

pytestmark = pytest.mark.nojit

K = 4


def inputs(count=20, width=K):
    x = np.random.default_rng(1).standard_normal((count, width)) * 1.5
    x[0] = 0
    return x


# φ


def plain_favor(x, draws, hyperbolic):
    """Choromanski et al. 2021, Lemma 1, at x/K^¼; hyperbolic: SM^hyp+, with −w too."""
    x = [a / len(x) ** 0.25 for a in x]
    half = math.fsum(a * a for a in x) / 2
    u = [math.fsum(w * a for w, a in zip(row, x, strict=True)) for row in draws]
    u = u + [-a for a in u] if hyperbolic else u
    return [math.exp(a - half) / math.sqrt(len(u)) for a in u]


def plain_rff(x, draws):
    """Peng et al. 2021, eq. 4 and 5, at x/K^¼: exp(‖x‖²/2)/√m · [cos(w·x), sin(w·x)]."""
    x = [a / len(x) ** 0.25 for a in x]
    size = math.exp(math.fsum(a * a for a in x) / 2) / math.sqrt(len(draws))
    u = [math.fsum(w * a for w, a in zip(row, x, strict=True)) for row in draws]
    return [size * math.cos(a) for a in u] + [size * math.sin(a) for a in u]


def formula(phi, x):
    draws = gaussian_rows(phi.num_features, x.shape[-1], phi.seed, phi.orthogonal)
    if phi.name == "rff":
        return np.array([plain_rff(row, draws) for row in x.tolist()])
    return np.array([plain_favor(row, draws, phi.hyperbolic) for row in x.tolist()])


SOME = [
    la.Favor(),
    la.Favor(num_features=1, seed=5),
    la.Favor(7, 3, orthogonal=False),
    la.Favor(6, 2, hyperbolic=True),
    la.Rff(),
    la.Rff(num_features=1, seed=5),
    la.Rff(7, 3, orthogonal=False),
]
some = pytest.mark.parametrize("phi", SOME, ids=repr)


@some
@pytest.mark.parametrize("width", [1, 4, 5])
def test_features_are_the_formula(phi, width):
    x = inputs(width=width)
    exact = formula(phi, x)
    assert phi.dim(width) == exact.shape[1]
    for side in (phi, phi.query, phi.key):
        np.testing.assert_allclose(side(x), exact, rtol=1e-12, atol=1e-14 * np.abs(exact).max())
    # an exponent of size e rounds to e · 6e-8
    np.testing.assert_allclose(phi(x.astype(np.float32)), exact, rtol=1e-5, atol=2e-6 * np.abs(exact).max())


@some
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_loop_is_the_formula(phi, dtype):
    x = inputs(6)[:, None].astype(dtype)
    exact = formula(phi, x[:, 0].astype(float))[:, None]
    F = exact.shape[2]
    attn = la.LinearAttention(1, K, F, feature_map=phi, normalize=False, scale=1.0)
    state = attn.init_state(6, dtype)
    attn.write(x, np.ones((6, 1, F), dtype), state)
    bound = {"rtol": 1e-5, "atol": 2e-6} if dtype == "float32" else {"rtol": 1e-12, "atol": 1e-13}
    np.testing.assert_allclose(state.S[..., 0], exact, **bound)
    state.S = np.broadcast_to(np.eye(F), state.S.shape)
    np.testing.assert_allclose(attn.read(x, state), exact, **bound)


# mean and error


def pairs(width=3):
    """x and y with ‖x + y‖² from 0.1 to 2, with one or the other long, alike, opposed or apart."""
    rng = np.random.default_rng(11)
    for size in (0.1, 0.5, 1.0, 2.0):
        for share in (0.5, 0.3, 1.2):
            total, aside = rng.standard_normal((2, width))
            total *= math.sqrt(size) / np.linalg.norm(total)
            aside -= total * (aside @ total) / (total @ total)
            aside *= 0.4 / np.linalg.norm(aside)
            yield share * total + aside, (1 - share) * total - aside


def softmax_kernel(x, y):
    return math.exp(math.fsum(x * y))


def favor_error(x, y):
    """Choromanski et al. 2021, Lemma 2: the mean square error of the positive estimator, times m."""
    s = np.sum((x + y) ** 2)
    return math.exp(s) * softmax_kernel(x, y) ** 2 * (1 - math.exp(-s))


def hyperbolic_error(x, y):
    return favor_error(x, y) * (1 - math.exp(-np.sum((x + y) ** 2))) / 2


def rff_error(x, y):
    """The same lemma: of the trigonometric estimator, times m."""
    return math.exp(np.sum((x + y) ** 2)) / softmax_kernel(x, y) ** 2 * (1 - math.exp(-np.sum((x - y) ** 2))) ** 2 / 2


ESTIMATORS = {
    "favor": (lambda m, seed: la.Favor(m, seed, orthogonal=False), 1, favor_error),
    "favor hyperbolic": (lambda m, seed: la.Favor(m, seed, orthogonal=False, hyperbolic=True), 2, hyperbolic_error),
    "rff": (lambda m, seed: la.Rff(m, seed, orthogonal=False), 2, rff_error),
}
estimators = pytest.mark.parametrize("name", ESTIMATORS)


def products(name, count, xs, ys):
    """What each of many independent draws makes of exp(x·y): [pairs, draws]; their mean is κ."""
    make, parts, _ = ESTIMATORS[name]
    m = 32768
    width = xs.shape[1]
    made = []
    for seed in range(count):
        phi = make(m, seed)
        q, k = (phi(a * width**0.25) for a in (xs, ys))
        made.append((m * q * k).reshape(len(xs), parts, m).sum(axis=1))
    return np.concatenate(made, axis=1)


@estimators
def test_unbiased_and_as_exact_as_the_papers_say(name):
    """The mean over draws is exp(qᵀk/√K), within 3 standard errors; the error of m draws is Lemma 2's."""
    xs, ys = (np.array(a) for a in zip(*pairs(), strict=True))
    samples = products(name, 40, xs, ys)
    n = samples.shape[1]
    assert n >= 1_000_000
    for x, y, each in zip(xs, ys, samples, strict=True):
        exact, error = softmax_kernel(x, y), ESTIMATORS[name][2](x, y)
        assert abs(each.mean() - exact) < 3 * math.sqrt(error / n)
        size = np.sum((x + y) ** 2)
        for m in (1, 16):  # estimators of m draws each
            estimates = each[: n // m * m].reshape(-1, m).mean(axis=1)
            measured = np.mean((estimates - exact) ** 2)
            assert measured == pytest.approx(error / m, rel=0.05 if size < 1.5 else 0.15), (m, size)


@estimators
def test_kappa_is_the_mean_of_the_draws(name):
    """`kernel` of a map of m draws is what the test above averages."""
    make = ESTIMATORS[name][0]
    x, y = next(pairs())
    phi = make(50, 3)
    q, k = x * 3**0.25, y * 3**0.25
    np.testing.assert_allclose(phi.kernel(q, k), np.sum(phi(q) * phi(k)), rtol=1e-13)
    w = gaussian_rows(50, 3, 3, False)
    if name == "rff":
        want = np.mean(np.cos(w @ (x - y))) * math.exp((x @ x + y @ y) / 2)
    else:
        each = np.exp(w @ (x + y)) if name == "favor" else np.cosh(w @ (x + y))
        want = np.mean(each) * math.exp(-(x @ x + y @ y) / 2)
    np.testing.assert_allclose(phi.kernel(q, k), want, rtol=1e-12)


@pytest.mark.parametrize("cls", [la.Favor, la.Rff])
def test_orthogonal_draws_are_not_worse(cls):
    """Choromanski et al. 2021, section 2.4 and theorem 2: at right angles the error is lower, for m ≤ K."""
    m = width = 16
    rng = np.random.default_rng(3)
    x = rng.standard_normal((40, width))
    x *= 0.5 / np.linalg.norm(x, axis=1, keepdims=True)
    y = x if cls is la.Favor else -x
    exact = np.exp(np.sum(x * y, axis=1))
    square = {False: [], True: []}
    for orthogonal, errors in square.items():
        for seed in range(400):
            phi = cls(m, seed, orthogonal=orthogonal)
            errors.append(np.mean((phi.kernel(x * 2, y * 2) - exact) ** 2))  # 16^¼ = 2
    alone, together = np.mean(square[False]), np.mean(square[True])
    theory = (favor_error if cls is la.Favor else rff_error)(x[0], y[0]) / m
    assert alone == pytest.approx(theory, rel=0.1)
    assert together < alone
    assert together < theory


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("cls", [la.Favor, la.Rff])
def test_few_draws_are_unbiased_too(cls, orthogonal):
    """Whichever way they are drawn: every one of them is N(0, I)."""
    x, y = next(pairs())
    exact = softmax_kernel(x, y)
    estimates = [cls(5, seed, orthogonal).kernel(x * 3**0.25, y * 3**0.25) for seed in range(3000)]
    error = np.std(estimates) / math.sqrt(len(estimates))
    assert abs(np.mean(estimates) - exact) < 3 * error
    assert error < 0.02


# the draws


@pytest.mark.parametrize(("m", "width"), [(16, 16), (40, 16), (7, 3), (3, 8), (5, 1), (64, 64)])
def test_orthogonal_blocks_are_at_right_angles(m, width):
    rows = gaussian_rows(m, width, 3, True)
    assert rows.shape == (m, width)
    np.testing.assert_array_equal(rows, rows.astype(np.float32))
    for start in range(0, m, width):
        block = rows[start : start + width]
        unit = block / np.linalg.norm(block, axis=1, keepdims=True)
        np.testing.assert_allclose(unit @ unit.T, np.eye(len(block)), atol=3e-7)
    if m > width > 1:  # but not from block to block
        assert abs(rows[0] @ rows[width]) > 1e-3


@pytest.mark.parametrize("orthogonal", [False, True])
def test_draws_have_the_lengths_and_moments_of_gaussians(orthogonal):
    rows = np.concatenate([gaussian_rows(20, 8, seed, orthogonal) for seed in range(200)])
    n = len(rows)
    square = np.sum(rows**2, axis=1)  # χ² with 8 degrees: mean 8, variance 16
    assert abs(square.mean() - 8) < 3 * math.sqrt(16 / n)
    assert square.var() == pytest.approx(16, rel=0.1)
    assert abs(np.mean(rows)) < 3 / math.sqrt(8 * n)
    assert np.mean(rows**4) == pytest.approx(3, rel=0.05)  # a Gaussian's, and no uniform direction's
    np.testing.assert_allclose(rows.T @ rows / n, np.eye(8), atol=5 / math.sqrt(n))


def test_lengths_do_not_go_with_directions():
    """Orthogonal rows get the norms of other draws: those of a block are independent."""
    square = np.array([np.sum(gaussian_rows(4, 4, seed, True) ** 2, axis=1) for seed in range(2000)])
    correlation = np.corrcoef(square.T)
    np.testing.assert_allclose(correlation, np.eye(4), atol=4 / math.sqrt(2000))


def test_seeds_sizes_and_kinds_draw_differently():
    first = gaussian_rows(8, 4, 0, False)
    np.testing.assert_array_equal(gaussian_rows(8, 4, 0, False), first)
    assert not np.array_equal(gaussian_rows(8, 4, 1, False), first)
    assert not np.array_equal(gaussian_rows(8, 4, 0, True), first)
    assert not np.array_equal(la.Favor(seed=0).weights(4), la.Favor(seed=1).weights(4))


def test_nobody_elses_random_numbers_are_used():
    np.random.seed(5)
    want = np.random.random(3)
    np.random.seed(5)
    la.Favor(9, 77).weights(6)
    np.testing.assert_array_equal(np.random.random(3), want)


DIGESTS = """
import hashlib
import linattn_edge as la
for phi in (la.Favor(40, 7), la.Favor(12, 1, orthogonal=False), la.Rff(5, 2**32 - 1)):
    for K in (1, 3, 16):
        print(hashlib.sha256(phi.weights(K).tobytes()).hexdigest())
"""


def test_another_process_draws_the_same():
    """Whatever that process has seeded, and however it hashes."""
    here = [
        hashlib.sha256(phi.weights(width).tobytes()).hexdigest()
        for phi in (la.Favor(40, 7), la.Favor(12, 1, orthogonal=False), la.Rff(5, 2**32 - 1))
        for width in (1, 3, 16)
    ]
    env = os.environ | {"PYTHONHASHSEED": "12"}
    run = [sys.executable, "-c", DIGESTS]
    assert subprocess.run(run, capture_output=True, text=True, check=True, env=env).stdout.split() == here
    assert len(set(here)) == len(here)


def test_weights_are_made_once_and_read_only():
    phi = la.Favor(8, 123)
    assert phi.weights(4) is la.Favor(8, 123).weights(4)
    assert phi.weights(4) is not phi.weights(5)
    with pytest.raises(ValueError, match="read-only"):
        phi.weights(4)[...] = 0


# what is refused


@pytest.mark.parametrize("cls", [la.Favor, la.Rff])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": -1}, "seed.*-1"),
        ({"seed": 2**32}, f"seed.*{2**32}"),
        ({"seed": 1.0}, "seed.*1.0"),
        ({"seed": None}, "seed.*None"),
        ({"seed": True}, "seed.*True"),
        ({"seed": "1"}, "seed.*'1'"),
        ({"num_features": 0}, "num_features.*0"),
        ({"num_features": -4}, "num_features.*-4"),
        ({"num_features": 4.0}, "num_features.*4.0"),
        ({"num_features": MAX_FEATURES + 1}, "num_features.*65537"),
        ({"orthogonal": 1}, "orthogonal.*1"),
        ({"orthogonal": None}, "orthogonal.*None"),
    ],
)
def test_bad_parameters(cls, options, words):
    with pytest.raises(ValueError, match=f"^{cls.name}: {words}") as caught:
        cls(**options)
    assert "\n" not in str(caught.value)


def test_bad_parameters_of_favor():
    with pytest.raises(ValueError, match=r"^favor: hyperbolic.*'no'"):
        la.Favor(hyperbolic="no")
    for phi in (la.Favor(MAX_FEATURES, hyperbolic=True), la.Rff(MAX_FEATURES)):
        with pytest.raises(ValueError, match=f"{2 * MAX_FEATURES}.*{MAX_FEATURES}"):
            la.LinearAttention(1, 4, feature_map=phi)


@pytest.mark.parametrize("options", [{"seed": 2**32}, {"num_features": MAX_FEATURES + 1}])
def test_what_is_too_large_is_told_the_largest(options):
    with pytest.raises(ValueError, match=str(max(options.values()) - 1)):
        la.Favor(**options)


def test_whole_numbers_of_numpy_are_taken():
    assert la.Favor(np.int64(8), np.uint32(3), np.bool_(True)) == la.Favor(8, 3, True)
    assert la.Favor(8, 3).config() == {
        "name": "favor", "num_features": 8, "seed": 3, "orthogonal": True, "hyperbolic": False
    }  # fmt: skip

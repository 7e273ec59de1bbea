"""The oracles agree with each other, so that a test that fails points at the library."""

import numpy as np
import pytest

import naive

pytestmark = pytest.mark.nojit
MAPS = {
    "identity": naive.IDENTITY,
    "elu": naive.ELU,
    "relu": naive.RELU,
    "relu2": naive.RELU2,
    "dpfp": naive.dpfp(2),
}


def inputs(seed, H, Hk, N, T, K=3, V=5, B=2, channels=0):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((B, T, H, K)), rng.standard_normal((B, T, Hk, K))
    v = rng.standard_normal((B, T, N, V))
    g = -np.abs(rng.standard_normal((B, T, N, channels) if channels else (B, T, N)))
    if T > 8:
        g[:, 3], g[0, 5], g[1, 6], g[:, 7] = -1e30, -np.inf, -25.0, np.log(1e-12)
    return rng, q, k, v, g, rng.uniform(0.1, 0.9, (B, T, N))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize("gated", [None, "head", "channel"])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(("H", "Hk", "N"), [(2, 2, 2), (4, 2, 2), (2, 2, 4)])
def test_quadratic_form_equals_token_loop(name, gated, delta, H, Hk, N):
    phi = MAPS[name]
    F = phi.features(np.zeros((1, 3))).shape[1]
    rng, q, k, v, g, beta = inputs(0, H, Hk, N, 12, channels=F if gated == "channel" else 0)
    beta /= np.maximum(1, np.repeat(phi.diagonal(k), N // Hk, axis=2))
    S0, z0 = rng.standard_normal((2, N, F, 5)), rng.uniform(1, 2, (2, N, F))
    normalize = not delta and name != "identity"
    given = {"phi": phi, "scale": 0.7, "S0": S0, "z0": z0, "lengths": [12, 5], "normalize": normalize}
    args = (q, k, v, g if gated else None, beta if delta else None)
    got, want = naive.attention(*args, **given), naive.token_loop(*args, **given)
    for a, b in zip(got, want, strict=True):
        if b is not None:
            naive.assert_close(a, b, 1e-11)


@pytest.mark.parametrize(("phi", "order"), [(naive.taylor(2), "taylor"), (naive.polynomial(2, 0.5), "polynomial")])
def test_kernel_series_equals_explicit_features(phi, order):
    def features(x):
        x = x / x.shape[-1] ** 0.25
        square = (x[..., :, None] * x[..., None, :]).reshape(*x.shape[:-1], -1)
        one = np.ones_like(x[..., :1])
        if order == "taylor":
            return np.concatenate([one, x, square / 2**0.5], axis=-1)
        return np.concatenate([0.5 * one, x, square], axis=-1)

    _, q, k, v, g, beta = inputs(1, 2, 2, 2, 10)
    beta /= 2 * phi.diagonal(k)
    for strength in (None, beta):
        got = naive.attention(q, k, v, g, strength, phi=phi)[0]
        naive.assert_close(got, naive.token_loop(q, k, v, g, strength, phi=naive.Map(features))[0], 1e-11)


def test_maps_of_heads_and_of_positions():
    """The same two ways, with features for each head, of their own for keys, and of the position."""
    rng = np.random.default_rng(3)
    W, U = rng.standard_normal((4, 6, 3)), rng.standard_normal((2, 6, 3))
    _, q, k, v, g, beta = inputs(3, 4, 2, 2, 9)
    heads = naive.Map([naive.t2r(w, 0.5).features for w in W], key=[naive.hedgehog(u, 0).features for u in U])
    heads.key = [lambda x, f=f: f(x)[:, :6] for f in heads.key]
    for phi in (heads, naive.cosformer(40)):
        F = phi.width(3)
        given = {"phi": phi, "S0": rng.standard_normal((2, 2, F, 5)), "lengths": [9, 4], "start": [7, 0]}
        args = q, k, v, g, beta / np.maximum(1, phi.diagonal(k, [7, 0]))
        for got, want in zip(naive.attention(*args, **given)[:2], naive.token_loop(*args, **given)[:2], strict=True):
            naive.assert_close(got, want, 1e-11)
    elsewhere = naive.attention(*args, **(given | {"start": 0}))[0]
    assert naive.rms_ratio(elsewhere[0], naive.attention(*args, **given)[0][0]) > 1e-3


def test_empty_streams_and_empty_batches():
    for B, T in ((2, 0), (0, 3)):
        _, q, k, v, g, beta = inputs(2, 2, 2, 2, T, B=B)
        y, S, z = naive.attention(q, k, v, phi=naive.ELU, normalize=True)
        assert y.shape == (B, T, 2, 5)
        assert S.shape == (B, 2, 3, 5)
        assert z.shape == (B, 2, 3)
        assert naive.attention(q, k, v, g, beta, phi=naive.ELU)[1].shape == (B, 2, 3, 5)


def test_error_measure():
    one = np.ones((2, 3))
    assert naive.rms_ratio(one, one) == 0
    assert naive.rms_ratio(1.01 * one, one) == pytest.approx(0.01)
    assert naive.rms_ratio(np.full(3, np.nan), np.ones(3)) == np.inf
    assert naive.rms_ratio(np.ones(3), np.zeros(3)) == np.inf
    with pytest.raises(AssertionError, match="row 1"):
        naive.assert_close(np.array([[1e9], [2.0]]), np.array([[1e9], [1.0]]), 1e-6)

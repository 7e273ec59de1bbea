"""The float64 reference: each of its three views against loops over plain numbers."""

import math

import numpy as np
import pytest

import linattn_edge as la
from linattn_edge.reference import divisor, quadratic_attention, softmax_attention

pytestmark = pytest.mark.nojit


def data(seed=0, B=2, T=7, H=2, K=3, V=4):
    rng = np.random.default_rng(seed)
    return (
        rng.standard_normal((B, T, H, K)),
        rng.standard_normal((B, T, H, K)),
        rng.standard_normal((B, T, H, V)),
    )


def by_pairs(q, k, v, weight, normalize):
    """y_t = Σ_{s ≤ t} weight(q_t, k_s) v_s, one number at a time."""
    B, T, H, _ = q.shape
    y = np.zeros(v.shape)
    for b, t, h in np.ndindex(B, T, H):
        w = [weight(q[b, t, h].tolist(), k[b, s, h].tolist()) for s in range(t + 1)]
        total = math.fsum(w) if normalize else 1.0
        for i in range(v.shape[3]):
            y[b, t, h, i] = math.fsum(w[s] * v[b, s, h, i] for s in range(t + 1)) / total
    return y


def inner(q, k):
    return math.fsum(a * b for a, b in zip(q, k, strict=True))


@pytest.mark.parametrize("normalize", [True, False])
def test_quadratic_attention_with_any_similarity(normalize):
    """Also one without a finite feature map: a Gaussian."""
    q, k, v = data()
    y = quadratic_attention(q, k, v, lambda a, b: np.exp(-np.sum((a - b) ** 2, -1)), normalize=normalize, scale=0.7)
    expected = by_pairs(
        q, k, v, lambda a, b: math.exp(-math.fsum((i - j) ** 2 for i, j in zip(a, b, strict=True))), normalize
    )
    assert y.dtype == np.float64
    np.testing.assert_allclose(y, 0.7 * expected, rtol=1e-12, atol=1e-14)


def test_quadratic_attention_takes_a_map():
    q, k, v = data()
    elu = lambda x: [a + 1 if a >= 0 else math.exp(a) for a in x]  # noqa: E731
    expected = by_pairs(q, k, v, lambda a, b: inner(elu(a), elu(b)), True)
    np.testing.assert_allclose(quadratic_attention(q, k, v, la.Elu().kernel), expected, rtol=1e-12)


def test_quadratic_attention_with_the_exponential_is_softmax():
    q, k, v = data()
    y = quadratic_attention(q, k, v, lambda a, b: np.exp(np.sum(a * b, -1) / math.sqrt(3)))
    np.testing.assert_allclose(y, softmax_attention(q, k, v), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("scale", [None, 0.3])
def test_softmax_attention(scale):
    q, k, v = data(1)
    s = 1 / math.sqrt(3) if scale is None else scale
    expected = by_pairs(q, k, v, lambda a, b: math.exp(s * inner(a, b)), True)
    np.testing.assert_allclose(softmax_attention(q, k, v, scale=scale), expected, rtol=1e-12, atol=1e-14)


def test_softmax_attention_of_large_logits():
    """Logits of ±10,000: all weight on the largest, no overflow."""
    q = np.full((1, 3, 1, 1), 100.0)
    k = np.array([-100.0, 100.0, 99.0]).reshape(1, 3, 1, 1)
    v = np.array([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1)
    np.testing.assert_array_equal(softmax_attention(q, k, v).ravel(), [1, 2, 2])


@pytest.mark.parametrize("T", [0, 1])
def test_shortest_streams(T):
    q, k, v = data(T=T)
    assert softmax_attention(q, k, v).shape == v.shape
    np.testing.assert_allclose(softmax_attention(q, k, v), v)
    np.testing.assert_allclose(quadratic_attention(q, k, v, la.Elu().kernel), v)
    assert softmax_attention(q[:0], k[:0], v[:0]).shape == (0, T, 2, 4)


@pytest.mark.parametrize("view", [softmax_attention, lambda q, k, v: quadratic_attention(q, k, v, la.Elu().kernel)])
def test_no_view_looks_ahead_or_changes_its_inputs(view):
    q, k, v = data()
    copies = [a.copy() for a in (q, k, v)]
    y = view(q, k, v)
    assert all((a == b).all() for a, b in zip((q, k, v), copies, strict=True))
    k[:, 4:], v[:, 4:], q[:, 4:] = 9, 9, 9
    np.testing.assert_array_equal(view(q, k, v)[:, :4], y[:, :4])


@pytest.mark.parametrize(
    ("den", "clamp", "add"),
    [
        (2.0, 2.0, 2.5),
        (0.0, 0.5, 0.5),
        (-0.0, 0.5, 0.5),
        (0.1, 0.5, 0.6),
        (-0.1, -0.5, 0.4),
        (-3.0, -3.0, -2.5),
    ],
)
def test_divisor(den, clamp, add):
    """Clamped, the divisor stays eps away from zero on its own side; added, it is just added."""
    assert divisor(np.array(den), 0.5, "clamp") == clamp
    np.testing.assert_allclose(divisor(np.array(den), 0.5, "add"), add)


def by_tokens(q, k, v, g, beta, rule, H, N, K, V, scale, normalize, S, z):
    """The four recurrences over plain lists, heads laid out as in the papers. φ is the identity."""
    B, T = v.shape[:2]
    HK = k.shape[2]
    heads = max(H, N)
    y = np.zeros((B, T, heads, V))
    S, z = S.copy(), z.copy()
    for b, t in np.ndindex(B, T):
        for n in range(N):
            key, value = k[b, t, n // (N // HK)], v[b, t, n]
            decay = np.ones(K)
            if g is not None:
                decay = np.exp(np.broadcast_to(g[b, t, n], (K,)))
            for i in range(K):
                S[b, n, i] *= decay[i]
                z[b, n, i] = z[b, n, i] * decay[i] + key[i]
            if beta is not None:
                value = beta[b, t, n] * (value - [inner(S[b, n, :, j], key) for j in range(V)])
            for i, j in np.ndindex(K, V):
                S[b, n, i, j] += key[i] * value[j]
        for h in range(heads):
            n = h // (heads // N)
            query = q[b, t, h // (heads // H)]
            den = inner(query, z[b, n]) if normalize else 1.0
            for j in range(V):
                y[b, t, h, j] = scale * inner(query, S[b, n, :, j]) / den
    return y, S, z


@pytest.mark.parametrize(("H", "N"), [(2, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize(
    ("rule", "gate", "normalize"),
    [
        ("linear", None, False),
        ("linear", None, True),
        ("gated", "head", True),
        ("gated", "channel", False),
        ("delta", None, False),
        ("gated_delta", "head", False),
        ("gated_delta", "channel", False),
    ],
)
def test_the_token_loop(rule, gate, normalize, H, N):
    """The backend "reference" with a float64 state, from a random start, to the last digits."""
    rng = np.random.default_rng(0)
    B, T, K, V = 2, 5, 3, 4
    HK = min(H, N)
    q, k = rng.random((B, T, H, K)), rng.random((B, T, HK, K)) / 2
    v = rng.standard_normal((B, T, N, V))
    g = beta = None
    if gate is not None:
        g = -rng.random((B, T, N) if gate == "head" else (B, T, N, K))
        g[0, 2, 0] = -np.inf
    if rule.endswith("delta"):
        beta = rng.random((B, T, N))
    S, z = rng.standard_normal((B, N, K, V)), rng.random((B, N, K))
    heads = {"num_kv_heads": N} if N < H else {"num_value_heads": N} if N > H else {}
    attn = la.LinearAttention(
        H, K, V, feature_map="identity", update_rule=rule, normalize=normalize, backend="reference", **heads
    )
    state = la.State.from_arrays(attn, S, z if normalize else None, dtype="float64")
    y = attn.prefill(q, k, v, state, g=g, beta=beta)
    scale = 1.0 if normalize else K**-0.5
    expected, S, z = by_tokens(q, k, v, g, beta, rule, H, N, K, V, scale, normalize, S, z)
    np.testing.assert_allclose(y, expected, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(state.S, S, rtol=1e-12, atol=1e-13)
    if normalize:
        np.testing.assert_allclose(state.z, z, rtol=1e-12)


def test_the_token_loop_pads_reads_and_writes():
    rng = np.random.default_rng(0)
    q, k, v = rng.random((3, 2, 5, 2, 3))
    attn = la.LinearAttention(2, 3, backend="reference")
    state, half = attn.init_state(2, "float64"), attn.init_state(2, "float64")
    spoiled = k.copy()
    spoiled[0, 2:] = np.nan
    y = attn.prefill(q, spoiled, v, state, lengths=[2, 5])
    assert not y[0, 2:].any()
    attn.prefill(q[:, :2], k[:, :2], v[:, :2], half)
    np.testing.assert_array_equal(half.S[0], state.S[0])
    assert state.position.tolist() == [2, 5]
    before = state.S.copy(), state.z.copy()
    read = attn.read(q[:, 4], state)
    np.testing.assert_allclose(read[1], y[1, 4], rtol=1e-14)
    np.testing.assert_array_equal(state.S, before[0])
    attn.write(k[:, 0], v[:, 0], state)
    assert state.position.tolist() == [3, 6]
    unit = np.where(k[:, 0] >= 0, k[:, 0] + 1, 0)
    np.testing.assert_allclose(state.z, before[1] + unit, rtol=1e-14)


def test_the_reference_computes_in_float64_whatever_the_state_keeps():
    """One token: y = v exactly where φ cancels; φ(k) in S is rounded once, to the state's float32."""
    attn = la.LinearAttention(1, 1, backend="reference", normalize=False)
    state = attn.init_state(1)
    k = np.float32(-0.7)
    attn.write(np.full((1, 1, 1), k), np.ones((1, 1, 1)), state)
    assert state.S[0, 0, 0, 0] == np.float32(math.exp(float(k)))


def test_qk_norm_and_eps_of_the_reference():
    attn = la.LinearAttention(1, 2, 1, qk_norm=True, eps=0.5, eps_mode="add", backend="reference", feature_map="relu")
    state = attn.init_state(1, "float64")
    k, v = np.array([[[3.0, 4.0]]]), np.array([[[2.0]]])
    y = attn.step(k, k, v, state)
    unit = 25 / (25 + 1e-6)  # |k / sqrt(Σk² + 1e-6)|²
    np.testing.assert_allclose(y.ravel(), [2 * unit / (unit + 0.5)], rtol=1e-14)

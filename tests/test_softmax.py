"""SoftmaxAttention: exact attention over a growing cache, against float64 softmax written out here."""

import numpy as np
import pytest

import linattn_edge as la
from linattn_edge.errors import DtypeError, NotFiniteError, ShapeError, StateMismatchError

small = pytest.mark.nojit

LAYOUTS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (3, 1)}


def oracle(q, k, v, scale=None):
    """softmax(scale · qᵀk) v over the past and the present, one query at a time; query head h reads head h // (H/N)."""
    q, k, v = (np.asarray(a).astype(np.float64) for a in (q, k, v))
    B, T, H, K = q.shape
    N = k.shape[2]
    scale = K**-0.5 if scale is None else scale
    y = np.zeros((B, T, H, v.shape[3]))
    for b, t, h in np.ndindex(B, T, H):
        logits = scale * (k[b, : t + 1, h // (H // N)] @ q[b, t, h])
        w = np.exp(logits - logits.max())
        y[b, t, h] = (w / w.sum()) @ v[b, : t + 1, h // (H // N)]
    return y


def data(layout="mha", *, B=2, T=9, K=4, V=5, seed=0, dtype=np.float32):
    H, N = LAYOUTS[layout]
    rng = np.random.default_rng(seed)
    q, k, v = (rng.standard_normal((B, T, *s)).astype(dtype) for s in ((H, K), (N, K), (N, V)))
    attn = la.SoftmaxAttention(H, K, V, num_kv_heads=N)
    return attn, q, k, v


def error(y, expected):
    """Relative RMS error."""
    return np.sqrt(np.mean((y.astype(np.float64) - expected) ** 2) / np.mean(expected**2))


@small
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("K", "V"), [(4, 4), (3, 5), (5, 1)])
def test_prefill_and_steps(layout, K, V):
    attn, q, k, v = data(layout, K=K, V=V)
    expected = oracle(q, k, v)
    state = attn.init_state(2)
    y = attn.prefill(q, k, v, state)
    assert y.dtype == np.float32
    assert error(y, expected) < 2e-6
    single = attn.init_state(2)
    steps = np.stack([attn.step(q[:, t], k[:, t], v[:, t], single) for t in range(9)], 1)
    assert error(steps, expected) < 2e-6
    for s in (state, single):
        assert s.position.tolist() == [9, 9]
        np.testing.assert_array_equal(s.k, k)
        np.testing.assert_array_equal(s.v, v)


@pytest.mark.parametrize("T", [0, 1, 31, 32, 33, 64, 65, 257, 500])
@pytest.mark.parametrize("V", [8, 33, 64, 71])
def test_any_length_and_width(T, V):
    attn, q, k, v = data("gqa", T=T, K=16, V=V)
    y = attn.prefill(q, k, v, attn.init_state(2))
    assert y.shape == (2, T, 4, V)
    if T:
        assert error(y, oracle(q, k, v)) < 2e-6


@small
@pytest.mark.parametrize("parts", [(1, 8), (4, 1, 4), (2, 7), (0, 9), (1,) * 9])
def test_splits(parts):
    """A call with a filled cache goes on from it."""
    attn, q, k, v = data("gqa")
    state = attn.init_state(2, capacity=1)
    whole = oracle(q, k, v)
    at, ys = 0, []
    for n in parts:
        s = slice(at, at + n)
        ys.append(attn.prefill(q[:, s], k[:, s], v[:, s], state))
        at += n
    assert error(np.concatenate(ys, 1), whole) < 2e-6
    assert state.position.tolist() == [9, 9]


@small
def test_the_cache_grows_by_doubling():
    attn, q, k, v = data(T=70)
    state = attn.init_state(2, capacity=1)
    sizes = set()
    for t in range(70):
        attn.step(q[:, t], k[:, t], v[:, t], state)
        sizes.add(state.nbytes)
    assert len(sizes) == 3  # 32, 64 and 128 tokens
    np.testing.assert_array_equal(state.k, k)
    np.testing.assert_array_equal(state.v, v)
    big = attn.init_state(2, capacity=70)
    before = big.nbytes
    attn.prefill(q, k, v, big)
    assert big.nbytes == before
    assert before >= 2 * 2 * 70 * (4 + 5) * 4


@small
def test_growth_keeps_ragged_streams():
    attn, q, k, v = data(T=40)
    state = attn.init_state(2, capacity=1)
    attn.prefill(q, k, v, state, lengths=[40, 3])
    attn.prefill(q[:, :30], k[:, :30], v[:, :30], state)
    second = np.concatenate([k[1, :3], k[1, :30]])
    np.testing.assert_array_equal(state.k[1, :33], second)
    assert not state.k[1, 33:].any()
    y = attn.read(q[:, 5], state)
    again = oracle(q[1:, [5] * 33], second[None], np.concatenate([v[1, :3], v[1, :30]])[None])
    assert error(y[1], again[0, -1]) < 2e-6


@small
def test_lengths():
    attn, q, k, v = data("gqa", B=3)
    for a in (q, k, v):
        a[0, 4:], a[2] = np.nan, np.inf  # what stands in padded places is not looked at
    state = attn.init_state(3)
    y = attn.prefill(q, k, v, state, lengths=np.array([4, 9, 0]))
    assert error(y[0, :4], oracle(q[:1, :4], k[:1, :4], v[:1, :4])[0]) < 2e-6
    assert error(y[1], oracle(q[1:2], k[1:2], v[1:2])[0]) < 2e-6
    assert not y[0, 4:].any()
    assert not y[2].any()
    assert state.position.tolist() == [4, 9, 0]


@small
def test_active():
    attn, q, k, v = data(B=3)
    state = attn.init_state(3)
    attn.prefill(q[:, :5], k[:, :5], v[:, :5], state)
    q[1, 5] = k[1, 5] = v[1, 5] = np.nan
    y = attn.step(q[:, 5], k[:, 5], v[:, 5], state, active=np.array([True, False, True]))
    assert not y[1].any()
    for b in (0, 2):
        assert error(y[b], oracle(q[b : b + 1, :6], k[b : b + 1, :6], v[b : b + 1, :6])[0, 5]) < 2e-6
    assert state.position.tolist() == [6, 5, 6]
    np.testing.assert_array_equal(state.k[1, :5], k[1, :5])
    assert not state.k[1, 5:].any()


@small
def test_write_then_read_is_a_step():
    attn, q, k, v = data("gqa")
    stepped, written = attn.init_state(2), attn.init_state(2)
    for t in range(9):
        y = attn.step(q[:, t], k[:, t], v[:, t], stepped)
        assert attn.write(k[:, t], v[:, t], written) is None
        np.testing.assert_array_equal(attn.read(q[:, t], written), y)
    assert written.position.tolist() == [9, 9]
    at_once = attn.init_state(2)
    attn.write(k, v, at_once, lengths=[9, 2])
    assert at_once.position.tolist() == [9, 2]
    np.testing.assert_array_equal(at_once.k[0], k[0])
    many = attn.read(q, stepped)  # a sequence reads the one cache T times
    np.testing.assert_array_equal(many[:, 8], y)
    np.testing.assert_allclose(many[:, 3], attn.read(q[:, 3], stepped), rtol=1e-6)
    assert stepped.position.tolist() == [9, 9]


@small
def test_an_empty_cache_answers_zero():
    attn, q, _, _ = data()
    assert not attn.read(q, attn.init_state(2)).any()
    assert attn.read(q[:0], attn.init_state(0)).shape == (0, 9, 2, 5)
    assert attn.init_state(0).k.shape == (0, 0, 2, 4)


@small
@pytest.mark.parametrize("size", [1e2, 1e4, 1e15])
def test_large_logits(size):
    """Up to ±1e30: weight goes to the largest logits, nothing overflows."""
    attn, q, k, v = data(T=12)
    q, k = q * np.float32(size), k * np.float32(size)
    y = attn.prefill(q, k, v, attn.init_state(2, "float64"))
    assert error(y, oracle(q, k, v)) < 2e-6
    y = attn.prefill(q, k, v, attn.init_state(2))
    assert np.isfinite(y).all()
    logits = np.einsum("bthk,bshk->bhts", q.astype(float), k.astype(float)) / 2
    masked = np.where(np.tri(12, dtype=bool), logits, -np.inf)
    winners = masked.argmax(-1)
    ordered = np.sort(masked, -1)
    clear = ordered[..., -1] - ordered[..., -2] > 1e-5 * np.abs(logits).max() + 60
    for b, h, t in np.argwhere(clear):
        np.testing.assert_allclose(y[b, t, h], v[b, winners[b, h, t], h], rtol=1e-6)


@small
def test_equal_keys_give_the_mean():
    """Silence: the same key all along. The weights are 1/t."""
    attn, q, k, v = data(T=20)
    k[:] = k[:, :1]
    y = attn.prefill(q, k, v, attn.init_state(2))
    mean = np.cumsum(v.astype(np.float64), 1) / np.arange(1, 21)[:, None, None]
    assert error(y, mean) < 2e-6


@small
def test_scale():
    _, q, k, v = data()
    attn = la.SoftmaxAttention(2, 4, 5, scale=-0.3)
    assert error(attn.prefill(q, k, v, attn.init_state(2)), oracle(q, k, v, -0.3)) < 2e-6


@small
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "int32"])
def test_input_dtypes(dtype):
    if dtype == "bfloat16":
        dtype = pytest.importorskip("ml_dtypes").bfloat16
    attn, q, k, v = data("gqa")
    q, k, v = ((a * 4).astype(dtype) for a in (q, k, v))
    y = attn.prefill(q, k, v, attn.init_state(2))
    assert y.dtype == (np.float32 if dtype == "int32" else np.dtype(dtype))
    expected = oracle(q, k, v)
    bound = {"float64": 2e-6, "int32": 2e-6, "float16": 1e-3}.get(str(np.dtype(dtype)), 8e-3)
    assert error(y, expected) < bound
    single = attn.init_state(2)
    for t in range(9):
        y_t = attn.step(q[:, t], k[:, t], v[:, t], single)
        np.testing.assert_array_equal(y_t, y[:, t])


@small
def test_a_float64_cache():
    attn, q, k, v = data("gqa", dtype=np.float64)
    state = attn.init_state(2, "float64")
    assert state.dtype == np.float64
    assert error(attn.prefill(q, k, v, state), oracle(q, k, v)) < 1e-14
    np.testing.assert_array_equal(state.k, k)


@small
@pytest.mark.parametrize("layout", ["fortran", "strided", "reversed", "read-only", "unaligned", "big-endian"])
def test_memory_layouts(layout):
    attn, q, k, v = data("gqa")
    expected = attn.prefill(q, k, v, attn.init_state(2))

    def turned(a):
        if layout == "fortran":
            return np.asfortranarray(a)
        if layout == "strided":
            return np.repeat(a, 2, axis=1)[:, ::2]
        if layout == "reversed":
            return a[..., ::-1].copy()[..., ::-1]
        if layout == "unaligned":
            return np.frombuffer(b"0" + a.tobytes(), np.uint8)[1:].view(a.dtype).reshape(a.shape)
        if layout == "big-endian":
            return a.astype(">f4")
        a = a.copy()
        a.flags.writeable = False
        return a

    given = [turned(a) for a in (q, k, v)]
    np.testing.assert_array_equal(attn.prefill(*given, attn.init_state(2)), expected)
    state = attn.init_state(2)
    for t in range(9):
        np.testing.assert_array_equal(attn.step(*(a[:, t] for a in given), state), expected[:, t])


@small
def test_out():
    attn, q, k, v = data()
    expected = attn.prefill(q, k, v, attn.init_state(2))
    out = np.full(expected.shape, np.nan, np.float32)
    assert attn.prefill(q, k, v, attn.init_state(2), out=out) is out
    np.testing.assert_array_equal(out, expected)
    state = attn.init_state(2)
    out = np.zeros((2, 2, 5), np.float32)
    for t in range(9):
        assert attn.step(q[:, t], k[:, t], v[:, t], state, out=out) is out
        np.testing.assert_array_equal(out, expected[:, t])
    assert attn.read(q[:, 8], state, out=out) is out
    np.testing.assert_array_equal(out, expected[:, 8])
    half = np.zeros((2, 2, 5), np.float16)
    assert attn.read(q[:, 8].astype(np.float16), state, out=half) is half
    np.testing.assert_allclose(half, expected[:, 8], rtol=5e-3, atol=5e-3)


# the state


@small
def test_copy_select_reset():
    attn, q, k, v = data(B=3)
    state = attn.init_state(3)
    attn.prefill(q[:, :6], k[:, :6], v[:, :6], state, lengths=[6, 2, 4])
    copy = state.copy()
    rest = [a[:, 6:] for a in (q, k, v)]
    y = attn.prefill(*rest, state)
    np.testing.assert_array_equal(attn.prefill(*rest, copy.copy()), y)
    assert copy.position.tolist() == [6, 2, 4]
    for rows in ([2, 0, 0], [-1, 0], [True, False, True], 1, []):
        index = np.flatnonzero(rows) if rows and np.asarray(rows).dtype == bool else np.atleast_1d(rows).astype(int)
        picked = copy.select(rows)
        assert picked.position.tolist() == np.array([6, 2, 4])[index].tolist()
        np.testing.assert_array_equal(attn.prefill(*(a[index] for a in rest), picked), y[index])
        assert not np.may_share_memory(picked._keys, copy._keys)
    copy.reset([1])
    assert copy.position.tolist() == [6, 0, 4]
    fresh = attn.prefill(*(a[1:2] for a in rest), attn.init_state(1))
    np.testing.assert_array_equal(attn.prefill(*rest, copy)[1], fresh[0])
    copy.reset()
    assert copy.position.tolist() == [0, 0, 0]
    assert copy.k.shape == (3, 0, 2, 4)
    copy.reset(np.array([True, False, False]))
    assert "\n" not in repr(copy)


@small
@pytest.mark.parametrize("rows", [[3], [-4], 1.0, [0.5], "a", [[0, 1]], [True, False], np.ones(4, bool)])
@pytest.mark.parametrize("method", ["select", "reset"])
def test_rows_that_are_not_there(method, rows):
    attn, q, k, v = data(B=3)
    state = attn.init_state(3)
    attn.prefill(q, k, v, state)
    with pytest.raises((ValueError, TypeError), match=r"^rows: ") as caught:
        getattr(state, method)(rows)
    assert "\n" not in str(caught.value)
    assert state.position.tolist() == [9, 9, 9]
    np.testing.assert_array_equal(state.k, k)


@small
def test_k_and_v_are_copies():
    attn, q, k, v = data()
    state = attn.init_state(2)
    attn.prefill(q, k, v, state)
    state.k[:], state.v[:] = 0, 0
    np.testing.assert_array_equal(state.k, k)
    np.testing.assert_array_equal(state.v, v)


# what is refused


@small
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads": 2.0}, "num_heads"),
        ({"num_heads": True}, "num_heads"),
        ({"key_dim": -1}, "key_dim"),
        ({"key_dim": None}, "key_dim"),
        ({"value_dim": 0}, "value_dim"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"num_kv_heads": 0}, "num_kv_heads"),
        ({"scale": 0.0}, "scale"),
        ({"scale": np.nan}, "scale"),
        ({"scale": "big"}, "scale"),
    ],
)
def test_layer_options(options, name):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: ") as caught:
        la.SoftmaxAttention(**({"num_heads": 4, "key_dim": 8} | options))
    assert "\n" not in str(caught.value)


@small
@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"batch_size": -1}, "batch_size"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"dtype": "float16"}, "dtype"),
        ({"capacity": -1}, "capacity"),
        ({"capacity": 2.5}, "capacity"),
    ],
)
def test_state_options(options, name):
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: "):
        la.SoftmaxAttention(2, 4).init_state(**options)


@small
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"q": (2, 9, 3, 4)}, ShapeError, r"^q: .*\[B, T, H, K\].*\[2, 9, 3, 4\]"),
        ({"k": (2, 9, 2, 5)}, ShapeError, r"^k: .*\[B, T, Hk, K\].*\[2, 9, 2, 5\]"),
        ({"k": (2, 8, 2, 4)}, ShapeError, r"^k: .*\[2, 8, 2, 4\]"),
        ({"v": (2, 9, 2, 4)}, ShapeError, r"^v: .*\[B, T, Hv, V\].*\[2, 9, 2, 4\]"),
        ({"q": (1, 9, 2, 4)}, ShapeError, r"^q: "),
        ({"lengths": [1]}, ShapeError, r"^lengths: "),
        ({"lengths": [1, 10]}, ValueError, r"^lengths: "),
        ({"lengths": [1, -1]}, ValueError, r"^lengths: "),
        ({"lengths": [1.0, 2.0]}, DtypeError, r"^lengths: "),
        ({"out": np.zeros((2, 9, 2, 4), np.float32)}, ShapeError, r"^out: "),
        ({"out": np.zeros((2, 9, 2, 5))}, DtypeError, r"^out: "),
        ({"out": [0.0]}, DtypeError, r"^out: "),
        ({"out": np.zeros((2, 2, 9, 5), np.float32).transpose(0, 2, 1, 3)}, ValueError, r"^out: "),
    ],
)
def test_calls_that_do_not_fit(change, error, words):
    attn, q, k, v = data()
    state = attn.init_state(2)
    attn.prefill(q, k, v, state)
    given = {"q": q, "k": k, "v": v} | {
        n: np.zeros(a, np.float32) if isinstance(a, tuple) else a for n, a in change.items()
    }
    with pytest.raises(error, match=words) as caught:
        attn.prefill(state=state, **given)
    assert "\n" not in str(caught.value)
    assert state.position.tolist() == [9, 9]
    np.testing.assert_array_equal(state.k, k)
    np.testing.assert_array_equal(state.v, v)


@small
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite(name, bad):
    attn, q, k, v = data()
    state = attn.init_state(2)
    attn.prefill(q, k, v, state)
    given = {"q": q.copy(), "k": k.copy(), "v": v.copy()}
    given[name][1, 3, 1, 2] = bad
    with pytest.raises(NotFiniteError, match=rf"^{name}: .*stream 1, token 3") as caught:
        attn.prefill(state=state, **given)
    assert "\n" not in str(caught.value)
    with pytest.raises(NotFiniteError, match=rf"^{name}: "):
        attn.step(state=state, **{n: a[:, 3] for n, a in given.items()})
    assert state.position.tolist() == [9, 9]
    np.testing.assert_array_equal(state.k, k)
    loose = la.SoftmaxAttention(2, 4, 5, check_finite=False)
    loose.prefill(state=state, **given)
    assert state.position.tolist() == [18, 18]


@small
def test_states_of_other_layers():
    attn, q, _, _ = data()
    for other in (la.SoftmaxAttention(2, 5), la.SoftmaxAttention(4, 4, 5), la.LinearAttention(2, 4, 5)):
        with pytest.raises(StateMismatchError, match=r"^state: ") as caught:
            attn.read(q, other.init_state(2))
        assert "\n" not in str(caught.value)
    for thing in (None, np.zeros((50, 50))):
        with pytest.raises(StateMismatchError, match=r"^state: ") as caught:
            attn.read(q, thing)
        assert "\n" not in str(caught.value)


@small
def test_out_may_not_overlap():
    attn = la.SoftmaxAttention(2, 4)
    q = np.ones((1, 3, 2, 4), np.float32)
    state = attn.init_state(1)
    with pytest.raises(ValueError, match=r"^out: overlaps q"):
        attn.prefill(q, q.copy(), q.copy(), state, out=q)
    with pytest.raises(ValueError, match=r"^out: overlaps v"):
        attn.prefill(q.copy(), q.copy(), q, state, out=q)
    assert state.position.tolist() == [0]


@small
def test_lengths_of_a_one_token_write_are_checked():
    attn = la.SoftmaxAttention(2, 4)
    state = attn.init_state(1)
    one = np.ones((1, 2, 4), np.float32)
    for lengths in ([2], [-1], [1, 1], np.array([2]), np.array([1.0])):
        with pytest.raises((TypeError, ValueError), match=r"^lengths: "):
            attn.write(one, one, state, lengths=lengths)
    assert state.position.tolist() == [0]
    attn.write(one, one, state, lengths=[0])
    assert state.position.tolist() == [0]
    attn.write(one, one, state, lengths=[1])
    assert state.position.tolist() == [1]


@small
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_none_is_no_array(name):
    attn, q, k, v = data()
    state = attn.init_state(2)
    given = {"q": q, "k": k, "v": v} | {name: None}
    for call, arrays in (
        (attn.prefill, given),
        (attn.step, {n: a if a is None else a[:, 0] for n, a in given.items()}),
    ):
        with pytest.raises((TypeError, ValueError), match=rf"^{name}: "):
            call(**arrays, state=state)
    assert state.position.tolist() == [0, 0]

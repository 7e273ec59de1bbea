"""LinearAttention against the float64 oracles: every rule, head layout and way in, on hard inputs."""

import itertools
import math

import numpy as np
import pytest

import linattn_edge as la
import naive
from cases import LAYOUTS, MAPS, NOJIT, POSITIVE, SERIES, VARIANTS, Case, attn_heads, feature_width, make

pytestmark = pytest.mark.nojit

BOUND = 2e-6  # relative RMS error in float32: positive maps, and identity with unit keys
SIGNED = 1e-5  # signed maps without a normaliser
EXACT = 1e-13  # float64 state on the cpu backend

T_GRID = [0, 1, 2, 15, 63, 64, 65, 500] if not NOJIT else [0, 1, 2, 15, 65]
LONG = 500 if not NOJIT else 40
BLOCK = 65 if not NOJIT else 9
HEADS = ["mha", "gqa", "gva"]
SIX = pytest.mark.parametrize(("rule", "gate"), VARIANTS)


def covering(rule, gate, layout, T):
    """Sizes, map, normaliser and start for one point of the grid; every pair of values meets at some point."""
    i, j, t = VARIANTS.index((rule, gate)), HEADS.index(layout), T_GRID.index(T)
    phi = ("elu", "identity", "relu", "dpfp", "elu", "relu2", "dpfp3")[(i + 2 * j + t) % 7]
    return {
        "phi": phi,
        "B": 1 if NOJIT else (1, 3)[(i + j + t // 2) % 2],
        "K": (4, 3, 8, 5)[(2 * i + j + t) % 4] if not NOJIT else 3,
        "V": (5, 17, 40, 8, 1)[(i + j + 2 * t) % 5] if not NOJIT else (5, 9)[(i + t) % 2],
        "normalize": phi in POSITIVE and rule in ("linear", "gated") and (i + j + t // 3) % 2 == 0,
        "start": (i + t + j // 2) % 3 != 0,
    }


@pytest.mark.skipif(NOJIT, reason="the grid is smaller")
def test_the_grid_lets_every_two_values_meet():
    points = [
        {"variant": variant, "layout": layout, "T": T} | covering(*variant, layout, T)
        for variant in VARIANTS
        for layout in HEADS
        for T in T_GRID
    ]
    for a, b in itertools.combinations(points[0], 2):
        if "normalize" not in (a, b):
            seen = {(p[a], p[b]) for p in points}
            assert len(seen) == len({x for x, _ in seen}) * len({y for _, y in seen}), f"{a} and {b}"
    able = [p for p in points if p["phi"] in POSITIVE and p["variant"][0] in ("linear", "gated")]
    for a in ("variant", "layout", "T", "phi", "start", "B"):
        assert {(p[a], p["normalize"]) for p in able} == {(p[a], n) for p in able for n in (True, False)}, a


@SIX
@pytest.mark.parametrize("layout", HEADS)
@pytest.mark.parametrize("T", T_GRID)
def test_every_rule_and_layout_by_prefill_and_by_step(rule, gate, layout, T):
    case = make(rule, gate, layout, T=T, **covering(rule, gate, layout, T))
    state = case.start()
    case.check(case.prefill(state), state, BOUND, "prefill")
    for quick in (False, True):
        state = case.start()
        case.check(case.steps(state, quick=quick), state, BOUND, "step")


@SIX
@pytest.mark.parametrize("layout", ["mqa", "gva3"])
def test_one_key_head_for_all(rule, gate, layout):
    case = make(rule, gate, layout, T=BLOCK, V=6, start=True)
    state = case.start()
    case.check(case.prefill(state), state, BOUND)


@SIX
@pytest.mark.parametrize("width", [1, 16, 64] if not NOJIT else [1])
@pytest.mark.parametrize("V", [1, 5, 8, 17, 32, 33, 40, 64] if not NOJIT else [1, 5, 33])
def test_widths(rule, gate, width, V):
    normalize = rule in ("linear", "gated") and V % 2 == 0
    case = make(rule, gate, K=width, V=V, T=20 if not NOJIT else 4, B=1, normalize=normalize, start=True)
    state = case.start()
    case.check(case.prefill(state), state, BOUND, "prefill")
    state = case.start()
    case.check(case.steps(state), state, BOUND, "step")


@SIX
@pytest.mark.parametrize("layout", HEADS)
def test_no_rows(rule, gate, layout):
    case = make(rule, gate, layout, B=0, T=3, normalize=rule == "linear")
    state = case.start()
    assert case.prefill(state).shape == (0, 3, attn_heads(layout), 5)
    assert case.steps(state).shape == (0, 3, attn_heads(layout), 5)
    assert state.S.shape[0] == 0


@SIX
@pytest.mark.parametrize("layout", HEADS)
def test_empty_block_leaves_the_state(rule, gate, layout):
    case = make(rule, gate, layout, T=0, start=True, normalize=rule == "gated")
    state = case.start()
    y = case.prefill(state)
    assert y.shape == (2, 0, attn_heads(layout), 5)
    np.testing.assert_array_equal(state.S, case.S0)
    np.testing.assert_array_equal(state.position, 0)


def probe(case, state, bound, what):
    """Compare the state of a map whose feature order is its own: by what random queries read from it."""
    rng = np.random.default_rng(5)
    shape = case.q[:, :1].shape
    query = rng.standard_normal(shape).astype(case.q.dtype)
    got = case.attn.read(query[:, 0], state)
    T = case.q.shape[1]
    beta = None if case.beta is None else np.concatenate([case.beta, 0 * case.beta[:, :1]], axis=1)
    g = None if case.g is None else np.concatenate([case.g, 0 * case.g[:, :1]], axis=1)
    k, v = (np.concatenate([a, 0 * a[:, :1]], axis=1) for a in (case.k, case.v))
    if beta is None:  # one more token would write: read at the last one instead
        asked = case.with_(q=np.concatenate([case.q[:, :-1], query], axis=1))
        want = asked.oracle()[0][:, T - 1]
    else:
        asked = case.with_(q=np.concatenate([case.q, query], axis=1), k=k, v=v, g=g, beta=beta)
        want = asked.oracle()[0][:, T]
    naive.assert_close(got, want, bound, what)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("phi", SERIES)
@pytest.mark.parametrize("layout", HEADS)
def test_signed_maps_without_normaliser(rule, phi, layout):
    i = SERIES.index(phi) + HEADS.index(layout)
    T = (LONG, 65, 15)[i % 3] if not NOJIT else 6
    case = make(rule, "head", layout, phi, T=T, K=(3, 5)[i % 2], V=(5, 17)[i % 2], B=1 + i % 2)
    state = case.start()
    naive.assert_close(case.prefill(state), case.expected[0], SIGNED, "prefill")
    probe(case, state, SIGNED, "read")
    state = case.start()
    naive.assert_close(case.steps(state), case.expected[0], SIGNED, "step")


@pytest.mark.parametrize(("rule", "gate"), [("linear", None), ("gated", "head"), ("gated", "channel")])
def test_identity_with_keys_of_any_length(rule, gate):
    case = make(rule, gate, "gva", "identity", T=LONG, K=8, V=17)
    case.k *= np.random.default_rng(0).uniform(0.1, 10, (*case.k.shape[:-1], 1)).astype(np.float32)
    state = case.start()
    case.check(case.prefill(state), state, SIGNED)


@pytest.mark.parametrize("rule", ["linear", "gated"])
@pytest.mark.parametrize("phi", ["identity", "taylor1", "taylor", "taylor3", "polynomial", "polynomial3"])
def test_signed_maps_with_normaliser(rule, phi):
    """y = num/den is only as good as den is far from zero.

    Both sums are right to SIGNED times the sum of their absolute terms, A(num) and A(den); so, element by element,
    |error| ≤ SIGNED · (A(num) + |y| A(den)) / |den|: SIGNED times the condition number of the division times |y|.
    Where the bound is above 1 % of y there is nothing to compare.
    """
    case = make(rule, "head", "gqa", phi, T=LONG // 4, K=4, V=5, normalize=True)
    y, _, _ = case.expected
    ones = np.ones((*case.v.shape[:3], 1))
    plain = {"normalize": False, "scale": 1.0, "z0": None}
    den = case.with_(v=ones).oracle(**plain)[0]
    absolute = case.with_(q=np.abs(case.q), k=np.abs(case.k))
    size_num = absolute.with_(v=np.abs(case.v)).oracle(**plain)[0]
    size_den = absolute.with_(v=ones).oracle(**plain)[0]
    bound = SIGNED * (size_num + np.abs(y) * size_den) / np.abs(den)
    for way in (case.prefill, case.steps):
        got = way(case.start()).astype(np.float64)
        assert np.isfinite(got).all()
        meant = SIGNED * size_den < 0.01 * np.abs(den) + 0 * y
        assert meant.mean() > 0.9
        assert (np.abs(got - y) <= bound + 1e-30)[meant].all()


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("q", [-20.0, -40.0, -60.0])
def test_small_legitimate_denominators(backend, q):
    """elu of q = −20 and k = −5 makes denominators of 1e-11 to 1e-28: far from zero for a division."""
    case = make("linear", T=9, normalize=True)
    case.q[...] = q
    case.k[...] = -5.0 + 0.25 * case.k
    case.options = {"backend": backend}
    state = case.start()
    case.check(case.prefill(state), state, BOUND)
    one = case.attn.init_state(2)
    arrays, _ = case.tokens(0)
    np.testing.assert_allclose(case.attn.step(*arrays, one), case.v[:, 0], rtol=1e-5)


def test_denominators_are_clamped_away_from_zero_with_their_sign():
    attn = la.LinearAttention(1, 1, 1, feature_map="identity", normalize=True, eps=0.5)

    def one(q):
        state = attn.init_state(1)
        return attn.step(*(np.full((1, 1, 1), x, np.float32) for x in (q, 1.0, 3.0)), state).item()

    assert one(0.25) == pytest.approx(0.75 / 0.5)
    assert one(-0.25) == pytest.approx(-0.75 / -0.5)
    assert one(2.0) == pytest.approx(3.0)
    assert one(0.0) == 0.0


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("rule", ["linear", "gated"])
def test_added_eps(backend, rule):
    case = make(rule, "head", "gqa", T=15, normalize=True, start=True, eps=0.3, eps_mode="add", backend=backend)
    state = case.start()
    case.check(case.prefill(state), state, BOUND)
    assert naive.rms_ratio(case.oracle(eps_mode="clamp")[0], case.expected[0]) > 1e-3


def splits(T):
    return {"1 + rest": [1, T - 1], "three": [T // 3 + 1, T // 5, T - T // 3 - 1 - T // 5], "singles": [1] * T}


@SIX
@pytest.mark.parametrize("layout", HEADS)
@pytest.mark.parametrize("how", ["1 + rest", "three", "singles"])
def test_any_split_gives_the_same_stream(rule, gate, layout, how):
    T = 150 if not NOJIT else 10
    phi = ("elu", "dpfp", "relu2")[HEADS.index(layout)]
    case = make(rule, gate, layout, phi, T=T, B=1, V=9, start=True, normalize=rule in ("linear", "gated"))
    whole = case.start()
    y = case.prefill(whole)
    state = case.start()
    parts, at = [], 0
    for n in splits(T)[how]:
        parts.append(case.prefill(state, slice(at, at + n)))
        at += n
    assert at == T
    case.check(np.concatenate(parts, axis=1), state, BOUND)
    naive.assert_close(np.concatenate(parts, axis=1), y.astype(np.float64), BOUND)
    naive.assert_close(state.S, whole.S.astype(np.float64), BOUND, "S")


@pytest.mark.parametrize(("rule", "gate"), VARIANTS[3:])
@pytest.mark.parametrize("strength", [0.9, 1.0, 1.9])
@pytest.mark.parametrize("phi", ["identity", "elu"])
def test_silence(rule, gate, strength, phi):
    """The same key for the whole stream: what a chunked delta rule blows up on."""
    case = make(rule, gate, "gva", phi, T=LONG, K=8 if not NOJIT else 3, V=17, hard=False)
    case.k[...] = case.k[:, :1]
    size = MAPS[phi][1].diagonal(case.k.astype(np.float64))
    case.beta[...] = strength / np.repeat(size, 2, axis=2)
    case.v[...] = np.random.default_rng(2).standard_normal(case.v.shape)
    state = case.start()
    # at 1.9 each step flips and keeps 90 % of the last error: ten tokens' rounding add up
    case.check(case.prefill(state), state, BOUND if strength < 1.5 else 5 * BOUND)


@SIX
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("layout", HEADS)
def test_ragged_rows(rule, gate, backend, layout):
    """Padded places hold NaN and are not looked at; they change nothing, decay included, and give 0."""
    case = make(rule, gate, layout, B=5, T=BLOCK, start=True, normalize=rule in ("linear", "gated"), backend=backend)
    T = BLOCK
    case.lengths = np.array([T, 0, 1, T // 2, T - 1])
    want = case.oracle()  # before the padding is spoiled
    for row, n in enumerate(case.lengths):
        for a in (case.q, case.k, case.v, case.g, case.beta):
            if a is not None:
                a[row, n:] = np.nan
    state = case.start()
    y = case.prefill(state, lengths=case.lengths)
    case.expected = want
    case.check(y, state, BOUND)
    for row, n in enumerate(case.lengths):
        assert (y[row, n:] == 0).all()
    np.testing.assert_array_equal(state.S[1], case.S0[1])


@pytest.mark.parametrize("kind", [list, np.int32, np.uint8])
def test_lengths_of_any_integer_type(kind):
    case = make(B=2, T=4, normalize=True)
    lengths = [3, 1]
    state, other = case.start(), case.start()
    y = case.prefill(state, lengths=lengths if kind is list else np.array(lengths, kind))
    np.testing.assert_array_equal(y, case.prefill(other, lengths=np.array(lengths)))
    np.testing.assert_array_equal(state.position, lengths)


@SIX
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_float64_state(rule, gate, backend):
    phi = "elu" if rule in ("linear", "gated") else "identity"
    normalize = phi == "elu"
    case = make(
        rule, gate, "gqa", phi, T=LONG, K=5, V=17, start=True, dtype=np.float64, normalize=normalize, backend=backend
    )
    state = case.start(dtype="float64")
    assert state.S.dtype == np.float64
    y = case.prefill(state)
    assert y.dtype == np.float64
    case.check(y, state, 10 * EXACT, "prefill")
    state = case.start(dtype="float64")
    case.check(case.steps(state), state, 10 * EXACT, "step")


@pytest.mark.parametrize("rule", ["linear", "gated_delta"])
def test_float64_inputs_with_a_float32_state_compute_in_float32(rule):
    case = make(rule, "head", T=BLOCK, start=True, dtype=np.float64)
    state = case.start()
    y = case.prefill(state)
    assert y.dtype == np.float64
    assert state.S.dtype == np.float32
    case.check(y, state, BOUND)


def half_types():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return {"float16": (np.float16, 2**-11), "bfloat16": (ml_dtypes.bfloat16, 2**-8)}


@SIX
@pytest.mark.parametrize("name", ["float16", "bfloat16"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_half_precision_inputs(rule, gate, name, backend):
    """Inputs are read exactly and only the output is rounded: the state is as good as ever."""
    kind, rounding = half_types()[name]
    case = make(rule, gate, "gva", T=BLOCK, normalize=rule == "linear", backend=backend, hard=False)
    case.q, case.k, case.v = (a.astype(kind) for a in (case.q, case.k, case.v))
    case.g = None if case.g is None else case.g.astype(kind)
    case.beta = None if case.beta is None else (0.9 * case.beta).astype(kind)
    for way in (case.prefill, case.steps):
        state = case.start()
        y = way(state)
        assert y.dtype == kind
        naive.assert_close(y, case.expected[0], rounding)
        naive.assert_close(state.S, case.expected[1], BOUND, "S")
        assert state.S.dtype == np.float32


def test_inputs_of_different_types():
    case = make("gated_delta", "channel", T=9, start=True)
    case.k, case.v = case.k.astype(np.float64), case.v.astype(np.float16)
    case.g, case.beta = case.g.astype(np.float64), case.beta.astype(np.float16)
    case.g = np.maximum(case.g, -60.0)
    state = case.start()
    y = case.prefill(state)
    assert y.dtype == np.float32
    case.check(y, state, BOUND)


def layouts(a, folder):
    """The same numbers, laid out in other ways."""
    wide = np.full((*a.shape[:-1], 2 * a.shape[-1] + 1), np.nan, a.dtype)
    wide[..., : 2 * a.shape[-1] : 2] = a
    frozen = a.copy()
    frozen.flags.writeable = False
    shifted = np.zeros(a.nbytes + 1, np.uint8)[1:].view(a.dtype).reshape(a.shape)
    shifted[...] = a
    path = folder / f"{len(list(folder.iterdir()))}.npy"
    np.save(path, a)
    return {
        "strided": wide[..., : 2 * a.shape[-1] : 2],
        "fortran": np.asfortranarray(a),
        "read-only": frozen,
        "negative": a[..., ::-1].copy()[..., ::-1],
        "backwards": a[:, ::-1].copy()[:, ::-1],
        "mapped": np.load(path, mmap_mode="r"),
        "unaligned": shifted,
        "other-endian": a.astype(a.dtype.newbyteorder()),
        "list": a.tolist(),
    }


KINDS = ["strided", "fortran", "read-only", "negative", "backwards", "mapped", "unaligned", "other-endian", "list"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rule", "gate"), [("gated", "channel"), ("gated_delta", "head")])
def test_inputs_of_any_layout(kind, rule, gate, tmp_path):
    case = make(rule, gate, "gqa", T=9, start=True)
    plain = case.start()
    y = case.prefill(plain)
    names = ("q", "k", "v", "g", "beta")
    given = {n: getattr(case, n) for n in names if getattr(case, n) is not None}
    other = {n: layouts(a, tmp_path)[kind] for n, a in given.items()}
    if kind == "list":
        other["q"] = case.q  # a list of numbers has no dtype for y to follow
    before = {n: np.array(a) for n, a in other.items()}
    state = case.start()
    got = case.attn.prefill(other.pop("q"), other.pop("k"), other.pop("v"), state, **other)
    np.testing.assert_array_equal(got, y)
    np.testing.assert_array_equal(state.S, plain.S)
    for n, a in other.items():
        np.testing.assert_array_equal(a, before[n])
    if kind == "list":
        return
    state = case.start()
    views = {n: layouts(a, tmp_path)[kind] for n, a in given.items()}
    for t in range(9):
        rest = {n: a[:, t] for n, a in views.items() if n in ("g", "beta")}
        got = case.attn.step(*(views[n][:, t] for n in "qkv"), state, **rest)
        naive.assert_close(got, y[:, t].astype(np.float64), BOUND)


class Boxed:
    """An array that only says `__array__`, as tensors of other libraries do."""

    def __init__(self, a):
        self.a = a

    def __array__(self, dtype=None, copy=None):
        return self.a if dtype is None else self.a.astype(dtype)


class Capsule:
    """An array that only speaks DLPack."""

    def __init__(self, a):
        self.a = a.copy()

    def __dlpack__(self, **options):
        return self.a.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.a.__dlpack_device__()


@pytest.mark.parametrize("box", [Boxed, Capsule])
def test_inputs_that_only_convert_to_arrays(box):
    case = make("gated_delta", "head", T=4, start=True)
    want = case.prefill(case.start())
    state, halves, blocks = case.start(), case.start(), case.start()
    (q, k, v), rest = case.tokens(slice(None))
    boxed = {n: box(a) for n, a in rest.items()}
    np.testing.assert_array_equal(case.attn.prefill(box(q), box(k), box(v), blocks, **boxed), want)
    for t in range(4):
        (q, k, v), rest = case.tokens(t)
        boxed = {n: box(a) for n, a in rest.items()}
        y = case.attn.step(box(q), box(k), box(v), state, **boxed)
        naive.assert_close(y, want[:, t].astype(np.float64), BOUND)
        case.attn.write(box(k), box(v), halves, **boxed)
        naive.assert_close(case.attn.read(box(q), halves), y.astype(np.float64), BOUND)


@SIX
def test_out_is_filled_and_returned(rule, gate):
    case = make(rule, gate, "gva", T=BLOCK, start=True, normalize=rule == "gated")
    want = case.prefill(case.start())
    out = np.full(want.shape, np.nan, np.float32)
    state = case.start()
    assert case.prefill(state, out=out) is out
    np.testing.assert_array_equal(out, want)
    one = np.full(want[:, 0].shape, np.nan, np.float32)
    state = case.start()
    for t in range(5):
        arrays, given = case.tokens(t)
        one[...] = np.nan
        assert case.attn.step(*arrays, state, **given, out=one) is one
        naive.assert_close(one, want[:, t].astype(np.float64), BOUND)


def test_out_is_filled_in_padded_places_too():
    case = make(T=6, normalize=True)
    out = np.full((2, 6, 2, 5), np.nan, np.float32)
    case.prefill(case.start(), lengths=[2, 0], out=out)
    assert (out[0, 2:] == 0).all()
    assert (out[1] == 0).all()
    one = np.full((2, 2, 5), np.nan, np.float32)
    arrays, _ = case.tokens(0)
    case.attn.step(*arrays, case.start(), active=np.array([False, True]), out=one)
    assert (one[0] == 0).all()
    assert np.isfinite(one).all()


@pytest.mark.parametrize(
    "bad",
    [np.zeros((2, 2, 6), np.float32), np.zeros((2, 2, 5)), np.zeros((2, 5, 2), np.float32).transpose(0, 2, 1)],
)
def test_out_that_does_not_fit_is_refused_and_nothing_happens(bad):
    case = make(T=1, normalize=True)
    state = case.start()
    arrays, _ = case.tokens(0)
    with pytest.raises((ValueError, TypeError), match="out"):
        case.attn.step(*arrays, state, out=bad)
    assert not state.S.any()
    assert not state.position.any()


@SIX
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_inactive_rows_stay_as_they_are(rule, gate, backend):
    case = make(rule, gate, "gqa", B=3, T=8, start=True, normalize=rule in ("linear", "gated"), backend=backend)
    active = np.random.default_rng(3).random((8, 3)) < 0.6
    active[4] = False
    state = case.start()
    for t in range(8):
        arrays, given = case.tokens(t)
        spoiled = [np.where(active[t].reshape(3, *[1] * (a.ndim - 1)), a, np.nan).astype(a.dtype) for a in arrays]
        y = case.attn.step(*spoiled, state, **given, active=active[t])
        assert (y[~active[t]] == 0).all()
    np.testing.assert_array_equal(state.position, active.sum(axis=0))
    for row in range(3):
        mine = {n: getattr(case, n) for n in ("q", "k", "v", "g", "beta")}
        mine = {n: None if a is None else a[row : row + 1, active[:, row]] for n, a in mine.items()}
        want = case.with_(**mine, S0=case.S0[row : row + 1], z0=case.z0[row : row + 1]).oracle()
        naive.assert_close(state.S[row : row + 1], want[1], BOUND, "S")
        if want[2] is not None:
            naive.assert_close(state.z[row : row + 1], want[2], BOUND, "z")


@pytest.mark.parametrize("rule", ["gated", "gated_delta"])
@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_constant_decay(rule, gate, backend):
    case = make(rule, gate, "gva", T=BLOCK, start=True, normalize=rule == "gated", backend=backend)
    decay = np.array(case.g[0, 0], np.float64)
    case.g[...] = decay
    constant = case.with_(g=None).layer(decay=decay)
    for way in ("prefill", "steps"):
        state = case.start(constant)
        y = getattr(case.with_(g=None), way)(state, attn=constant)
        case.check(y, state, BOUND, way)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_constant_decay_may_reset(gate):
    shape = (2,) if gate == "head" else (2, 4)
    decay = np.full(shape, -np.inf)
    case = make("gated", gate, T=5, start=True)
    case.g[...] = -np.inf
    attn = case.with_(g=None).layer(decay=decay)
    state = case.start(attn)
    case.check(case.with_(g=None).prefill(state, attn=attn), state, BOUND)


@SIX
@pytest.mark.parametrize("layout", HEADS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_write_then_read_is_a_step(rule, gate, layout, backend):
    case = make(rule, gate, layout, T=8, start=True, normalize=rule in ("linear", "gated"), backend=backend)
    stepped, halves = case.start(), case.start()
    want = case.steps(stepped)
    for t in range(8):
        (q, k, v), given = case.tokens(t)
        case.attn.write(k, v, halves, **given)
        y = case.attn.read(q, halves)
        naive.assert_close(y, want[:, t].astype(np.float64), BOUND)
        np.testing.assert_array_equal(y, case.attn.read(q, halves))
    naive.assert_close(halves.S, stepped.S.astype(np.float64), BOUND)
    np.testing.assert_array_equal(halves.position, 8)
    blocks = case.start()
    (q, k, v), given = case.tokens(slice(None))
    case.attn.write(k, v, blocks, **given)
    naive.assert_close(blocks.S, case.expected[1], BOUND)
    y = case.attn.read(q, blocks)
    assert y.shape == (2, 8, attn_heads(layout), 5)
    naive.assert_close(y[:, -1], want[:, -1].astype(np.float64), BOUND)
    naive.assert_close(y[:, 0], case.attn.read(q[:, 0], blocks).astype(np.float64), BOUND)


@SIX
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_scale(rule, gate, backend):
    case = make(rule, gate, T=9, start=True, scale=-2.5, backend=backend)
    state = case.start()
    case.check(case.prefill(state), state, BOUND)


def test_default_scale_and_normaliser():
    for rule, phi, normalize in (
        ("linear", "elu", True),
        ("linear", "relu2", True),
        ("linear", "identity", False),
        ("linear", "taylor1", False),
        ("gated", "elu", False),
        ("delta", "elu", False),
    ):
        case = make(rule, "head", phi=phi, T=6, normalize=normalize)
        attn = la.LinearAttention(2, 4, 5, feature_map=MAPS[phi][0], update_rule=rule)
        naive.assert_close(case.prefill(attn.init_state(2), attn=attn), case.expected[0], SIGNED, f"{rule} {phi}")


@SIX
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_qk_norm(rule, gate, backend):
    case = make(rule, gate, "gqa", T=15, V=6, start=True, qk_norm=True, backend=backend)
    case.q[0, 3] = 0.0  # a zero vector stays zero
    case.k[1, 4] = 0.0
    case.k *= 30.0
    case.q[0, 5] *= 1e-3  # so short that the 1e-6 in the norm shows
    case.k[0, 6] *= 1e-4 / 3
    if case.beta is not None:
        case.beta = np.minimum(case.beta, 0.4)
    state = case.start()
    case.check(case.prefill(state), state, BOUND, "prefill")
    state = case.start()
    case.check(case.steps(state), state, BOUND, "step")


REFERENCE_T = [0, 1, 2, 15, 65]


@SIX
@pytest.mark.parametrize("layout", HEADS)
@pytest.mark.parametrize("T", REFERENCE_T)
def test_reference_backend_on_the_same_grid(rule, gate, layout, T):
    given = covering(rule, gate, layout, T if T in T_GRID else 15)
    case = make(rule, gate, layout, T=T, **given, backend="reference")
    state = case.start()
    case.check(case.prefill(state), state, BOUND, "prefill")
    if T < 16:
        state = case.start()
        case.check(case.steps(state), state, BOUND, "step")


@SIX
@pytest.mark.parametrize("layout", HEADS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_pure_function(rule, gate, layout, backend):
    case = make(rule, gate, layout, T=BLOCK, start=True, normalize=rule in ("linear", "gated"))
    start = case.start()
    arrays, given = case.tokens(slice(None))
    kept = [a.copy() for a in (*arrays, start.S, start.position)]
    o, final = la.linear_attention(
        *arrays,
        **given,
        feature_map="elu",
        update_rule=rule,
        normalize=case.normalize,
        initial_state=start,
        backend=backend,
    )
    case.check(o, final, BOUND)
    for a, b in zip((*arrays, start.S, start.position), kept, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.shares_memory(final.S, start.S)
    pair = (case.S0, case.z0) if case.normalize else case.S0
    again, other = la.linear_attention(
        *arrays,
        **given,
        feature_map="elu",
        update_rule=rule,
        normalize=case.normalize,
        initial_state=pair,
        backend=backend,
    )
    np.testing.assert_array_equal(again, o)
    np.testing.assert_array_equal(other.S, final.S)
    np.testing.assert_array_equal(case.S0, kept[3])


def test_pure_function_without_a_start_and_with_lengths():
    case = make(T=7, B=3, normalize=True)
    case.lengths = np.array([7, 2, 0])
    o, final = la.linear_attention(case.q, case.k, case.v, lengths=case.lengths)
    case.check(o, final, BOUND)


def test_assigned_state_is_copied():
    case = make("gated_delta", "head", T=9, start=True)
    state = case.attn.init_state(2)
    mine = case.S0.copy()
    state.S = mine
    case.check(case.prefill(state), state, BOUND)
    np.testing.assert_array_equal(mine, case.S0)


@pytest.mark.skipif(NOJIT, reason="a long stream; the interpreted grid is the same at short lengths")
def test_long_stream_of_decays_close_to_one():
    case = make("gated", "head", T=3000, B=1, K=4, V=8, hard=False)
    case.g *= 1e-3
    whole = naive.token_loop(case.q, case.k, case.v, case.g, phi=naive.ELU, scale=0.5)
    state = case.start()
    y = case.prefill(state)
    # rounding of a float32 sum grows with its length: 3000 tokens, at most as many half units
    naive.assert_close(y, whole[0], 10 * BOUND)
    naive.assert_close(state.S, whole[1], 10 * BOUND)


def test_feature_maps_agree_with_the_oracles():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((6, 5)), rng.standard_normal((7, 5))
    for name, (theirs, ours) in MAPS.items():
        phi = la.feature_map(theirs) if isinstance(theirs, str) else theirs
        np.testing.assert_allclose(
            phi.kernel(q[:, None], k[None]), ours.kernel(q, k), rtol=1e-12, atol=1e-13, err_msg=name
        )
        assert phi.query(q).shape == (6, phi.dim(5))
        if ours.features:
            np.testing.assert_allclose(phi.key(k), ours.features(k), rtol=1e-14, err_msg=name)


def test_shapes_of_the_grid_are_what_they_say():
    assert {max(h) for h in LAYOUTS.values()} == {2, 3, 4}
    assert feature_width("dpfp3", 4) == 24
    case = make("gated", "channel", T=15)
    assert isinstance(case, Case)
    assert (case.g == -np.inf).any()
    assert (case.g == np.float32(-1e30)).any()
    assert math.isclose(case.g[np.isfinite(case.g) & (case.g > -1e3)].min(), math.log(1e-12), rel_tol=1e-6)

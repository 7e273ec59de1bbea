"""Every feature map in a layer: against the quadratic form with φ in float64, by every way in."""

import numpy as np
import pytest

import linattn_edge as la
import naive
from cases import EVERY, NOJIT, SAMPLES, SERIES, make
from linattn_edge.features import MAPS

pytestmark = pytest.mark.nojit

SINGLE, DOUBLE = 1e-5, 1e-11  # relative RMS error: signed maps lose most, positive ones with a normaliser a tenth of it
POSITIVE = ["elu", "relu", "relu2", "dpfp", "dpfp3", "dpfp sum", "cosformer", "hedgehog", "hedgehog softmax"]
POSITIVE += ["hedgehog joint", "hedgehog heads", "t2r", "t2r heads", "favor", "favor hyperbolic"]
LAYOUTS = ["mha", "gqa", "gva"]
RULES = ["linear", "gated", "gated_delta"]
T = 70 if not NOJIT else 7  # more than a prefill packs at once
START = np.array([11, 0, 2])  # the positions of the first tokens


def test_no_map_is_left_out():
    assert {make(phi=name).maps[0].name for name in SAMPLES} == set(MAPS)


def stream(name, layout, rule, dtype="float32", length=T, **options):
    """A stream of three rows that have seen other numbers of tokens; normalised where the map is positive."""
    return make(
        rule,
        "head",
        layout,
        name,
        B=3,
        T=length,
        V=6,
        normalize=name in POSITIVE and rule != "gated_delta",
        start=name not in SERIES,
        hard=name not in SERIES,
        dtype=np.dtype(dtype),
        position=START,
        **options,
    )


def every_way(case, dtype, bound):
    """A prefill, steps, three prefills, halves of steps, and rows of several lengths."""
    state = case.start(dtype=dtype)
    case.check(case.prefill(state), state, bound, "prefill")
    for quick in (False, True):
        state = case.start(dtype=dtype)
        case.check(case.steps(state, quick=quick), state, bound, "steps")
    length = case.q.shape[1]
    state, a, b = case.start(dtype=dtype), length // 3, length // 3 + 1
    y = [case.prefill(state, part) for part in (slice(0, a), slice(a, b), slice(b, length))]
    case.check(np.concatenate(y, axis=1), state, bound, "split in three")
    state, y = case.start(dtype=dtype), []
    for t in range(length):
        (q, k, v), rest = case.tokens(t)
        case.attn.write(k, v, state, **rest)
        y.append(case.attn.read(q, state))
    case.check(np.stack(y, axis=1), state, bound, "write and read")
    ragged = case.with_(lengths=np.array([length - 1, 0, length // 2]))
    want = ragged.oracle()
    for row, n in enumerate(ragged.lengths):
        for x in (ragged.q, ragged.k, ragged.v):
            x[row, n:] = np.nan
    ragged.expected = want
    state = ragged.start(dtype=dtype)
    ragged.check(ragged.prefill(state, lengths=ragged.lengths), state, bound, "ragged")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", EVERY)
def test_float32(name, rule):
    layout = LAYOUTS[(EVERY.index(name) + RULES.index(rule)) % 3]
    every_way(stream(name, layout, rule), "float32", SINGLE)


@pytest.mark.parametrize("name", EVERY)
def test_float64(name):
    i = EVERY.index(name)
    every_way(stream(name, LAYOUTS[i % 3], RULES[i // 3 % 3], "float64", 12 if not NOJIT else 5), "float64", DOUBLE)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", EVERY)
def test_every_layout(name, layout):
    case = stream(name, layout, "linear", length=5, qk_norm=LAYOUTS.index(layout) == EVERY.index(name) % 3)
    for way in (case.prefill, case.steps):
        state = case.start()
        case.check(way(state), state, SINGLE)


@pytest.mark.parametrize("name", EVERY)
def test_the_reference_backend(name):
    i = EVERY.index(name)
    case = stream(name, LAYOUTS[i % 3], RULES[i // 3 % 3], length=5, backend="reference")
    for way in (case.prefill, case.steps):
        state = case.start()
        case.check(way(state), state, SINGLE)


@pytest.mark.parametrize("name", [name for name in EVERY if name not in SERIES])
def test_decay_of_each_feature(name):
    case = make("gated", "channel", "gqa", name, T=6, start=True)
    for way in (case.prefill, case.steps):
        state = case.start()
        case.check(way(state), state, SINGLE)


@pytest.mark.skipif(NOJIT, reason="interpreted kernels work alone")
@pytest.mark.parametrize("name", EVERY)
def test_two_threads(name):
    case = stream(name, "gva", "gated", length=9)
    many = {n: np.concatenate([getattr(case, n)] * 8) for n in ("q", "k", "g")}
    v = np.tile(case.v, (8, 1, 1, 86))  # large enough to be shared
    y = []
    for threads in (1, 2):
        attn = case.layer(value_dim=v.shape[-1], num_threads=threads)
        state = attn.init_state(24)
        y.append(attn.prefill(many["q"], many["k"], v, state, g=many["g"]))
        assert state.S.nbytes * 9 >= 1 << 20
    np.testing.assert_array_equal(*y)
    np.testing.assert_array_equal(y[0][:3], y[0][-3:])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SAMPLES)
def test_half_states(name, dtype):
    """φ is computed in float32; S is rounded after each step."""
    pytest.importorskip("ml_dtypes")
    case = make("gated", "head", "gqa", name, T=5, hard=False)
    state, exact = case.start(dtype=dtype), case.start()
    want = case.steps(exact).astype(np.float64)
    rounding = {"float16": 2**-10, "bfloat16": 2**-7}[dtype]
    naive.assert_close(case.steps(state), want, 3 * rounding)
    naive.assert_close(np.asarray(state.S, np.float32), exact.S.astype(np.float64), 3 * rounding)


@pytest.mark.parametrize("name", POSITIVE)
def test_positive_maps_give_weighted_means(name):
    """With v = 1 everywhere, a normalised output is 1, and any output is between the smallest and the largest v."""
    case = make("linear", None, "gqa", name, T=12, normalize=True)
    assert case.maps[0].positive
    ones = case.with_(v=np.ones_like(case.v))
    y, want = ones.prefill(ones.start()), ones.expected[0]  # 0 where no key has been similar yet
    np.testing.assert_allclose(y, want, rtol=2e-6)
    assert ((np.abs(want - 1) < 1e-12) | (want == 0)).all()
    assert want.mean() > 0.6
    y = case.prefill(case.start())
    least, most = (np.repeat(f.accumulate(case.v, axis=1), 2, axis=2) for f in (np.minimum, np.maximum))
    assert ((y >= least - 1e-5) | (want == 0)).all()
    assert ((y <= most + 1e-5) | (want == 0)).all()


def test_the_positions_of_other_maps_do_not_matter():
    for name in EVERY:
        if name != "cosformer":
            case = make("linear", None, "gqa", name, T=2)
            state = case.attn.init_state(2)
            state.position = [10**9, 3]
            np.testing.assert_array_equal(case.prefill(state), case.prefill(case.attn.init_state(2)))


def test_the_oracle_is_no_copy_of_the_library():
    """The first token's κ(q, k), entry by entry: the maps' own `kernel` in float64."""
    for name in EVERY:
        case = make("linear", None, "mha", name, B=1, T=1, dtype=np.float64, scale=1.0)
        phi = case.maps[0]
        place = np.zeros((1, 2), int)
        kappa = phi.kernel(case.q[:, 0], case.k[:, 0], place, place)
        np.testing.assert_allclose(case.expected[0][:, 0], kappa[..., None] * case.v[:, 0], rtol=1e-12, err_msg=name)


def test_equal_maps_of_different_objects_share_states():
    for name in EVERY:
        case = make("linear", None, "gqa", name, T=4)
        state = case.start()
        y = case.prefill(state, slice(0, 2), attn=case.layer())
        np.testing.assert_array_equal(y, case.prefill(case.start(), slice(0, 2)))
        case.steps(state, attn=case.layer())
        assert isinstance(case.attn, la.LinearAttention)

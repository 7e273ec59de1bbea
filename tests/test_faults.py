"""Faults that users of similar software reported, one test for each kind: here none of them happens."""

import copy
import gc
import pickle
import sys
import threading
import tracemalloc

import numpy as np
import pytest

import linattn_edge as la
import naive
from cases import EVERY, NOJIT, OF_HEADS, SAMPLES, VARIANTS, make, sample

pytestmark = pytest.mark.nojit
BOUND = 2e-6
SIX = pytest.mark.parametrize(("rule", "gate"), VARIANTS)
BOTH = pytest.mark.parametrize("backend", ["cpu", "reference"])
T = 40 if not NOJIT else 8


# State and streams


@BOTH
@pytest.mark.parametrize("rule", ["linear", "gated"])
def test_normaliser_remembers_earlier_calls(rule, backend):
    case = make(rule, "head", T=T, normalize=True, backend=backend)
    state = case.start()
    y = [case.prefill(state, part) for part in (slice(0, T // 2), slice(T // 2, T - 1), slice(T - 1, T))]
    case.check(np.concatenate(y, axis=1), state, BOUND)


@BOTH
@SIX
def test_block_after_a_filled_state_continues_it(rule, gate, backend):
    case = make(rule, gate, T=T, start=True, backend=backend)
    state = case.start()
    arrays, rest = case.tokens(0)
    first = case.attn.step(*arrays, state, **rest)
    y = case.prefill(state, slice(1, T))
    case.check(np.concatenate([first[:, None], y], axis=1), state, BOUND)


@BOTH
@SIX
def test_padded_token_does_not_decay_the_state(rule, gate, backend):
    case = make(rule, gate, T=T, start=True, normalize=rule == "gated", backend=backend)
    state, longer = case.start(), case.start()
    case.prefill(state, slice(0, 3))
    case.prefill(longer, lengths=[3, 3])
    np.testing.assert_array_equal(longer.S, state.S)
    np.testing.assert_array_equal(longer.position, 3)
    if rule == "gated":
        np.testing.assert_array_equal(longer.z, state.z)
    arrays, rest = case.tokens(5)
    case.attn.step(*arrays, longer, **rest, active=np.zeros(2, bool))
    np.testing.assert_array_equal(longer.S, state.S)


@BOTH
@pytest.mark.parametrize("fill", [0.0, 7.0, np.nan, np.inf])
def test_nothing_of_a_padded_token_enters_the_state(fill, backend):
    """φ(0) is not 0 for elu: masking k before φ would still write."""
    case = make("linear", T=T, normalize=True, backend=backend)
    case.lengths = np.array([T - 5, 2])
    want = case.oracle()
    for row, n in enumerate(case.lengths):
        for a in (case.q, case.k, case.v):
            a[row, n:] = fill
    case.expected = want
    state = case.start()
    case.check(case.prefill(state, lengths=case.lengths), state, BOUND)
    written = case.start()
    case.attn.write(case.k, case.v, written, lengths=case.lengths)
    np.testing.assert_array_equal(written.z, state.z)


@BOTH
@SIX
def test_calls_leave_the_callers_arrays_alone(rule, gate, backend):
    case = make(rule, gate, T=T, start=True, normalize=rule == "linear", qk_norm=True, backend=backend)
    arrays, rest = case.tokens(slice(None))
    arrays = [*arrays, *rest.values(), case.S0, case.z0]
    kept = [a.copy() for a in arrays]
    start = case.start()
    S = start.S.copy()
    options = {"update_rule": rule, "normalize": case.normalize, "qk_norm": True, "backend": backend}
    _, final = la.linear_attention(case.q, case.k, case.v, **rest, **options, initial_state=start)
    np.testing.assert_array_equal(start.S, S)
    np.testing.assert_array_equal(start.position, 0)
    assert not np.array_equal(final.S, S)
    case.prefill(case.start())
    case.attn.read(case.q, start)
    for a, b in zip(arrays, kept, strict=True):
        np.testing.assert_array_equal(a, b)


def test_row_taken_out_of_a_batch_does_not_keep_the_batch_alive():
    attn = la.LinearAttention(2, 16, 64)
    gc.collect()
    tracemalloc.start()
    try:
        big = attn.init_state(400)
        one, also = big.select([3]), big.copy().select(np.arange(400) == 3)
        held = big.nbytes
        del big
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < held / 10
    finally:
        tracemalloc.stop()
    assert one.nbytes == also.nbytes < held / 100


def peak_kib():
    resource = pytest.importorskip("resource")  # not on Windows
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)


def test_steps_leave_no_memory_behind():
    case = make("gated", "head", T=1, B=1, K=8, V=64, normalize=True)
    state = case.start()
    (q, k, v), rest = case.tokens(0)
    out = case.attn.step(q, k, v, state, **rest)

    def run(n):
        for _ in range(n):
            case.attn.step(q, k, v, state, **rest, out=out)
            case.attn.step(q, k, v, state, **rest)

    run(50)
    gc.collect()
    peak = peak_kib()
    tracemalloc.start()
    try:
        run(50)
        before = tracemalloc.get_traced_memory()[0]
        nbytes = state.nbytes
        run(50_000 if not NOJIT else 50)
        assert tracemalloc.get_traced_memory()[0] - before < 2000
        assert state.nbytes == nbytes
    finally:
        tracemalloc.stop()
    assert peak_kib() - peak < 4096
    assert state.position[0] == 201 + 2 * (50_000 if not NOJIT else 50)


@SIX
@pytest.mark.skipif(NOJIT, reason="interpreted loops make objects")
def test_step_with_out_allocates_no_arrays(rule, gate):
    case = make(rule, gate, "gqa", T=1, B=4, K=128, V=256)
    state = case.start()
    arrays, rest = case.tokens(0)
    out = np.empty((4, 4, 256), np.float32)
    case.attn.step(*arrays, state, **rest, out=out)
    tracemalloc.start()
    try:
        case.attn.step(*arrays, state, **rest, out=out)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        case.attn.step(*arrays, state, **rest, out=out)
        peak = tracemalloc.get_traced_memory()[1]
        assert peak - before < 4000  # views and call frames; y has 16384 bytes, q 8192, k 4096
    finally:
        tracemalloc.stop()


def test_new_row_starts_from_nothing():
    case = make("gated", "channel", B=3, T=T, normalize=True)
    fresh = case.start()
    want = case.prefill(fresh)
    used = case.start()
    case.prefill(used)
    used.reset(rows=[1])
    np.testing.assert_array_equal(used.S[0], fresh.S[0])
    assert not used.S[1].any()
    assert not used.z[1].any()
    assert used.position.tolist() == [T, 0, T]
    active = [0, T, 0]
    np.testing.assert_array_equal(case.prefill(used, lengths=active)[1], want[1])
    np.testing.assert_array_equal(used.S, fresh.S)


def test_reused_slot_does_not_leak_the_previous_stream():
    case = make("gated_delta", "head", B=2, T=T)
    state, never_used = case.start(), case.start()
    want = case.prefill(never_used)
    case.prefill(state)
    for rows in (None, [0, 1], np.array([True, True])):
        state.reset(rows)
        assert not state.position.any()
        np.testing.assert_array_equal(case.prefill(state), want)


@SIX
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_restored_stream_continues_where_it_was(rule, gate, dtype, tmp_path):
    """K ≠ V, so that a transposed state can't pass."""
    case = make(rule, gate, "gva", T=T, K=4, V=7, start=True, normalize=rule == "gated")
    whole, state = case.start(dtype=dtype), case.start(dtype=dtype)
    want = case.prefill(whole)
    case.prefill(state, slice(0, T // 2))
    state.save(tmp_path / "state.safetensors")
    restored = la.State.load(tmp_path / "state.safetensors", case.layer())
    np.testing.assert_array_equal(restored.S, state.S)
    np.testing.assert_array_equal(restored.position, T // 2)
    assert restored.S.dtype == dtype
    y = case.prefill(restored, slice(T // 2, T))
    naive.assert_close(y, want[:, T // 2 :].astype(np.float64), BOUND)
    naive.assert_close(restored.S, whole.S.astype(np.float64), BOUND)


@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle", "method"])
def test_copied_stream_continues_where_it_was(how):
    """A copy whose S and positions are no longer what the kernels read would look right and be stale."""
    case = make("gated", "head", T=T, start=True, normalize=True)
    whole, state = case.start(), case.start()
    want = case.prefill(whole)
    case.prefill(state, slice(0, T // 2))
    S = state.S.copy()
    ways = {"deepcopy": copy.deepcopy, "copy": copy.copy, "method": la.State.copy}
    other = ways[how](state) if how in ways else pickle.loads(pickle.dumps(state))
    y = case.prefill(other, slice(T // 2, T))
    naive.assert_close(y, want[:, T // 2 :].astype(np.float64), BOUND)
    naive.assert_close(other.S, whole.S.astype(np.float64), BOUND, "S")
    np.testing.assert_array_equal(other.position, T)
    if how != "copy":  # copy.copy may share, as it does for any object
        np.testing.assert_array_equal(state.S, S)


def test_transposed_state_is_refused():
    case = make("gated", "head", T=3, K=4, V=7)
    S = np.zeros((2, 2, 7, 4), np.float32)
    with pytest.raises(ValueError, match="F, V"):
        la.State.from_arrays(case.attn, S)
    with pytest.raises(ValueError, match="F, V"):
        case.start().S = S


@pytest.mark.parametrize(
    "change",
    [
        {"update_rule": "delta"},
        {"value_dim": 6},
        {"num_heads": 4, "num_kv_heads": 2},
        {"feature_map": "relu"},
        {"qk_norm": True},
        {"scale": 2.0},
    ],
)
def test_state_of_another_layer_is_refused(change, tmp_path):
    sizes = {"num_heads": 2, "key_dim": 4, "value_dim": 5, "normalize": False}
    mine, other = la.LinearAttention(**sizes), la.LinearAttention(**(sizes | change))
    state = mine.init_state(1)
    state.save(tmp_path / "state")
    with pytest.raises(ValueError, match=r"another layer|belongs"):
        la.State.load(tmp_path / "state", other)
    q = np.ones((1, other.layer.H, 4), np.float32)
    with pytest.raises(ValueError, match="another layer"):
        other.read(q, state)


@SIX
def test_beam_reorder_takes_the_whole_state_along(rule, gate):
    case = make(rule, gate, "gqa", B=3, T=T, start=True, normalize=rule == "linear")
    state = case.start()
    case.prefill(state, slice(0, T // 2))
    order = [2, 2, 0, 1]
    beams = state.select(order)
    for name in ("S", "z", "position"):
        if getattr(state, name) is not None:
            np.testing.assert_array_equal(getattr(beams, name), getattr(state, name)[order])
    kept = state.S.copy()
    mine = {n: getattr(case, n)[order] for n in ("q", "k", "v", "g", "beta") if getattr(case, n) is not None}
    y = case.with_(**mine).prefill(beams, slice(T // 2, T))
    np.testing.assert_array_equal(state.S, kept)
    np.testing.assert_array_equal(case.prefill(state, slice(T // 2, T))[order], y)


# Numbers


@BOTH
@pytest.mark.parametrize("x", [-8.0, -18.5, -40.0, -80.0])
def test_elu_keeps_what_adding_one_would_lose(x, backend):
    assert la.Elu()(np.float32([x]))[0] == pytest.approx(np.exp(np.float64(np.float32(x))), rel=1e-6)
    attn = la.LinearAttention(1, 1, 1, normalize=False, scale=1.0, backend=backend)
    state = attn.init_state(1)
    attn.write(np.full((1, 1, 1), x, np.float32), np.ones((1, 1, 1), np.float32), state)
    assert state.S.item() == pytest.approx(np.exp(x), rel=1e-6)


@BOTH
def test_elu_of_bfloat16_inputs_is_not_zero(backend):
    kind = pytest.importorskip("ml_dtypes").bfloat16
    attn = la.LinearAttention(1, 1, 1, backend=backend)
    state = attn.init_state(1)
    x = np.full((1, 1, 1), -8.0, kind)
    assert attn.step(x, x, np.ones((1, 1, 1), kind), state).item() == 1
    assert state.z.item() == pytest.approx(3.3546e-4, rel=1e-4)


@BOTH
def test_float16_sums_do_not_overflow(backend):
    case = make("linear", T=T, K=4, normalize=True, backend=backend)
    case.k = np.full(case.k.shape, 6e4, np.float16)
    case.q, case.v = case.q.astype(np.float16), case.v.astype(np.float16)
    state = case.start()
    y = case.prefill(state)
    naive.assert_close(y, case.expected[0], 2**-11)
    assert state.z.min() > 65504
    naive.assert_close(state.z, case.expected[2], BOUND)


@BOTH
def test_float16_output_that_overflows_is_inf_with_and_without_out(backend):
    case = make("linear", T=4, normalize=False, backend=backend)
    case.q, case.k, case.v = (np.full(a.shape, 200.0, np.float16) for a in (case.q, case.k, case.v))
    out = np.zeros((2, 4, 2, 5), np.float16)
    case.prefill(case.start(), out=out)
    assert np.isposinf(out).all()
    state = case.start()
    np.testing.assert_array_equal(case.prefill(state), out)
    np.testing.assert_array_equal(case.steps(case.start()), out)
    assert np.isfinite(state.S).all()


@BOTH
@SIX
@pytest.mark.parametrize("decay", [1e-12, 1e-20, 1e-38])
def test_vanishing_decays_equal_token_by_token(rule, gate, decay, backend):
    if gate is None:
        rule, gate = "gated", "head"
    length = 64 if not NOJIT else 12
    case = make(rule, gate, "mha", T=length, V=6, start=True, hard=False, backend=backend)
    case.g[...] = np.log(decay)
    case.g[:, ::7] = -0.01
    state, stepped = case.start(), case.start()
    y = case.prefill(state)
    case.check(y, state, BOUND)
    naive.assert_close(case.steps(stepped), y.astype(np.float64), BOUND)


@BOTH
@SIX
def test_empty_segments_give_nothing_and_change_nothing(rule, gate, backend):
    case = make(rule, gate, B=3, T=T, start=True, normalize=rule == "gated", backend=backend)
    state = case.start()
    assert case.prefill(state, slice(0, 0)).shape == (3, 0, 2, 5)
    y = case.prefill(state, lengths=[0, 0, 0])
    assert not y.any()
    np.testing.assert_array_equal(state.S, case.S0)
    y = case.prefill(state, lengths=[0, T, 0])
    assert np.isfinite(y).all()
    np.testing.assert_array_equal(state.S[[0, 2]], case.S0[[0, 2]])
    assert state.position.tolist() == [0, T, 0]


@BOTH
def test_read_of_an_empty_state_is_zero_and_not_nan(backend):
    for normalize in (True, False):
        attn = la.LinearAttention(2, 4, 5, normalize=normalize, backend=backend)
        y = attn.read(np.ones((3, 2, 4), np.float32), attn.init_state(3))
        np.testing.assert_array_equal(y, np.zeros((3, 2, 5)))


ONE_HEAD = [name for name in EVERY if name not in OF_HEADS]


@pytest.mark.parametrize("name", ONE_HEAD)
def test_feature_map_looks_at_one_token_only(name):
    """A map that scales by a maximum over the sequence is no stream."""
    phi = sample(name)
    x = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    x[4] *= min(1e4, phi.limit(4, 3e38) / 2) / np.linalg.norm(x[4])
    place = np.arange(6)
    for side in (phi.query, phi.key):
        alone = np.stack([side(row, i) for row, i in zip(x, place, strict=True)])
        size = np.abs(alone).max(axis=1, keepdims=True)
        assert (np.abs(side(x, place) - alone) <= 1e-4 * size).all()  # matrix products round as they like


@pytest.mark.parametrize("name", SAMPLES)
def test_feature_map_is_the_same_in_every_call_and_every_layer(name, tmp_path):
    x = np.random.default_rng(1).standard_normal((5, 4)).astype(np.float32)
    phi, place = sample(name), np.arange(5)
    np.testing.assert_array_equal(phi.key(x, place), phi.key(x, place))
    np.testing.assert_array_equal(phi.key(x, place), sample(name).key(x, place))
    attn = la.LinearAttention(2, 4, 3, feature_map=phi)
    attn.save(tmp_path / "layer")
    again = la.LinearAttention.load(tmp_path / "layer")
    q, v = np.ones((1, 2, 4), np.float32), np.ones((1, 2, 3), np.float32)
    state, other = attn.init_state(1), again.init_state(1)
    for _ in range(3):
        np.testing.assert_array_equal(attn.step(q, q, v, state), again.step(q, q, v, other))
    again.read(q, state)  # the same configuration: one layer's states fit the other


@BOTH
@SIX
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_inf_are_seen_and_nothing_changes(rule, gate, bad, backend):
    """fastmath that assumes no NaN compiles the question away."""
    case = make(rule, gate, "gqa", T=9, K=4, V=9, start=True, normalize=rule == "gated", backend=backend)
    arrays, rest = case.tokens(slice(None))
    whole = dict(zip("qkv", arrays, strict=True)) | rest
    for name, a in whole.items():
        if name == "g" and bad == -np.inf:
            continue  # a hard reset
        for place in {0, a[0, 0].size - 1}:
            spoiled = whole | {name: a.copy()}
            spoiled[name][1, 8].reshape(-1)[place] = bad
            state = case.start()
            with pytest.raises(ValueError, match=rf"^{name}:"):
                case.attn.prefill(spoiled["q"], spoiled["k"], spoiled["v"], state, **{n: spoiled[n] for n in rest})
            one = {n: x[:, 8] for n, x in spoiled.items()}
            with pytest.raises(ValueError, match=rf"^{name}:"):
                case.attn.step(one["q"], one["k"], one["v"], state, **{n: one[n] for n in rest})
            np.testing.assert_array_equal(state.S, case.S0)
            np.testing.assert_array_equal(state.position, 0)


@BOTH
def test_nan_let_through_stays_in_its_row(backend):
    case = make("gated", "head", B=3, T=5, normalize=True, check_finite=False, backend=backend)
    want = case.prefill(case.start())
    case.v[1, 2, 0, 3] = np.nan
    state = case.start()
    y = case.prefill(state)
    assert np.isnan(y[1, 2:, 0, 3]).any()
    np.testing.assert_array_equal(y[[0, 2]], want[[0, 2]])
    assert np.isfinite(state.S[[0, 2]]).all()


def test_check_finite_is_the_layers_and_not_the_states():
    strict, loose = la.LinearAttention(1, 2, 2), la.LinearAttention(1, 2, 2, check_finite=False)
    good, bad = np.ones((1, 1, 2), np.float32), np.full((1, 1, 2), np.nan, np.float32)
    state = loose.init_state(1)
    with pytest.raises(ValueError, match="v:"):
        strict.step(good, good, bad, state)
    state = strict.init_state(1)
    loose.step(good, good, bad, state)
    assert np.isnan(state.S).any()


@pytest.mark.parametrize("name", ONE_HEAD)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_feature_maps_keep_their_precision(name, dtype):
    """A literal such as 1.0 must not turn float32 into float64, nor float64 into less."""
    phi, place = sample(name), np.arange(3)
    x = np.random.default_rng(2).standard_normal((3, 4)).astype(dtype)
    expected = np.float64 if dtype == np.float64 else np.float32
    for got in (phi.query(x, place), phi.key(x, place), phi(x, place), phi.kernel(x, x, place, place)):
        assert got.dtype == expected


def test_out_of_a_step_may_not_overlap_the_state_or_an_input():
    attn = la.LinearAttention(2, 8, 8)  # V = 8: no padding, so a row block of S is contiguous
    state = attn.init_state(2)
    state.S[...] = 1.0
    q, k, v = (np.ones((2, 2, 8), np.float32) for _ in range(3))
    inside = state.S[0, 0, :4].reshape(2, 2, 8)
    assert np.shares_memory(inside, state.S)
    for out in (inside, q, k, v):
        with pytest.raises(ValueError, match="out"):
            attn.step(q, k, v, state, out=out)
        assert (state.S == 1).all()
        assert not state.position.any()


def test_eight_threads_with_eight_states_get_what_one_thread_gets():
    cases = [make(*VARIANTS[i % 6], "gva", T=T, B=1 + i % 3, start=True) for i in range(8)]
    repeats = 20 if not NOJIT else 1
    want = [c.steps(c.start()) for c in cases]
    shared = [c.layer() for c in cases]
    shared[6], shared[7] = shared[0], shared[1]  # one layer may serve several states at once
    got = [[] for _ in cases]
    gate = threading.Barrier(8)

    def work(i):
        gate.wait()
        for _ in range(repeats):
            got[i].append(cases[i].steps(cases[i].start(shared[i]), attn=shared[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, expected in zip(got, want, strict=True):
        assert len(mine) == repeats
        for y in mine:
            np.testing.assert_array_equal(y, expected)

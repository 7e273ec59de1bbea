"""States that merge, tokens that are taken out again, and prefills in pieces."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import linattn_edge as la
import naive
from cases import LAYOUTS, NOJIT, POSITIVE, make, sample
from linattn_edge.errors import NotFiniteError, ShapeError, StateMismatchError

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=10 if NOJIT else 60)
SUMS = [("linear", None), ("gated", "head"), ("gated", "channel")]


@st.composite
def sums(draw):
    """A stream of a rule whose states merge, hard decays and -inf included."""
    rule, gate = draw(st.sampled_from(SUMS))
    phi = draw(st.sampled_from([*POSITIVE, "identity", "cosformer"]))
    return make(
        rule, gate, draw(st.sampled_from(list(LAYOUTS))), phi, B=draw(st.integers(1, 3)),
        T=draw(st.integers(1, 6 if NOJIT else 40)), K=draw(st.integers(1, 5)), V=draw(st.integers(1, 9)),
        normalize=phi in POSITIVE and draw(st.booleans()), start=draw(st.booleans()),
        backend=draw(st.sampled_from(["cpu", "cpu", "reference"])),
    )  # fmt: skip


def written(case, part, start):
    """A state of its own for the tokens of a part."""
    B = len(case.q)
    state = case.attn.init_state(B, track_decay=True, position=start)
    (_, k, v), rest = case.tokens(part)
    case.attn.write(k, v, state, **rest)
    return state


@pytest.mark.nojit
@given(case=sums(), data=st.data())
@EXAMPLES
def test_parts_merge_to_the_whole(case, data):
    T = case.q.shape[1]
    a, b = sorted(data.draw(st.lists(st.integers(0, T), min_size=2, max_size=2), label="cuts"))
    first = case.start()
    case.prefill(first, slice(0, a))
    middle, last = written(case, slice(a, b), a), written(case, slice(b, T), b)
    kept = first.S.copy(), middle.S.copy(), last.S.copy()
    for whole in (la.merge(la.merge(first, middle), last), la.merge(first, la.merge(middle, last))):
        _, S, z = case.expected
        naive.assert_close(whole.S, S, 2e-6, "S")
        if z is not None:
            naive.assert_close(whole.z, z, 2e-6, "z")
        assert whole.position.tolist() == [T] * len(case.q)
    for state, S in zip((first, middle, last), kept, strict=True):
        np.testing.assert_array_equal(state.S, S)


@pytest.mark.nojit
def test_padded_tokens_do_not_count():
    case = make("gated", "head", B=3, T=9, normalize=True)
    lengths = np.array([9, 0, 4])
    cut = [5, 0, 1]
    (q, k, v), rest = case.tokens(slice(None))
    a, b = (case.attn.init_state(3, track_decay=True) for _ in range(2))
    case.attn.prefill(q, k, v, a, **rest, lengths=cut)
    later = [np.stack([np.roll(row, -n, axis=0) for row, n in zip(x, cut, strict=True)]) for x in (k, v, rest["g"])]
    for x in later:
        x[1] = np.nan
    case.attn.write(later[0], later[1], b, later[2], lengths=lengths - cut)
    whole = la.merge(a, b)
    _, S, z = case.oracle(lengths=lengths)
    naive.assert_close(whole.S, S, 2e-6)
    naive.assert_close(whole.z, z, 2e-6)
    assert whole.position.tolist() == lengths.tolist()
    g = rest["g"].astype(np.float64)
    want = [g[row, :n].sum(axis=0) for row, n in enumerate(lengths)]
    np.testing.assert_allclose(whole.log_decay[..., 0], want)


@pytest.mark.nojit
def test_a_constant_decay_needs_no_tracking():
    attn = la.LinearAttention(2, 4, update_rule="gated", decay=[-0.1, -np.inf])
    x = np.random.default_rng(0).standard_normal((3, 1, 7, 2, 4)).astype(np.float32)
    whole, a, b = (attn.init_state() for _ in range(3))
    attn.prefill(*x, whole)
    attn.prefill(*x[:, :, :3], a)
    attn.prefill(*x[:, :, 3:], b)
    assert b.log_decay[0, :, 0].tolist() == [pytest.approx(-0.4), -np.inf]
    np.testing.assert_allclose(la.merge(a, b).S, whole.S, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(la.merge(a, attn.init_state()).S, a.S)


@pytest.mark.nojit
@pytest.mark.parametrize("way", ["copy", "pickle", "save", "select", "reset"])
def test_what_a_merge_needs_to_know_is_kept(way, tmp_path):
    attn = la.LinearAttention(2, 4, update_rule="gated")
    k, v = np.random.default_rng(0).standard_normal((2, 1, 7, 2, 4)).astype(np.float32)
    a, b = attn.init_state(), attn.init_state(track_decay=True)
    attn.write(k, v, a, g=np.full((1, 7, 2), -0.1))
    if way == "reset":
        attn.write(k, v, b, g=np.full((1, 7, 2), -0.3))
        b.reset()
    attn.write(k, v, b, g=np.full((1, 7, 2), -0.2))
    want = la.merge(a, b)
    if way == "copy":
        b = b.copy()
    elif way == "pickle":
        b = pickle.loads(pickle.dumps(b))
    elif way == "save":
        b.save(tmp_path / "state")
        b = la.State.load(tmp_path / "state", attn)
    elif way == "select":
        b = b.select([0])
    np.testing.assert_allclose(b.log_decay, -1.4, rtol=1e-6)
    np.testing.assert_array_equal(la.merge(a, b).S, want.S)


@pytest.mark.nojit
def test_merges_that_are_refused():
    gated = la.LinearAttention(2, 4, update_rule="gated")
    a, b = gated.init_state(2), gated.init_state(2, track_decay=True)
    with pytest.raises(StateMismatchError, match="track_decay"):
        la.merge(b, a)
    b.S = np.ones(b.S.shape)
    with pytest.raises(StateMismatchError, match=r"b: stream 0 .* began empty"):
        la.merge(a, b)
    b.reset(rows=[0])
    with pytest.raises(StateMismatchError, match="b: stream 1"):
        la.merge(a, b)
    with pytest.raises(StateMismatchError, match="expected a State, got list"):
        la.merge(a, [])
    with pytest.raises(StateMismatchError, match="num_heads"):
        la.merge(a, la.LinearAttention(1, 4, update_rule="gated").init_state(2))
    with pytest.raises(ShapeError, match="expected 2 streams"):
        la.merge(a, gated.init_state(1, track_decay=True))
    with pytest.raises(StateMismatchError, match=r"float32 .* float64"):
        la.merge(a, gated.init_state(2, "float64", track_decay=True))
    delta = la.LinearAttention(2, 4, feature_map="identity", update_rule="delta").init_state()
    with pytest.raises(StateMismatchError, match="'delta' writes what a value differs"):
        la.merge(delta, delta)
    placed = la.LinearAttention(2, 4, feature_map=la.CosFormer(max_len=9))
    with pytest.raises(StateMismatchError, match=r"init_state\(position=a.position\)"):
        la.merge(placed.init_state(position=3), placed.init_state(position=2))
    assert la.merge(placed.init_state(position=3), placed.init_state(position=3)).position.tolist() == [3]
    moved = placed.init_state()
    moved.position = 1
    with pytest.raises(StateMismatchError, match="assigned"):
        la.merge(placed.init_state(position=1), moved)
    with pytest.raises(ValueError, match="track_decay"):
        gated.init_state(track_decay=1)


@pytest.mark.nojit
@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("phi", ["elu", "cosformer", "taylor"])
def test_a_window_of_the_last_tokens(phi, backend):
    case = make("linear", phi=phi, B=2, T=12, normalize=phi == "elu")
    window = 4
    attn = case.layer(backend=backend)
    state = attn.init_state(2, "float64")
    for t in range(12):
        (q, k, v), _ = case.tokens(t)
        y = attn.step(q, k, v, state)
        if t >= window:
            old = case.tokens(t - window)[0]
            attn.remove(old[1], old[2], state, position=t - window)
            y = attn.read(q, state)
        first = max(0, t - window + 1)
        part = case.with_(**{n: getattr(case, n)[:, first : t + 1] for n in "qkv"}, position=first)
        naive.assert_close(y, part.expected[0][:, -1], 1e-6)
    assert state.position.tolist() == [12, 12]


@pytest.mark.nojit
def test_removing_is_refused_with_the_state_as_it_was():
    for rule in ("gated", "delta", "gated_delta"):
        attn = la.LinearAttention(1, 4, feature_map="identity", update_rule=rule)
        with pytest.raises(ValueError, match="plain sum"):
            attn.remove(np.ones((1, 1, 4)), np.ones((1, 1, 4)), attn.init_state())
    attn = la.LinearAttention(1, 4, feature_map=sample("cosformer"))
    state = attn.init_state()
    k = np.ones((1, 3, 1, 4), np.float32)
    attn.write(k, k, state)
    with pytest.raises(ValueError, match="position"):
        attn.remove(k[:, 0], k[:, 0], state)
    before = state.S.copy()
    with pytest.raises(NotFiniteError):
        attn.remove(np.full((1, 1, 4), np.nan), k[:, 0], state, position=0)
    np.testing.assert_array_equal(state.S, before)
    assert state.position.tolist() == [3]
    attn.remove(k[:, :2], k[:, :2], state, position=0)
    assert la.merge(attn.init_state(), state).position.tolist() == [3]


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize(("rule", "gate"), SUMS)
@pytest.mark.parametrize("phi", ["elu", "cosformer"])
def test_threads_answer_as_one(rule, gate, phi, threads, monkeypatch):
    monkeypatch.setattr("linattn_edge.pieces.SHORTEST", 7)
    case = make(rule, gate, "gqa", phi, B=2, T=71, normalize=phi == "elu", start=True)
    (q, k, v), rest = case.tokens(slice(None))
    for B in (1, 2):
        g = {name: x[:B] for name, x in rest.items()}
        state = case.start().select(range(B))
        y = la.parallel_prefill(case.attn, q[:B], k[:B], v[:B], state, **g, num_threads=threads)
        want, S, z = case.expected
        naive.assert_close(y, want[:B], 2e-6)
        naive.assert_close(state.S, S[:B], 2e-6)
        if z is not None:
            naive.assert_close(state.z, z[:B], 2e-6)
        assert state.position.tolist() == [71] * B
        out = np.empty_like(y)
        again = case.start().select(range(B))
        assert la.parallel_prefill(case.attn, q[:B], k[:B], v[:B], again, **g, num_threads=threads, out=out) is out
        np.testing.assert_array_equal(out, y)


def test_a_parallel_prefill_that_is_refused_changes_nothing(monkeypatch):
    monkeypatch.setattr("linattn_edge.pieces.SHORTEST", 4)
    case = make("gated", "head", B=1, T=40, hard=False)
    (q, k, v), rest = case.tokens(slice(None))
    state = case.start()
    late = v.copy()
    late[0, 33] = np.nan
    with pytest.raises(NotFiniteError, match="token 33"):
        la.parallel_prefill(case.attn, q, k, late, state, **rest)
    with pytest.raises(ShapeError, match="v"):
        la.parallel_prefill(case.attn, q, k, v[:, :39], state, **rest)
    with pytest.raises(ValueError, match="g"):
        la.parallel_prefill(case.attn, q, k, v, state)
    assert state.position.tolist() == [0]
    np.testing.assert_array_equal(state.S, 0)
    tracked = case.attn.init_state(track_decay=True)
    la.parallel_prefill(case.attn, q, k, v, tracked, **rest)
    np.testing.assert_allclose(tracked.log_decay[..., 0], rest["g"].astype(np.float64).sum(axis=1))

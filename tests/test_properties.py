"""What holds for every stream, whatever the rule, the sizes and the numbers."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import naive
from cases import LAYOUTS, NOJIT, POSITIVE, VARIANTS, make

pytestmark = pytest.mark.nojit
BOUND = 2e-6
EXAMPLES = settings(deadline=None, derandomize=True, max_examples=12 if NOJIT else 60)


@st.composite
def streams(draw, longest=6 if NOJIT else 40):
    """A layer and its tokens, hard decays and a random start included."""
    rule, gate = draw(st.sampled_from(VARIANTS))
    phi = draw(st.sampled_from([*POSITIVE, "identity"]))
    options = {"backend": draw(st.sampled_from(["cpu", "cpu", "reference"]))}
    return make(
        rule,
        gate,
        draw(st.sampled_from(list(LAYOUTS))),
        phi,
        B=draw(st.integers(1, 3)),
        T=draw(st.integers(1, longest)),
        K=draw(st.integers(1, 5)),
        V=draw(st.integers(1, 9)),
        normalize=phi in POSITIVE and rule in ("linear", "gated") and draw(st.booleans()),
        start=draw(st.booleans()),
        **options,
    )


def poison(case, after, seed):
    """The same stream with other tokens from `after` on, large ones among them."""
    rng = np.random.default_rng(seed)
    changed = {}
    for name in ("q", "k", "v", "g", "beta"):
        a = getattr(case, name)
        if a is not None:
            a = a.copy()
            a[:, after:] = (
                -np.abs(rng.standard_normal(a[:, after:].shape)) if name == "g" else 1e3 * rng.standard_normal()
            )
            changed[name] = a
    return case.with_(**changed)


@given(case=streams(), data=st.data())
@EXAMPLES
def test_future_tokens_never_change_past_outputs(case, data):
    T = case.q.shape[1]
    t = data.draw(st.integers(0, T), label="known tokens")
    y = case.prefill(case.start())[:, :t]
    np.testing.assert_array_equal(poison(case, t, 1).prefill(case.start())[:, :t], y)
    short = case.prefill(case.start(), slice(0, t))
    naive.assert_close(short, y.astype(np.float64), BOUND)


@given(case=streams())
@EXAMPLES
def test_writes_need_no_query(case):
    stepped, written, blocks = case.start(), case.start(), case.start()
    y = case.steps(stepped)
    for t in range(case.q.shape[1]):
        (q, k, v), rest = case.tokens(t)
        case.attn.write(k, v, written, **rest)
        before = written.S.copy()
        naive.assert_close(case.attn.read(q, written), y[:, t].astype(np.float64), BOUND)
        np.testing.assert_array_equal(written.S, before)
    (_, k, v), rest = case.tokens(slice(None))
    case.attn.write(k, v, blocks, **rest)
    for other in (written, blocks):
        naive.assert_close(other.S, stepped.S.astype(np.float64), BOUND, "S")
        np.testing.assert_array_equal(other.position, stepped.position)


@given(case=streams(), data=st.data())
@EXAMPLES
def test_any_split_is_the_same_stream(case, data):
    T = case.q.shape[1]
    cuts = sorted(data.draw(st.lists(st.integers(0, T), max_size=4), label="cuts"))
    edges = [0, *cuts, T]  # equal neighbours give an empty block
    state = case.start()
    parts = [case.prefill(state, slice(a, b)) for a, b in pairwise(edges)]
    case.check(np.concatenate(parts, axis=1), state, BOUND)


@given(case=streams())
@EXAMPLES
def test_rows_do_not_know_of_each_other(case):
    state = case.start()
    y = case.prefill(state)
    for row in range(len(case.q)):
        names = ("q", "k", "v", "g", "beta", "S0", "z0")
        mine = {n: getattr(case, n)[row : row + 1] for n in names if getattr(case, n) is not None}
        alone = case.with_(**mine)
        other = alone.start()
        np.testing.assert_array_equal(alone.prefill(other), y[row : row + 1])
        np.testing.assert_array_equal(other.S, state.S[row : row + 1])


@given(case=streams(), data=st.data())
@EXAMPLES
def test_an_inactive_row_is_as_if_the_call_had_not_been(case, data):
    B = len(case.q)
    active = np.array(data.draw(st.lists(st.booleans(), min_size=B, max_size=B), label="active"))
    state, all_rows = case.start(), case.start()
    arrays, rest = case.tokens(0)
    y = case.attn.step(*arrays, state, **rest, active=active)
    want = case.attn.step(*arrays, all_rows, **rest)
    before = case.start()
    np.testing.assert_array_equal(state.S[~active], before.S[~active])
    np.testing.assert_array_equal(y[~active], 0)
    np.testing.assert_array_equal(state.position, active)
    naive.assert_close(y[active], want[active].astype(np.float64), BOUND)
    naive.assert_close(state.S[active], all_rows.S[active].astype(np.float64), BOUND, "S")
    if case.normalize:
        np.testing.assert_array_equal(state.z[~active], before.z[~active])


@given(case=streams(), data=st.data())
@EXAMPLES
def test_a_padded_row_ends_as_the_short_row_does(case, data):
    B, T = case.q.shape[:2]
    lengths = np.array(data.draw(st.lists(st.integers(0, T), min_size=B, max_size=B), label="lengths"))
    padded = case.with_(lengths=lengths)
    state = case.start()
    padded.check(case.prefill(state, lengths=lengths), state, BOUND)


@given(case=streams(), data=st.data())
@EXAMPLES
def test_select_then_continue_is_continue_then_select(case, data):
    T, B = case.q.shape[1], len(case.q)
    rows = data.draw(st.lists(st.integers(0, B - 1), max_size=5), label="rows")
    state = case.start()
    case.prefill(state, slice(0, T // 2))
    chosen = state.select(rows)
    rest = slice(T // 2, T)
    y = case.prefill(state, rest)
    mine = {n: getattr(case, n)[rows] for n in ("q", "k", "v", "g", "beta") if getattr(case, n) is not None}
    np.testing.assert_array_equal(case.with_(**mine).prefill(chosen, rest), y[rows])
    np.testing.assert_array_equal(chosen.S, state.S[rows])
    np.testing.assert_array_equal(chosen.position, state.position[rows])

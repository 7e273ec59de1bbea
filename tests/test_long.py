"""init_state(compensated=True): sums over very many tokens that keep the precision of float32."""

import copy
import json
import pickle
from pathlib import Path

import numpy as np
import pytest

import linattn_edge as la
import naive
from cases import LAYOUTS, NOJIT, make
from linattn_edge.errors import DtypeError, StateMismatchError

TABLE = Path(__file__).parents[1] / "benchmarks" / "results" / "long_streams.json"


@pytest.mark.nojit
@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize(("phi", "normalize"), [("elu", True), ("identity", False), ("cosformer", False)])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_same_attention(layout, phi, normalize, backend):
    T = 7 if NOJIT else 70
    case = make("linear", None, layout, phi, B=2, T=T, V=9, normalize=normalize)
    attn = case.layer(backend=backend)
    for lengths in (None, np.array([T, T - 3])):
        state = attn.init_state(2, compensated=True)
        (q, k, v), _ = case.tokens(slice(None))
        y = attn.prefill(q, k, v, state, lengths=lengths)
        want, S, z = case.oracle(lengths=lengths)
        naive.assert_close(y, want, 2e-6)
        naive.assert_close(state.S, S, 2e-6)
        if normalize:
            naive.assert_close(state.z, z, 2e-6)
    steps, halves = (attn.init_state(2, compensated=True) for _ in range(2))
    for t in range(T):
        stepped = attn.step(q[:, t], k[:, t], v[:, t], steps, active=t < lengths)
        rtol, atol = (0, 0) if backend == "cpu" else (1e-5, 1e-6)
        np.testing.assert_allclose(stepped, y[:, t], rtol=rtol, atol=atol)
    attn.write(k, v, halves, lengths=lengths)
    for other in (steps, halves):
        for mine, theirs in zip(other._parts(), state._parts(), strict=True):
            if backend == "cpu":
                np.testing.assert_array_equal(mine, theirs)
        naive.assert_close(other.S, S, 2e-6)
    np.testing.assert_allclose(attn.read(q[:, T - 4], state)[0], attn.read(q[:, T - 4], steps)[0])
    naive.assert_close(attn.read(q[:, -1], state)[:1], want[:1, -1], 2e-6)


@pytest.mark.parametrize("width", [4, 40, 64])
def test_a_wider_state_and_threads(width):
    one, two = (la.LinearAttention(32, 64, width, num_threads=n) for n in (1, 2))
    q, k = np.random.default_rng(0).standard_normal((2, 2, 40, 32, 64)).astype(np.float32)
    v = np.random.default_rng(1).standard_normal((2, 40, 32, width)).astype(np.float32)
    a, b, plain = one.init_state(2, compensated=True), two.init_state(2, compensated=True), one.init_state(2)
    y = one.prefill(q, k, v, a)
    np.testing.assert_array_equal(two.prefill(q, k, v, b), y)
    np.testing.assert_allclose(y, one.prefill(q, k, v, plain), rtol=1e-4, atol=1e-5)


@pytest.mark.nojit
@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle", "save", "select", "merge"])
def test_both_parts_are_kept(way, tmp_path):
    attn = la.LinearAttention(2, 4)
    k, v = np.random.default_rng(0).standard_normal((2, 3, 40, 2, 4)).astype(np.float32)
    state = attn.init_state(3, compensated=True)
    attn.write(1000 * k, 1000 * v, state)
    attn.write(k, v, state)
    exact = state._exact()
    other = state
    if way == "copy":
        other = state.copy()
    elif way == "deepcopy":
        other = copy.deepcopy(state)
    elif way == "pickle":
        other = pickle.loads(pickle.dumps(state))
    elif way == "save":
        state.save(tmp_path / "s")
        other = la.State.load(tmp_path / "s", attn)
    elif way == "select":
        other = state.select([0, 1, 2])
    elif way == "merge":
        other = la.merge(attn.init_state(3, compensated=True), state)
    for got, want in zip(other._exact(), exact, strict=True):
        np.testing.assert_array_equal(got, want)
    assert other.nbytes == state.nbytes == 2 * (state.S.nbytes + state.z.nbytes) + 24
    np.testing.assert_allclose(attn.read(k[:, 0], other), attn.read(k[:, 0], state), rtol=1e-6)
    other.reset([1])
    np.testing.assert_array_equal(other.S[1], 0)
    assert other.S[0].any()


@pytest.mark.nojit
def test_what_is_shown_and_assigned():
    attn = la.LinearAttention(1, 2)
    state = attn.init_state(compensated=True)
    big = np.full((1, 1, 2, 2), 1e8) + 0.125
    state.S, state.z = big, big[..., 0]
    np.testing.assert_array_equal(state._exact()[0], big)
    np.testing.assert_array_equal(state._exact()[1], big[..., 0])
    assert state.S.dtype == np.float32
    with pytest.raises(ValueError, match="read-only"):
        state.S[...] = 0
    with pytest.raises(ValueError, match="read-only"):
        state.z[...] = 0
    attn.remove(np.zeros((1, 1, 2)), np.ones((1, 1, 2)), state)
    np.testing.assert_array_equal(state._exact()[0], big - 1)


@pytest.mark.nojit
def test_what_is_refused():
    for rule in ("gated", "delta", "gated_delta"):
        with pytest.raises(ValueError, match="only 'linear' needs it"):
            la.LinearAttention(1, 4, feature_map="identity", update_rule=rule).init_state(compensated=True)
    attn = la.LinearAttention(1, 4)
    with pytest.raises(DtypeError, match="float64"):
        attn.init_state(dtype="float64", compensated=True)
    with pytest.raises(ValueError, match="compensated"):
        attn.init_state(compensated=1)
    with pytest.raises(StateMismatchError, match="compensated"):
        la.merge(attn.init_state(compensated=True), attn.init_state())


def long_stream(tokens, chunk=1 << 18):
    """Errors of S, z and y, of a plain and a compensated state, after so many tokens: a chunk of them, repeated."""
    attn = la.LinearAttention(1, 4)
    rng = np.random.default_rng(0)
    k = rng.standard_normal((1, chunk, 1, 4)).astype(np.float32)
    v = rng.random((1, chunk, 1, 4)).astype(np.float32)
    q = rng.standard_normal((1, 1, 4)).astype(np.float32)
    states = {"plain": attn.init_state(), "compensated": attn.init_state(compensated=True)}
    phi = naive.ELU.features
    f = phi(k[0, :, 0].astype(np.float64))
    S, z = f.T @ v[0, :, 0].astype(np.float64), f.sum(axis=0)
    fq = phi(q[0, 0].astype(np.float64))
    y = fq @ S / (fq @ z)
    rounds = -(-tokens // chunk)
    errors = {}
    for name, state in states.items():
        for _ in range(rounds):
            attn.write(k, v, state)
        assert state.position.tolist() == [rounds * chunk]
        errors[name] = {
            "S": float(np.abs(state.S[0, 0] / (rounds * S) - 1).max()),
            "z": float(np.abs(state.z[0, 0] / (rounds * z) - 1).max()),
            "y": float(np.abs(attn.read(q, state)[0, 0] / y - 1).max()),
        }
    return rounds * chunk, errors


def test_two_million_tokens():
    _, errors = long_stream(2_000_000)
    assert max(errors["compensated"].values()) < 3e-7
    assert errors["plain"]["S"] > 1e-5


@pytest.mark.slow
def test_a_hundred_million_tokens():
    tokens, errors = long_stream(100_000_000)
    assert max(errors["compensated"].values()) < 1e-6
    assert errors["plain"]["S"] > 1e-2
    known = json.loads(TABLE.read_text())["rows"][-1]
    assert known["tokens"] == tokens
    for name, row in errors.items():
        for what, error in row.items():
            assert error < 3 * known[name][what] + 1e-7, (name, what)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0.1, 1 / 3, 0.7])
def test_the_same_token_a_hundred_million_times(number):
    """What rounds the same way each time."""
    attn = la.LinearAttention(1, 4, feature_map="identity")
    x = np.full((1, 1 << 20, 1, 4), number, np.float32)
    state = attn.init_state(compensated=True)
    for _ in range(96):
        attn.write(x, x, state)
    np.testing.assert_allclose(state.S, (96 << 20) * np.float64(x[0, 0, 0, 0]) ** 2, rtol=1e-6)

"""StreamPool: many streams at once, each of them as if it were alone."""

import contextlib
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import linattn_edge as la
from cases import NOJIT, sample
from linattn_edge.errors import (
    DtypeError,
    NotFiniteError,
    PoolFullError,
    ShapeError,
    SnapshotError,
    StaleStreamError,
    StateMismatchError,
    StreamError,
)
from linattn_edge.kernels import layout

H, D = 2, 4
RULES = ("linear", "gated", "delta", "gated_delta")


def layer(name="gated_delta", **options):
    phi = {"feature_map": "identity", "qk_norm": True} if "delta" in name else {}
    return la.LinearAttention(H, D, 5, update_rule=name, **(phi | options))


def tokens(attn, B, T=None, seed=0, channels=False):
    """Inputs by name, for B streams."""
    rng = np.random.default_rng(seed)
    lead = (B,) if T is None else (B, T)
    L = attn.layer
    given = {
        name: rng.standard_normal((*lead, heads, width)).astype(np.float32)
        for name, heads, width in (("q", L.H, L.K), ("k", L.HK, L.K), ("v", L.N, L.V))
    }
    if L.rule.decay and L.decay is None:
        shape = (*lead, L.N, L.F) if channels else (*lead, L.N)
        given["g"] = -rng.random(shape).astype(np.float32)
    if L.rule.beta:
        given["beta"] = rng.random((*lead, L.N)).astype(np.float32)
    return given


def row(given, i):
    return {name: a[i : i + 1] for name, a in given.items()}


def same(pool, id_, state):
    got = pool.state(id_)
    for mine, theirs in zip(got._parts(), state._parts(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    np.testing.assert_array_equal(got.position, state.position)


@pytest.mark.nojit
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("channels", [False, True])
def test_any_streams_in_any_order(name, channels):
    attn = layer(name)
    pool = la.StreamPool(attn, 3, 12)
    alone = {pool.open(): attn.init_state() for _ in range(9)}  # the slab has grown twice
    rng = np.random.default_rng(1)
    for turn in range(12):
        ids = rng.permutation(list(alone))[: rng.integers(0, 10)]
        T = None if turn % 3 else int(rng.integers(0, 6))
        given = tokens(attn, len(ids), T, turn, channels)
        if T is None:
            y = pool.step(ids, **given)
        else:
            lengths = rng.integers(0, T + 1, len(ids))
            y = pool.prefill(ids, **given, lengths=lengths)
        assert y.shape[0] == len(ids)
        for i, id_ in enumerate(ids):
            mine = row(given, i)
            if T is None:
                want = attn.step(**mine, state=alone[id_])
            else:
                want = attn.prefill(**mine, state=alone[id_], lengths=lengths[i : i + 1])
            np.testing.assert_array_equal(y[i], want[0])
    for id_, state in alone.items():
        same(pool, id_, state)
    assert sorted(pool) == sorted(alone)


@pytest.mark.nojit
@pytest.mark.parametrize(
    "options",
    [
        {"decay": [-0.1, -0.5]},
        {"num_kv_heads": 1},
        {"num_value_heads": 4},
        {"feature_map": "cosformer"},
        {"feature_map": "function"},
        {"feature_map": "taylor"},
        {"normalize": True},
        {"check_finite": False},
    ],
    ids=str,
)
def test_layers_of_every_kind(options):
    if isinstance(options.get("feature_map"), str) and options["feature_map"] in ("cosformer", "function"):
        options = options | {"feature_map": sample(options["feature_map"])}
    attn = layer("gated", **options)
    pool = la.StreamPool(attn, 2)
    ids, states = [pool.open(), pool.open()], attn.init_state(2)
    for turn in range(3):
        given = tokens(attn, 2, None, turn)
        np.testing.assert_array_equal(pool.step(ids, **given), attn.step(**given, state=states))
        given = tokens(attn, 2, 3, turn)
        np.testing.assert_array_equal(pool.prefill(ids, **given), attn.prefill(**given, state=states))
        for i, id_ in enumerate(ids):
            same(pool, id_, states.select([i]))
    pool.checkpoint(ids[0])
    for turn in range(3):
        pool.step(ids[:1], **tokens(attn, 1, None, turn))
    pool.rollback(ids[0], 3)
    same(pool, ids[0], states.select([0]))


@pytest.mark.nojit
@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_state_dtypes(dtype, tmp_path):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    attn = layer("gated")
    pool, state = la.StreamPool(attn, 2, dtype=dtype), attn.init_state(1, dtype)
    id_ = pool.open()
    pool.checkpoint(id_)
    kept = None
    for turn in range(5):
        given = {name: a.astype("float64") for name, a in tokens(attn, 1, None, turn).items()}
        np.testing.assert_array_equal(pool.step([id_], **given), attn.step(**given, state=state))
        kept = state.copy() if turn == 2 else kept if turn > 2 else None
    same(pool, id_, state)
    pool.save(tmp_path / "p")
    same(pool, pool.load(tmp_path / "p")[id_], state)
    pool.rollback(id_, 2)
    same(pool, id_, kept)
    with pytest.raises(StateMismatchError, match=dtype):
        pool.open(attn.init_state(1))


@pytest.mark.nojit
@pytest.mark.parametrize("normalize", [True, False])
def test_streams_in_two_parts(normalize, tmp_path):
    attn = layer("linear", normalize=normalize)
    pool, T = la.StreamPool(attn, 3, compensated=True), 40  # the totals are added to every 32 tokens
    ids, lengths = [pool.open(), pool.open()], np.array([T, T - 3])
    states = [attn.init_state(compensated=True) for _ in ids]
    given = tokens(attn, 2, T)
    y = pool.prefill(ids, **given, lengths=lengths)
    for i, state in enumerate(states):
        want = attn.prefill(**row(given, i), state=state, lengths=lengths[i : i + 1])
        np.testing.assert_array_equal(y[i], want[0])
    fork = pool.fork(ids[1])
    for turn in range(30):
        given = tokens(attn, 2, None, turn)
        y = pool.step([ids[0], fork], **given)
        if turn < 20:
            np.testing.assert_array_equal(y[:1], attn.step(**row(given, 0), state=states[0]))
        np.testing.assert_array_equal(y[1:], attn.step(**row(given, 1), state=states[1]))
        if turn == 14:
            pool.checkpoint(ids[0])
    pool.rollback(ids[0], 10)
    pool.save(tmp_path / "p")
    again = la.StreamPool(attn, 3, compensated=True)
    now = again.load(tmp_path / "p")
    for id_, state in zip((ids[0], fork), states, strict=True):
        same(pool, id_, state)
        same(again, now[id_], state)
    with pytest.raises(SnapshotError, match="compensated is 'True' in the file, 'False' here"):
        la.StreamPool(attn, 3).load(tmp_path / "p")
    with pytest.raises(StateMismatchError, match="float32 in two parts, as the pool is, got float32"):
        pool.open(attn.init_state())


def test_only_sums_come_in_two_parts():
    with pytest.raises(ValueError, match="'gated' forgets"):
        la.StreamPool(layer("gated"), 1, compensated=True)
    with pytest.raises(ValueError, match="compensated: expected True or False"):
        la.StreamPool(layer("linear"), 1, compensated=1)
    with pytest.raises(ValueError, match="compensated: of a pool of a layer"):
        la.StreamPool(la.load_model(), 1, compensated=True)


@pytest.mark.nojit
def test_what_a_step_takes_and_gives():
    attn = layer("linear")
    pool = la.StreamPool(attn, 2)
    ids = [pool.open(), pool.open()]
    given = tokens(attn, 2)
    out = np.empty((2, H, 5), np.float32)
    assert pool.step(ids, **given, out=out) is out
    half = {name: a.astype(np.float16) for name, a in given.items()}
    assert pool.step(np.array(ids, np.uint64), **half).dtype == np.float16
    y, refused = pool.step(ids, **given, on_error="skip")
    assert y.shape == (2, H, 5) and refused == []
    assert pool.position(ids[0]) == 3
    assert pool.step([], **tokens(attn, 0)).shape == (0, H, 5)
    assert pool.prefill(ids, **tokens(attn, 2, 0)).shape == (2, 0, H, 5)
    with pytest.raises(ValueError, match="overlaps v"):
        pool.step(ids, given["q"], given["k"], out, out=out)
    assert pool.position(ids[0]) == 3


# ids


@pytest.mark.nojit
def test_ids_that_are_refused():
    attn = layer("linear")
    pool, other = la.StreamPool(attn, 3), la.StreamPool(attn, 2)
    first, gone, foreign = pool.open(), pool.open(), other.open()
    pool.close(gone)
    again = pool.open()
    assert again != gone  # same slot, another stream
    given = tokens(attn, 1)
    for bad in (gone, foreign, 0, 7, -1, 2**63, 2**70, first + (2 << 24)):
        assert bad not in pool
        with pytest.raises(StaleStreamError):
            pool.step([bad], **given)
        for method in (pool.close, pool.reset, pool.fork, pool.checkpoint, pool.state, pool.position):
            with pytest.raises(StaleStreamError):
                method(bad)
        with pytest.raises(StaleStreamError):
            pool.rollback(bad, 0)
    for bad in (1.5, "a", None, True, [first]):
        assert bad not in pool
        with pytest.raises(DtypeError, match="id: expected a stream's id"):
            pool.close(bad)
    with pytest.raises(DtypeError, match="ids: expected stream ids, whole numbers, got float64"):
        pool.step([1.5], **given)
    with pytest.raises(ShapeError, match="ids: expected a list or array"):
        pool.step(first, **given)
    with pytest.raises(ShapeError, match="got dict_keys"):
        pool.step({first: 1}.keys(), **given)
    with pytest.raises(StaleStreamError, match="row 0 is not open"):
        pool.step(np.array([2**63 + 5], np.uint64), **given)
    closed = (gone + (1 << 24)) | (gone & 0xFFFFFF)  # a number of even generation, which no stream ever has
    pool.close(again)
    with pytest.raises(StaleStreamError):
        pool.step([closed], **given)
    assert closed not in pool
    again = pool.open()
    assert pool.position(np.array(first)) == 0
    assert pool.step(np.array([first], object), **given).shape == (1, H, 5)
    pool.reset(first)
    with pytest.raises(StreamError, match="more than once"):
        pool.step([first, again, first], **tokens(attn, 3))
    with pytest.raises(StreamError, match="more than once"):
        pool.prefill([first, first], **tokens(attn, 2, 3), on_error="skip")
    assert pool.position(first) == pool.position(again) == 0
    assert len(pool) == 2 and first in pool


@pytest.mark.nojit
def test_a_call_with_rows_left_out_checks_the_rest_first():
    """What is wrong with the call as a whole is found before any stream is stepped."""
    attn = layer("linear")
    pool = la.StreamPool(attn, 2)
    good, given, many = pool.open(), tokens(attn, 2), tokens(attn, 2, 3)
    locked = np.zeros((2, H, 5), np.float32)
    locked.flags.writeable = False
    wrong = [locked, np.zeros((1, H, 5), np.float32), np.zeros((2, H, 5), np.int64), np.zeros((2, H, 5)), [0.0]]
    for ids in ([good, 12345], [2**70, good], [good, good + (2 << 24)]):
        for out in wrong:
            with pytest.raises((ValueError, TypeError), match="out"):
                pool.step(ids, **given, out=out, on_error="skip")
            with pytest.raises((ValueError, TypeError), match="out"):
                pool.prefill(ids, **many, out=out, on_error="skip")
        with pytest.raises(ShapeError, match="q"):
            pool.step(ids, **tokens(attn, 1), on_error="skip")
    assert pool.position(good) == 0
    out = np.full((2, H, 5), 7, np.float32)
    y, refused = pool.step([2**70, good], **given, out=out, on_error="skip")
    assert y is out and refused == [2**70] and (y[0] == 0).all() and pool.position(good) == 1
    given["k"][1, 0, 0] = np.nan
    with pytest.raises(NotFiniteError) as error:
        pool.step(np.array([pool.open(), good]), **given)
    assert str(error.value).startswith(f"stream {good}, row 1: k: nan (as float32) at token 0, index [0, 0]: it would")
    _, refused = pool.step([12345, good], **given, on_error="skip")
    assert refused == [12345, good] and pool.position(good) == 1


@pytest.mark.nojit
def test_a_stream_in_use_is_left_out():
    attn = layer("linear")
    pool = la.StreamPool(attn, 2)
    a, b = pool.open(), pool.open()
    given = tokens(attn, 2)
    with pool._taken(np.array([b])):
        for _ in range(2):
            _, refused = pool.step([a, b], **given, on_error="skip")
            assert refused == [b]
        y, refused = pool.prefill([b, a], **tokens(attn, 2, 3), on_error="skip")
        assert refused == [b] and (y[0] == 0).all() and (y[1] != 0).any()
        with pytest.raises(StreamError, match="in use") as error:
            pool.step([a, b], **given)
        assert error.value.row == 1
    assert pool.position(a) == 5 and pool.position(b) == 0


def test_a_checkpoint_of_a_stream_that_is_closed_meanwhile():
    """The memory that a record points to is kept, whatever happens between two lines of `checkpoint`."""
    attn = layer("linear")
    pool = la.StreamPool(attn, 1)
    given = tokens(attn, 1)

    class Slow(dict):
        def setdefault(self, slot, journal):
            if threading.current_thread().name == "slow":
                inside.set()
                go.wait(10)
            return super().setdefault(slot, journal)

    for reopen in (True, False):
        inside, go = threading.Event(), threading.Event()
        pool._journals = Slow()
        id_ = pool.open()
        errors = []

        def slow(id_=id_, errors=errors):
            try:
                pool.checkpoint(id_)
            except StaleStreamError as error:
                errors.append(error)

        thread = threading.Thread(target=slow, name="slow")
        thread.start()
        assert inside.wait(10)
        now = id_
        if reopen:
            pool.close(id_)
            now = pool.open()
        pool.checkpoint(now)
        want = pool.state(now).S
        go.set()
        thread.join()
        assert len(errors) == reopen
        record = pool._slab.record(now)[: layout.RECORD * 8].view(np.int64)
        assert record[layout.JOURNAL] == pool._journals[0].ctypes.data
        for _ in range(5):
            pool.step([now], **given)
        pool.rollback(now, 5)
        np.testing.assert_array_equal(pool.state(now).S, want)
        pool.close(now)
        assert pool.statistics().checkpoints == 0


@pytest.mark.nojit
def test_checkpoints_are_counted():
    attn = layer("linear")
    pool = la.StreamPool(attn, 2)
    a, b = pool.open(), pool.open()
    for id_ in (a, b):
        pool.checkpoint(id_)
    assert pool.statistics().checkpoints == 2
    pool.reset(a)
    assert pool.statistics().checkpoints == 1
    pool.close(b)
    with pytest.raises(StaleStreamError):
        pool.checkpoint(b)
    assert pool.statistics().checkpoints == 0 and len(pool._journals) == 1
    with pytest.raises(StreamError, match="no checkpoint"):
        pool.rollback(a, 0)


@pytest.mark.nojit
def test_a_refused_fork_takes_nothing():
    pool = la.StreamPool(layer(), 1, 4)
    pool.open()
    with pytest.raises(StaleStreamError):
        pool.fork(123)
    assert pool.capacity == 1


@pytest.mark.nojit
def test_nobody_sees_a_stream_before_its_content(tmp_path, monkeypatch):
    attn = layer("linear")
    pool = la.StreamPool(attn, 4)
    state = attn.init_state()
    attn.step(**tokens(attn, 1), state=state)
    put = la.StreamPool._put

    def looking(self, *rest):
        assert len(list(self)) == seen
        put(self, *rest)
        assert len(list(self)) == seen

    monkeypatch.setattr(la.StreamPool, "_put", looking)
    seen = 0
    a = pool.open(state)
    seen = 1
    b = pool.open(state)
    for id_ in (a, b):
        same(pool, id_, state)
    pool.save(tmp_path / "p")
    seen = 2
    for new in pool.load(tmp_path / "p").values():
        same(pool, new, state)
    assert len(pool) == 4
    pool.close(a)
    seen = 3
    with pytest.raises(PoolFullError):
        pool.load(tmp_path / "p")
    assert len(pool) == 3
    c = pool.open()  # in the slot that load had filled
    same(pool, c, attn.init_state())
    np.testing.assert_array_equal(
        pool.step([c], **tokens(attn, 1)), attn.step(**tokens(attn, 1), state=attn.init_state())
    )
    pool.close(c)
    assert pool.open(state) in pool

    def interrupted(self, *rest):
        raise KeyboardInterrupt

    pool.close(b)
    monkeypatch.setattr(la.StreamPool, "_put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.open(state)
    assert len(pool) == 3 and pool.open() in pool


@pytest.mark.nojit
def test_a_state_whose_position_can_not_be_is_refused():
    attn = layer("linear")
    pool = la.StreamPool(attn, 1)
    for position in (-5, 2**63 - 1):
        state = attn.init_state()
        state.position[...] = position
        with pytest.raises(ValueError, match="state: position"):
            pool.open(state)
    assert len(pool) == 0


@pytest.mark.nojit
def test_a_save_leaves_out_what_is_closed_meanwhile(tmp_path, monkeypatch):
    attn = layer("gated_delta")
    pool = la.StreamPool(attn, 12)
    ids = [pool.open() for _ in range(12)]
    pool.prefill(ids, **tokens(attn, 12, 5))
    states = {id_: pool.state(id_) for id_ in ids}
    image, gone = la.StreamPool._image, [ids[0], ids[5], ids[6], ids[11]]

    def closing(self, id_):
        if id_ in gone and id_ in self:
            self.close(id_)
        return image(self, id_)

    monkeypatch.setattr(la.StreamPool, "_image", closing)
    with pytest.raises(StaleStreamError, match=str(ids[0])):
        pool.save(tmp_path / "named", ids)
    assert list(tmp_path.iterdir()) == []
    pool.save(tmp_path / "p")
    monkeypatch.undo()
    made = la.StreamPool(attn, 12)
    now = made.load(tmp_path / "p")
    assert list(now) == [id_ for id_ in ids if id_ not in gone]
    for old, new in now.items():
        same(made, new, states[old])
    pool.save(tmp_path / "q", iter(now))
    assert (tmp_path / "p").read_bytes() == (tmp_path / "q").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p", "q"]
    pool.save(tmp_path / "r", now.keys())
    made.load(tmp_path / "r", {ids[1]})


@pytest.mark.nojit
def test_a_full_pool():
    pool = la.StreamPool(layer(), 1, 3)
    ids = [pool.open() for _ in range(3)]
    assert pool.capacity == 3
    with pytest.raises(PoolFullError, match="3 streams are open"):
        pool.open()
    with pytest.raises(PoolFullError):
        pool.fork(ids[0])
    pool.close(ids[1])
    pool.fork(ids[0])
    statistics = pool.statistics()
    assert statistics[:4] == (3, 3, 4, 1)
    assert "3 of 3" in repr(pool)


@pytest.mark.nojit
def test_a_slot_shows_nothing_of_its_last_stream(tmp_path):
    attn = layer("linear")
    pool = la.StreamPool(attn, 1, 2)
    old = pool.open()
    pool.step([old], **tokens(attn, 1))
    pool.checkpoint(old)
    fresh = attn.init_state()
    for look in ("state", "step", "fork", "save", "read", "reset"):
        if look == "reset":
            pool.step([old], **tokens(attn, 1))
            pool.reset(old)
            assert pool.statistics().tokens == 0
        else:
            pool.close(old)
            old = pool.open()
        if look == "fork":
            new = pool.fork(old)
            same(pool, new, fresh)
            pool.close(new)
        elif look == "save":
            pool.save(tmp_path / "p")
            new = pool.load(tmp_path / "p")[old]
            same(pool, new, fresh)
            pool.close(new)
        elif look == "step":
            given = tokens(attn, 1, None, 9)
            np.testing.assert_array_equal(pool.step([old], **given), attn.step(**given, state=attn.init_state()))
            continue
        same(pool, old, fresh)
        with pytest.raises(StreamError, match="no checkpoint"):
            pool.rollback(old, 0)


@pytest.mark.nojit
def test_states_in_and_out():
    attn = layer("gated")
    pool = la.StreamPool(attn, 3)
    state = attn.init_state()
    attn.prefill(**tokens(attn, 1, 4), state=state)
    id_ = pool.open(state)
    same(pool, id_, state)
    fork = pool.fork(id_)
    given = tokens(attn, 1)
    pool.step([id_], **given)
    same(pool, fork, state)
    attn.step(**given, state=state)
    same(pool, id_, state)
    pool.state(id_).S[...] = 0
    same(pool, id_, state)
    with pytest.raises(ShapeError, match="one stream"):
        pool.open(attn.init_state(2))
    with pytest.raises(StateMismatchError):
        pool.open(layer("linear").init_state())
    assert len(pool) == 2


# rows that are refused


@pytest.mark.nojit
def test_a_bad_row_is_named_and_no_row_is_stepped():
    attn = layer("gated")
    pool = la.StreamPool(attn, 4)
    ids = [pool.open() for _ in range(4)]
    given = tokens(attn, 4)
    given["v"][2, 1, 3] = np.nan
    with pytest.raises(NotFiniteError, match=f"stream {ids[2]}, row 2: v: nan"):
        pool.step(ids, **given)
    assert pool.statistics().tokens == 0
    given["g"][0] = -np.inf  # a reset is no error
    pool.close(ids[1])
    good = attn.init_state(2)
    want = attn.step(**{n: a[[0, 3]] for n, a in given.items()}, state=good)
    out = np.full((4, H, 5), 7, np.float32)
    y, refused = pool.step(ids, **given, on_error="skip", out=out)
    assert y is out and refused == [ids[1], ids[2]]
    np.testing.assert_array_equal(y[[0, 3]], want)
    np.testing.assert_array_equal(y[[1, 2]], 0)
    assert [pool.position(ids[i]) for i in (0, 2, 3)] == [1, 0, 1]
    given = tokens(attn, 3, 5)
    given["k"][1, 4] = np.inf
    rest = [ids[0], ids[2], ids[3]]
    with pytest.raises(NotFiniteError, match=f"stream {ids[2]}"):
        pool.prefill(rest, **given)
    y, refused = pool.prefill(rest, **given, on_error="skip", lengths=[5, 5, 2])
    assert refused == [ids[2]]
    y, refused = pool.prefill(rest, **given, on_error="skip", lengths=[5, 4, 2])
    assert refused == []
    assert [pool.position(i) for i in rest] == [11, 4, 5]


@pytest.mark.nojit
def test_a_row_beyond_the_horizon():
    attn = la.LinearAttention(H, D, 5, feature_map=la.CosFormer(max_len=3))
    pool = la.StreamPool(attn, 2)
    a, b = pool.open(), pool.open()
    pool.prefill([a], **tokens(attn, 1, 3))
    with pytest.raises(ValueError, match=f"stream {a}, row 1: cosformer"):
        pool.step([b, a], **tokens(attn, 2))
    _, refused = pool.step([b, a], **tokens(attn, 2), on_error="skip")
    assert refused == [a] and pool.position(b) == 1


@pytest.mark.nojit
def test_arguments_that_are_refused():
    attn = layer("gated")
    pool = la.StreamPool(attn, 2)
    ids = [pool.open()]
    given = tokens(attn, 1)
    for change in ({"q": given["q"][:, :1]}, {"v": given["v"][..., :2]}, {"k": np.zeros((2, H, D))}):
        with pytest.raises(ShapeError):
            pool.step(ids, **(given | change))
    with pytest.raises(ValueError, match="g"):
        pool.step(ids, given["q"], given["k"], given["v"])
    with pytest.raises(TypeError, match="q, k and v"):
        pool.step(ids, given["q"])
    with pytest.raises(ValueError, match="on_error"):
        pool.step(ids, **given, on_error="ignore")
    with pytest.raises(ValueError, match="lengths"):
        pool.prefill(ids, **tokens(attn, 1, 3), lengths=[4])
    with pytest.raises(ValueError, match="logits"):
        pool.prefill(ids, **tokens(attn, 1, 3), logits="some")
    assert pool.position(ids[0]) == 0
    with pytest.raises(TypeError, match="layer_or_model"):
        la.StreamPool("linear", 3)
    with pytest.raises(ValueError, match="reference"):
        la.StreamPool(layer(backend="reference"), 3)
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match="capacity"):
            la.StreamPool(attn, bad)
    with pytest.raises(ValueError, match="max_capacity"):
        la.StreamPool(attn, 3, 2)
    with pytest.raises(ValueError, match="window"):
        la.StreamPool(attn, 3, window=0)
    with pytest.raises(TypeError, match="pickled"):
        pool.__reduce__()


# rewinding


@pytest.mark.nojit
@pytest.mark.parametrize("name", RULES)
def test_rollback_is_to_the_bit(name):
    attn = layer(name)
    pool = la.StreamPool(attn, 2, window=6)
    id_, other = pool.open(), pool.open()
    pool.step([id_, other], **tokens(attn, 2, None, 50))
    pool.checkpoint(id_)
    states = [pool.state(id_)]
    for turn in range(6):
        given = tokens(attn, 2, None, turn, channels=turn % 2 == 1)
        pool.step([id_, other], **given)
        states.append(pool.state(id_))
    for n in (0, 1, 0, 2, 3):
        pool.rollback(id_, n)
        states = states[: len(states) - n]
        same(pool, id_, states[-1])
    pool.prefill([id_], **tokens(attn, 1, 4, 7), lengths=[3])
    pool.rollback(id_, 3)
    same(pool, id_, states[-1])
    with pytest.raises(StreamError, match="0 tokens have followed"):
        pool.rollback(id_, 1)
    pool.prefill([id_], **tokens(attn, 1, 7, 7))
    with pytest.raises(StreamError, match="than the window of 6"):
        pool.rollback(id_, 1)
    assert pool.position(other) == 7
    with pytest.raises(StreamError, match="no checkpoint"):
        pool.rollback(other, 1)
    pool.checkpoint(id_)
    pool.step([id_], **tokens(attn, 1))
    pool.rollback(id_, 1)
    with pytest.raises(StreamError, match="no checkpoint"):
        pool.rollback(pool.fork(id_) if len(pool) < pool.capacity else other, 0)
    with pytest.raises(ValueError, match="n: expected"):
        pool.rollback(id_, -1)
    assert pool.statistics().checkpoints == 1
    pool.close(id_)
    assert pool.statistics().checkpoints == 0


# a model


@pytest.fixture(scope="module")
def model():
    return la.load_model()


def test_a_model_checks_all_before_it_steps():
    model = la.load_model()
    pool = la.StreamPool(model, 2)
    a, b = pool.open(), pool.open()
    for out in (np.empty((2, 256)), np.empty((1, 256), np.float32), np.empty((2, 255), np.float32)):
        for on_error in ("raise", "skip"):
            for ids, ids_of_tokens in (([a, b], [1, 2]), ([a, 5], [1, 2]), ([a, b], [1, 300])):
                with pytest.raises((ValueError, TypeError)):
                    pool.step(ids, ids_of_tokens, out=out, on_error=on_error)
    with pytest.raises(TypeError, match="tokens, got None"):
        pool.step([a], None)
    assert pool.position(a) == pool.position(b) == 0
    out = np.empty((2, 256), np.float32)
    y, refused = pool.step([a, b], [1, 300], out=out, on_error="skip")
    assert y is out and refused == [b] and not out[1].any()


@pytest.mark.parametrize("padding", [-1, -100, 1 << 40])
def test_padding_of_a_model_is_not_looked_at(padding):
    model = la.load_model()
    pool, states = la.StreamPool(model, 2), model.init_state(2)
    tokens_, lengths = np.array([[1, 2, 3], [4, padding, padding]]), [3, 1]
    want = model.prefill(np.maximum(np.minimum(tokens_, 255), 0), states, lengths)
    np.testing.assert_array_equal(model.prefill(tokens_, model.init_state(2), lengths), want)
    ids = [pool.open(), pool.open()]
    np.testing.assert_array_equal(pool.prefill(ids, tokens_, lengths=lengths), want)
    with pytest.raises(ValueError, match="tokens: expected ids from 0 to 255"):
        model.prefill(tokens_, model.init_state(2), [3, 2])
    _, refused = pool.prefill(ids, tokens_, lengths=[3, 2], on_error="skip")
    assert refused == [ids[1]]


def test_a_model(model, tmp_path):
    pool = la.StreamPool(model, 3)
    ids = [pool.open() for _ in range(3)]
    states = model.init_state(3)
    prompt = np.random.default_rng(0).integers(0, model.vocab_size, (3, 70))
    np.testing.assert_array_equal(
        pool.prefill(ids, prompt, lengths=[70, 3, 0]), model.prefill(prompt, states, lengths=[70, 3, 0])
    )
    np.testing.assert_array_equal(
        pool.prefill(ids, prompt[:, :5], logits="last"), model.prefill(prompt[:, :5], states, logits="last")
    )
    out = np.empty((3, model.vocab_size), np.float32)
    assert pool.step(ids, [1, 2, 3], out=out) is out
    np.testing.assert_array_equal(out, model.step([1, 2, 3], states))
    pool.checkpoint(ids[1])
    before = pool.state(ids[1])
    kept = model.step([9], states.select([1]))
    np.testing.assert_array_equal(pool.step(ids[1:2], [9]), kept)
    between = pool.state(ids[1])
    pool.prefill(ids[1:2], [[4, 5, 6, 7]])
    for n, want in ((4, between), (1, before)):
        pool.rollback(ids[1], n)
        for got, layer_ in zip(pool.state(ids[1]).layers, want.layers, strict=True):
            np.testing.assert_array_equal(got.S, layer_.S)
            assert got.position.tolist() == layer_.position.tolist()
    pool.prefill(ids[1:2], np.ones((1, 17), int))
    with pytest.raises(StreamError, match="window"):
        pool.rollback(ids[1], 1)
    with pytest.raises(ValueError, match=f"stream {ids[2]}, row 1: tokens"):
        pool.step([ids[0], ids[2]], [1, model.vocab_size])
    y, refused = pool.step([ids[0], ids[2]], [1, -1], on_error="skip")
    assert refused == [ids[2]]
    np.testing.assert_array_equal(y[0], model.step([1], states.select([0]))[0])
    pool.save(tmp_path / "p")
    other = la.StreamPool(model, 3)
    moved = other.load(tmp_path / "p")
    np.testing.assert_array_equal(pool.step(ids, [7, 8, 9]), other.step([moved[i] for i in ids], [7, 8, 9]))
    with pytest.raises(TypeError, match="ids and tokens"):
        pool.step(ids, [1, 2, 3], [1, 2, 3])
    pool.close(ids[0])
    new = pool.open(states.select([0]))
    assert pool.position(new) == states.position[0]
    np.testing.assert_array_equal(pool.step([new], [3]), model.step([3], states.select([0])))
    with pytest.raises(ValueError, match="float32"):
        la.StreamPool(model, 1, dtype="float64")


# files


@pytest.mark.nojit
def test_files(tmp_path):
    attn = layer("gated")
    pool = la.StreamPool(attn, 3)
    ids = [pool.open() for _ in range(3)]
    pool.prefill(ids, **tokens(attn, 3, 4), lengths=[1, 2, 4])
    path = tmp_path / "streams"
    pool.save(path)
    other = la.StreamPool(attn, 2, 8)
    moved = other.load(path)
    assert list(moved) == ids
    for id_ in ids:
        same(other, moved[id_], pool.state(id_))
    part = other.load(path, [ids[2]])
    assert list(part) == [ids[2]] and other.position(part[ids[2]]) == 4
    with pytest.raises(SnapshotError, match="stream 5 is not in it"):
        other.load(path, [5])
    with pytest.raises(StreamError, match="more than once"):
        other.load(path, [ids[0], ids[0]])
    pool.save(path, ids[:1])
    assert list(other.load(path)) == ids[:1]
    pool.save(path, [])
    assert other.load(path) == {}
    with pytest.raises(SnapshotError, match="is not in it"):
        other.load(path, [ids[0]])
    with pytest.raises(StaleStreamError):
        pool.save(path, [7])
    assert other.load(path) == {}  # the old file is whole
    with pytest.raises(SnapshotError, match="another layer"):
        la.StreamPool(layer("linear"), 3).load(path)
    with pytest.raises(SnapshotError, match="dtype"):
        la.StreamPool(attn, 3, dtype="float64").load(path)
    with pytest.raises(FileNotFoundError):
        pool.load(tmp_path / "none")
    assert [p.name for p in tmp_path.iterdir()] == ["streams"]


@pytest.mark.nojit
def test_a_file_that_does_not_fit_opens_nothing(tmp_path):
    attn = layer("linear")
    pool = la.StreamPool(attn, 3)
    ids = [pool.open() for _ in range(3)]
    pool.save(tmp_path / "p")
    small = la.StreamPool(attn, 2)
    with pytest.raises(PoolFullError):
        small.load(tmp_path / "p")
    assert len(small) == 0
    assert list(small.load(tmp_path / "p", ids[:2])) == ids[:2]


def damage(tmp_path, flips):
    attn = layer("linear")
    pool = la.StreamPool(attn, 3)
    ids = [pool.open() for _ in range(3)]
    pool.prefill(ids, **tokens(attn, 3, 4))
    path = tmp_path / "p"
    pool.save(path)
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    places = rng.integers(0, len(good), flips)
    for at in [0, 7, 8, 20, len(good) - 1, *places.tolist()]:
        bad = bytearray(good)
        bad[at] ^= int(rng.integers(1, 256))
        path.write_bytes(bad)
        with pytest.raises(SnapshotError):
            la.StreamPool(attn, 3).load(path)
    for length in [0, 5, 8, 100, len(good) - 1, len(good) + 1, *rng.integers(0, len(good), flips // 10).tolist()]:
        path.write_bytes(good[:length] + b"\0" * max(0, length - len(good)))
        with pytest.raises(SnapshotError):
            pool.load(path)
    path.write_bytes(good)
    assert len(pool) == 3
    assert len(la.StreamPool(attn, 3).load(path)) == 3


def test_a_damaged_file_is_refused(tmp_path):
    damage(tmp_path, 100)


@pytest.mark.slow
def test_a_thousand_damaged_files_are_refused(tmp_path):
    damage(tmp_path, 1000)


KILL = """
import os, random, signal, sys, time
import numpy as np
import linattn_edge as la

path, moments = sys.argv[1], int(sys.argv[2])
attn = la.LinearAttention(4, 32, update_rule="gated")
pool = la.StreamPool(attn, 40)
ids = [pool.open() for _ in range(40)]
one = np.ones((40, 4, 32), np.float32)
g = np.zeros((40, 4), np.float32)

def write():  # file n holds streams of n tokens
    pool.step(ids, one, one, one, g)
    pool.save(path)

write()
start = time.perf_counter()
for _ in range(5):
    write()
took = (time.perf_counter() - start) / 5
random.seed(0)
old = 0
for moment in range(moments):
    child = os.fork()
    if child == 0:
        try:
            while True:
                write()
        finally:
            os._exit(1)
    time.sleep(random.random() * 4 * took)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    found = la.StreamPool(attn, 40)
    streams = list(found.load(path).values())
    seen = {found.position(i) for i in streams}
    assert len(streams) == 40 and len(seen) == 1, seen
    count = seen.pop()
    assert all((found.state(i).S == float(count) * found.state(i).S[0, 0, 0, 0] / count).all() for i in streams)
    old = max(old, count)
print("whole", old)
"""


def kill(tmp_path, moments):
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KILL, str(tmp_path / "p"), str(moments)],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.stdout.startswith("whole"), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_kill_during_a_save_leaves_a_whole_file(tmp_path):
    kill(tmp_path, 5)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_fifty_kills(tmp_path):
    kill(tmp_path, 50)


# everything, in any order


class Streams(RuleBasedStateMachine):
    """A pool beside a plain list of independent states."""

    folder: Path

    @initialize(name=st.sampled_from(RULES), seed=st.integers(0, 2**31), long=st.booleans())
    def begin(self, name, seed, long):
        self.attn, self.long = layer(name), long and name == "linear"
        self.rng = np.random.default_rng(seed)
        self.pool = la.StreamPool(self.attn, 2, 12, window=4, compensated=self.long)
        self.states, self.marks, self.gone, self.file = {}, {}, [], None

    def some(self):
        return self.rng.permutation(list(self.states))[: self.rng.integers(0, len(self.states) + 1)].tolist()

    def one(self):
        return int(self.rng.choice(list(self.states)))

    @rule()
    def open(self):
        if len(self.states) == 12:
            with pytest.raises(PoolFullError):
                self.pool.open()
            return
        id_ = self.pool.open()
        assert id_ not in self.states and id_ not in self.gone
        self.states[id_] = self.attn.init_state(compensated=self.long)

    @precondition(lambda self: self.states)
    @rule()
    def fork(self):
        id_ = self.one()
        if len(self.states) < 12:
            self.states[self.pool.fork(id_)] = self.states[id_].copy()

    @precondition(lambda self: self.states)
    @rule()
    def close(self):
        id_ = self.one()
        self.pool.close(id_)
        del self.states[id_]
        self.marks.pop(id_, None)
        self.gone.append(id_)

    @precondition(lambda self: self.states)
    @rule()
    def reset(self):
        id_ = self.one()
        self.pool.reset(id_)
        self.states[id_] = self.attn.init_state(compensated=self.long)
        self.marks.pop(id_, None)

    @rule(T=st.sampled_from([None, None, None, 1, 3, 6]))
    def tokens(self, T):
        ids = self.some()
        given = tokens(self.attn, len(ids), T, int(self.rng.integers(1 << 30)), bool(self.rng.integers(2)))
        y = self.pool.step(ids, **given) if T is None else self.pool.prefill(ids, **given)
        for i, id_ in enumerate(ids):
            state, mine = self.states[id_], row(given, i)
            if id_ in self.marks:
                for t in range(T or 1):
                    self.marks[id_].append(mine if T is None else {n: a[:, t] for n, a in mine.items()})
            want = self.attn.step(**mine, state=state) if T is None else self.attn.prefill(**mine, state=state)
            np.testing.assert_array_equal(y[i], want[0])

    @precondition(lambda self: self.states)
    @rule()
    def checkpoint(self):
        id_ = self.one()
        self.pool.checkpoint(id_)
        self.marks[id_] = [self.states[id_].copy()]

    @precondition(lambda self: self.states)
    @rule(n=st.integers(0, 4))
    def rollback(self, n):
        id_ = self.one()
        mark = self.marks.get(id_)
        if mark is None or len(mark) > 5 or n > len(mark) - 1:
            with pytest.raises(StreamError):
                self.pool.rollback(id_, n)
            return
        self.pool.rollback(id_, n)
        self.marks[id_] = mark[: len(mark) - n]
        self.states[id_] = mark[0].copy()
        for given in self.marks[id_][1:]:
            self.attn.step(**given, state=self.states[id_])

    @rule()
    def save(self):
        ids = self.some()
        self.pool.save(self.folder / "p", ids)
        self.file = {id_: self.states[id_].copy() for id_ in ids}

    @precondition(lambda self: self.file is not None)
    @rule()
    def load(self):
        if len(self.file) + len(self.states) > 12:
            with pytest.raises(PoolFullError):
                self.pool.load(self.folder / "p")
            return
        for old, new in self.pool.load(self.folder / "p").items():
            self.states[new] = self.file[old].copy()

    @precondition(lambda self: self.gone)
    @rule()
    def stale(self):
        with pytest.raises(StaleStreamError):
            self.pool.step([int(self.rng.choice(self.gone))], **tokens(self.attn, 1))

    @invariant()
    def nothing_is_lost_or_mixed(self):
        if not hasattr(self, "pool"):
            return
        assert sorted(self.pool) == sorted(self.states)
        assert len(self.pool) == len(self.states)
        if self.states:
            id_ = self.one()
            same(self.pool, id_, self.states[id_])

    def teardown(self):
        for id_, state in getattr(self, "states", {}).items():
            same(self.pool, id_, state)


def drive(folder, examples, steps):
    Streams.folder = folder
    phases = [phase for phase in Phase if phase != Phase.explain]  # which traces each line, for a failure's sake
    options = settings(max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True, phases=phases)
    run_state_machine_as_test(Streams, settings=options)


@pytest.mark.nojit
def test_operations_in_any_order(tmp_path):
    drive(tmp_path, *((5, 20) if NOJIT else (30, 50)))


@pytest.mark.slow
def test_twenty_thousand_operations(tmp_path):
    drive(tmp_path, 200, 100)


# threads


def crowd(seconds, threads):
    """Threads with streams of their own, opened, stepped, forked, rewound and closed; then the same by one alone."""
    attn = layer("gated_delta")
    pool = la.StreamPool(attn, 8, 400)
    stop = time.monotonic() + seconds
    failures, logs = [], {}

    def work(number):
        rng = np.random.default_rng(number)
        mine, log = {}, []
        try:
            while time.monotonic() < stop and len(log) < 40_000:
                choice = rng.random()
                if len(mine) < 3 or (choice < 0.05 and len(mine) < 20):
                    mine[pool.open()] = len(log)
                    log.append(("open", list(mine)[-1]))
                elif choice < 0.1:
                    id_ = int(rng.choice(list(mine)))
                    new = pool.fork(id_)
                    mine[new] = 0
                    log.append(("fork", id_, new))
                elif choice < 0.2 and len(mine) > 3:
                    id_ = int(rng.choice(list(mine)))
                    pool.close(id_)
                    del mine[id_]
                    log.append(("close", id_))
                else:
                    ids = rng.permutation(list(mine))[: rng.integers(1, 6)].tolist()
                    seed = int(rng.integers(1 << 30))
                    log.append(("step", ids, seed, pool.step(ids, **tokens(attn, len(ids), None, seed))))
                if len(mine) > 20:
                    pool.close(next(iter(mine)))
                    log.append(("close", next(iter(mine))))
                    del mine[next(iter(mine))]
        except Exception as error:
            failures.append(error)
        logs[number] = log

    crew = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join()
    assert not failures, failures
    steps = 0
    for log in logs.values():
        states = {}
        for entry in log:
            if entry[0] == "open":
                states[entry[1]] = attn.init_state()
            elif entry[0] == "fork":
                states[entry[2]] = states[entry[1]].copy()
            elif entry[0] == "close":
                del states[entry[1]]
            else:
                _, ids, seed, y = entry
                given = tokens(attn, len(ids), None, seed)
                for i, id_ in enumerate(ids):
                    np.testing.assert_array_equal(attn.step(**row(given, i), state=states[id_])[0], y[i])
                    steps += 1
    return steps


def test_threads_with_streams_of_their_own():
    assert crowd(1, 6) > 100


@pytest.mark.slow
def test_sixteen_threads_for_half_a_minute():
    assert crowd(30, 16) > 10_000


@pytest.mark.skipif(NOJIT, reason="interpreted calls hold the GIL")
def test_one_stream_has_one_thread_at_a_time(tmp_path):
    attn = la.LinearAttention(8, 64, update_rule="gated")
    pool = la.StreamPool(attn, 8)
    ids = [pool.open() for _ in range(4)]
    T = 600
    given = tokens(attn, 4, T)
    tried, busy = 0, 0

    def prefill():
        while True:
            with contextlib.suppress(StreamError):  # the other one had it first
                return pool.prefill(ids, **given)

    for _ in range(20):
        thread = threading.Thread(target=prefill)
        thread.start()
        while thread.is_alive():
            tried += 1
            try:
                pool.step(ids[3:], **tokens(attn, 1))
            except StreamError as error:
                busy += "in use by another thread" in str(error)
        thread.join()
    assert 0 < busy <= tried
    assert pool.position(ids[3]) == 20 * T + tried - busy
    assert pool.position(ids[0]) == 20 * T
    thread = threading.Thread(target=prefill)
    thread.start()
    copies = [pool.fork(ids[0]), pool.state(ids[1])]  # these wait
    pool.save(tmp_path / "p")
    thread.join()
    assert pool.position(copies[0]) in (20 * T, 21 * T)


def test_helpers_share_a_call():
    one, two = (la.LinearAttention(32, 32, update_rule="gated", num_threads=n) for n in (1, 2))
    pools = [la.StreamPool(attn, 20) for attn in (one, two)]
    ids = [[pool.open() for _ in range(20)] for pool in pools]
    for turn in range(5):
        given = tokens(one, 20, None, turn)
        first, second = (pool.step(each, **given) for pool, each in zip(pools, ids, strict=True))
        np.testing.assert_array_equal(first, second)
